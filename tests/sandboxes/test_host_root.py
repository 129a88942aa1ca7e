"""The host's own root as a sandbox's: its programs are there, and nothing that is anybody's."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.images.errors import ImageRefused, ReferenceInvalid
from kuberoll_workers.sandboxes.images.presence import absence
from kuberoll_workers.sandboxes.images.references import HOST, HostReference, parse
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.host import make_root, problem, volatile_mounts
from kuberoll_workers.sandboxes.users import id_map
from tests.sandboxes.conftest import cache, sandboxes  # noqa: F401 - fixtures
from tests.sandboxes.people import ordinary


def test_what_names_it() -> None:
    assert parse(HOST) == HostReference()
    assert str(parse(HOST)) == HOST
    assert absence(HOST) is None
    with pytest.raises(ReferenceInvalid, match="write 'host:/'"):
        parse("host:/usr")


def test_who_has_it_not_says_the_way_out(tmp_path: Path) -> None:
    reason = DockerDriver(cache=tmp_path).refusal(SandboxSpec(image=HOST))
    assert reason is not None
    assert "KUBEROLL_SANDBOX_DRIVER=namespaces" in reason
    with pytest.raises(ImageRefused, match="is no image"):
        ImageStore(tmp_path, id_map()).image(HOST)


def test_what_is_made_of_a_host(tmp_path: Path) -> None:
    host = tmp_path / "host"
    for name in (
        "usr/bin",
        "usr/local/etc",
        "lib64",
        "etc/ssl/certs",
        "etc/ssl/private",
        "etc/ssh",
        "root",
        "home/ada",
    ):
        (host / name).mkdir(parents=True)
    (host / "bin").symlink_to("usr/bin")
    open_files = {"etc/ld.so.cache": "cache", "etc/ssl/certs/ca.pem": "certificate", "etc/services": "http 80/tcp"}
    closed = {"etc/shadow": "hash", "etc/ssl/private/key": "key", "etc/ssh/host_key": "key", "etc/passwd": "ada:x:1"}
    for name, text in {**open_files, **closed}.items():
        (host / name).write_text(text)
    (host / "etc/ssl/certs/mine.pem").write_text("a key beside its certificate")
    (host / "etc/ssl/certs/mine.pem").chmod(0o600)
    made = make_root(tmp_path / "root", id_map(), host=host)
    assert made.shown == ("usr", "lib64")
    assert made.covered == ("usr/local/etc",)
    root = tmp_path / "root"
    assert (root / "bin").readlink() == Path("usr/bin")
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == {*open_files, "etc/passwd", "etc/group", "etc/nsswitch.conf"}
    assert "ada" not in (root / "etc/passwd").read_text()
    assert list((root / "home").iterdir()) == [root / "home/user"]


def test_what_is_mounted_from_memory_is_covered() -> None:
    lines = [
        "1 0 0:1 / /usr rw - ext4 /dev/a rw",
        "2 1 0:2 / /usr/share/secret\\040token ro shared:7 - tmpfs tmpfs rw",
        "3 1 0:3 /key /usr/lib/key ro - tmpfs tmpfs rw",
        "4 1 0:4 / /usr/local rw - ext4 /dev/b rw",
        "5 0 0:5 / /run rw - tmpfs tmpfs rw",
    ]
    assert volatile_mounts("\n".join(lines), ["usr"]) == ["usr/share/secret token", "usr/lib/key"]


@pytest.mark.processes
@pytest.mark.slow
async def test_programs_run_and_nothing_is_read_or_changed(sandboxes: Sandboxes, tmp_path: Path) -> None:  # noqa: F811
    if (reason := problem()) is not None:
        pytest.skip(reason)
    secret = tmp_path / "secret"
    secret.write_text("a secret of this machine")
    secret.chmod(0o644)
    async with sandboxes.lease(SandboxSpec(image=HOST)) as one:
        box = one.sandbox

        async def said(command: str, user: str = "0") -> str:
            return (await box.exec(command, user=user, merged=True, timeout=60)).text.strip()

        assert await said("id -un; pwd; echo there > /work/file; cat file") == "root\n/work\nthere"
        assert await said("id -u; echo ~; touch ~/mine && ls ~", user="user") == "1000\n/home/user\nmine"
        for place in ("/root", "/run", "/var/lib", "/opt", "/srv", "/tmp"):
            assert await said(f"ls -A {place}") == ""
        for path in (secret, Path.home() / ".ssh", "/etc/shadow", "/etc/ssh", "/run/docker.sock", "/var/run/secrets"):
            assert await said(f"cat {path}") == f"cat: {path}: No such file or directory"
        for path in ("/usr/bin/new", "/usr/bin/env"):
            assert (await box.exec(f"echo > {path}", timeout=60)).exit_code != 0
        assert await said("find / -xdev -name secret -not -path '/proc/*'") == ""
    assert secret.read_text() == "a secret of this machine"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("subordinate", [False, True])
def test_an_ordinary_user_has_it_too(subordinate: bool) -> None:
    script = """
    import asyncio, sys
    from pathlib import Path
    from kuberoll_workers.sandboxes.driver import SandboxSpec
    from kuberoll_workers.sandboxes.errors import SandboxUnavailable
    from kuberoll_workers.sandboxes.leases import Sandboxes
    from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver

    async def main():
        sandboxes = Sandboxes(NamespaceDriver(cache=Path.home() / "cache", scratch=Path.home()))
        try:
            async with sandboxes.lease(SandboxSpec(image="host:/")) as one:
                for command in ("id -un", "touch /usr/x", f"ls -d {Path.home()}", "touch ~/x && ls -l /etc/passwd"):
                    print((await one.sandbox.exec(command, merged=True, timeout=60)).text.strip())
        except SandboxUnavailable as error:
            print("unavailable", error)
        finally:
            await sandboxes.close()

    asyncio.run(main())
    """
    with ordinary(subordinate=subordinate) as person:
        lines = person.run([sys.executable, "-c", textwrap.dedent(script)]).stdout.splitlines()
        if lines[0].startswith("unavailable"):
            pytest.skip(lines[0])
        assert lines[:2] == ["root", "touch: cannot touch '/usr/x': Read-only file system"]
        assert lines[2] == f"ls: cannot access '{person.home}': No such file or directory"
        assert lines[3].split()[2:4] == ["root", "root"]
        assert {path.name for path in person.home.iterdir()} == {"cache"}


def test_a_host_with_its_programs_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "realpath", lambda _: "/nix/store/bash/bin/bash")
    reason = problem()
    assert reason is not None
    assert "/nix/store" in reason
