"""Sandboxes in containers of Podman and of Docker, which run here for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kuberoll_api.sandboxes import RUNTIME_VARIABLE
from kuberoll_workers.sandboxes.containers import body, images, owners
from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.handle import Sandbox
from tests.sandboxes.contract import DriverContract, Machines, Traces, running
from tests.sandboxes.engines import ContainerEngine, Docker, MissingTools, Podman
from tests.sandboxes.engines import running as running_engine
from tests.sandboxes.layouts import BUSYBOX, write_layout
from tests.sandboxes.making import Making
from tests.sandboxes.registry import serving

pytestmark = pytest.mark.images


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    found = Path(tempfile.mkdtemp(prefix="kuberoll-test-", dir="/tmp"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="class")
def engine(request: pytest.FixtureRequest, place: Path) -> Iterator[ContainerEngine]:
    kind = request.cls.engine
    try:
        with running_engine(kind, place / kind.__name__.lower()) as engine:
            yield engine
    except MissingTools as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="class")
def making(engine: ContainerEngine, place: Path, cache: Path) -> Making:
    variables = {"DOCKER_HOST": engine.url, "TMPDIR": str(place)}
    arguments = {"cache": cache, "variables": variables}
    return Making(f"{DockerDriver.__module__}:{DockerDriver.__name__}", arguments)


@pytest.fixture(scope="class")
def traces(engine: ContainerEngine, place: Path) -> Traces:
    return lambda: engine.traces() | {f"directory {path}" for path in place.glob("kuberoll-containers-*")}


class EngineContract(DriverContract):
    """The contract with an engine, and what else is true of containers.

    Limits of what a container writes take XFS with project quotas, which few machines have.
    """

    limits_storage = False
    engine: type[ContainerEngine]
    changes: tuple[str, ...] = ()

    async def test_rights_and_limits_are_those_that_were_meant(
        self, machines: Machines, engine: ContainerEngine
    ) -> None:
        async with machines.one(memory=256 << 20, cpus=0.5, processes=100) as sandbox:
            status = (await sandbox.exec(["cat", "/proc/self/status"])).text
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT,
            # AUDIT_WRITE and SETFCAP, by their numbers in `capability.h`.
            assert int(fields["CapBnd"], 16) == sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31))
            assert fields["Seccomp"] == "2"
            # A task's own `sudo` works.
            assert fields["NoNewPrivs"] == "0"
            score = int((await sandbox.exec(["cat", "/proc/1/oom_score_adj"])).text)
            assert 200 < score < 500
            shm = (await sandbox.exec(["stat", "-f", "-c", "%b %S", "/dev/shm"])).text.split()
            assert int(shm[0]) * int(shm[1]) == 64 << 20
            with contextlib.closing(engine.client()) as client:
                host = client.inspect_container(f"kuberoll-{sandbox.name}")["HostConfig"]
            assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (256 << 20, 256 << 20, 108)
            assert host["NanoCpus"] == 500_000_000
            assert not host["Privileged"]

    async def test_a_full_memory_of_files_ends_no_server(self, machines: Machines) -> None:
        async with machines.one("workdir", memory=128 << 20, read_only=True) as sandbox:
            for place in ("/dev/shm", "/tmp", "/run"):
                done = await sandbox.exec(["dd", "if=/dev/zero", f"of={place}/file", "bs=1M"], user="root")
                assert "No space left" in done.errors
            assert (await sandbox.exec(["echo", "here"])).text == "here\n"

    async def test_its_address_is_for_this_user_alone(self, sandbox: Sandbox) -> None:
        place = Path(sandbox._pool.ticket.address.removeprefix("unix:"))
        directory = await asyncio.to_thread(place.parent.stat)
        assert (directory.st_mode & 0o777, directory.st_uid) == (0o700, os.geteuid())
        for command in ("touch /.kuberoll-socket/mine", "touch /.kuberoll/mine", "echo x > /.kuberoll/ld"):
            assert not (await sandbox.exec(command, user="root")).succeeded

    async def test_images_are_loaded_once_and_take_nobodys_name(
        self, machines: Machines, engine: ContainerEngine, tmp_path: Path
    ) -> None:
        layers = [_layer({"one": b"1"}), _layer({"two": b"2"})]
        for name, packed in (("plain", None), ("zip", gzip.compress)):
            config = {"Env": [f"NAME={name}"], "WorkingDir": "/srv"}
            layout = write_layout(tmp_path / name, layers, config, packed=packed)
            with contextlib.closing(engine.client()) as client:
                before = {image["Id"] for image in client.images()}
                await asyncio.gather(*(machines.driver.prepare(layout) for _ in range(3)))
                [new] = [image for image in client.images() if image["Id"] not in before]
                await machines.driver.prepare(layout)
                assert {image["Id"] for image in client.images()} == before | {new["Id"]}
                [tag] = new["RepoTags"]
                assert tag.startswith("localhost/kuberoll/sandbox:")
                found = client.inspect_image(tag)
                assert found["Config"]["Env"] == [f"NAME={name}"]
                saved = tmp_path / f"{name}.tar"
                # What others have saved has names, which here may be those of other images.
                client.tag(tag, "localhost/mine", "1")
                saved.write_bytes(b"".join(client.get_image("localhost/mine:1")))
                other = next(iter(before))
                client.tag(other, "localhost/mine", "1")
                await machines.driver.prepare(f"docker-archive:{saved}")
                assert client.inspect_image("localhost/mine:1")["Id"].removeprefix("sha256:") in other
                client.remove_image("localhost/mine:1")

    async def test_an_image_that_somebody_has_built(self, machines: Machines, engine: ContainerEngine) -> None:
        with contextlib.closing(engine.client()) as client:
            base = await asyncio.to_thread(images.obtain, client, machines.spec().image)
            made = client.create_container(base.id, command=["sh"])
            changes = ['ENTRYPOINT ["/bin/touch","/ran"]', "VOLUME /data", "USER app", "WORKDIR /data"]
            client.commit(made["Id"], "localhost/built", "1", changes=[*changes, *self.changes])
            client.remove_container(made["Id"])
        async with machines.one("localhost/built:1") as sandbox:
            done = await sandbox.exec("id -un; pwd; ls -d /ran /checked", merged=True)
            assert done.text.startswith("app\n/data\nls: /")
            with contextlib.closing(engine.client()) as client:
                found = client.inspect_container(f"kuberoll-{sandbox.name}")
                assert not (found["State"].get("Health") or {}).get("Log")

    async def test_an_image_of_a_registry(self, machines: Machines, images: dict[str, str]) -> None:
        layouts = {name: Path(images["user"].removeprefix("oci:")) for name in ("task", "private-task")}
        digest = json.loads((layouts["task"] / "index.json").read_text())["manifests"][0]["digest"]
        with serving(layouts) as (host, asked):
            await asyncio.gather(*(machines.driver.prepare(f"{host}/task:1") for _ in range(3)))
            assert len([path for path in asked if path.endswith("/manifests/1")]) <= 2
            asked.clear()
            async with machines.one(f"{host}/task:1") as sandbox:
                assert (await sandbox.exec("id -un")).text == "app\n"
            assert not asked
            async with machines.one(f"{host}/task@{digest}") as sandbox:
                assert (await sandbox.exec("id -un")).text == "app\n"
            with pytest.raises(SandboxUnavailable, match=r"private-task:1: the engine cannot pull it: .*docker login"):
                await machines.driver.prepare(f"{host}/private-task:1")
            with pytest.raises(SandboxUnavailable, match=r"none:1: the engine cannot pull it: .*check the name"):
                await machines.driver.prepare(f"{host}/none:1")

    async def test_what_a_container_says_at_its_early_end_is_known(
        self, machines: Machines, making: Making, traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = traces()
        broken = tmp_path / "runtime"
        broken.mkdir()
        monkeypatch.setenv(RUNTIME_VARIABLE, str(broken))
        assert BUSYBOX is not None
        driver = making.make()
        try:
            with pytest.raises(SandboxUnavailable, match=r"does not start.*/\.kuberoll/ld"):
                await driver.create(machines.name(), machines.spec())
            await asyncio.to_thread(shutil.copy, BUSYBOX, broken / "ld")
            with pytest.raises(SandboxLost, match=r"ended while it started, with exit code 127: ld: applet not found"):
                await driver.create(machines.name(), machines.spec())
            assert running(traces()) <= running(before)
        finally:
            await driver.close()

    async def test_somebody_else_may_remove_a_container(self, machines: Machines, engine: ContainerEngine) -> None:
        with contextlib.closing(engine.client()) as client:
            for end in (client.kill, client.stop, lambda name: client.remove_container(name, force=True)):
                async with machines.one() as sandbox, sandbox.start(["sleep", "1000"]) as process:
                    waiting = asyncio.create_task(process.wait())
                    await asyncio.to_thread(end, f"kuberoll-{sandbox.name}")
                    with pytest.raises(SandboxLost):
                        await waiting

    async def test_what_never_started_is_removed_by_the_next_driver(
        self, machines: Machines, making: Making, engine: ContainerEngine
    ) -> None:
        gone = owners.this_process()._replace(process=1 << 22, started=1)
        with contextlib.closing(engine.client()) as client:
            base = await asyncio.to_thread(images.obtain, client, machines.spec().image)
            owned = {
                "dead": {body.OWNER_LABEL: str(gone)},
                "alive": {body.OWNER_LABEL: str(owners.this_process())},
                "over": {body.OWNER_LABEL: "elsewhere", body.EXPIRES_LABEL: "1"},
                "foreign": {},
            }
            names = {}
            for kind, labels in owned.items():
                wanted = labels if kind == "foreign" else {body.SANDBOX_LABEL: kind, **labels}
                names[client.create_container(base.id, command=["sh"], labels=wanted)["Id"]] = kind
            driver = making.make()
            try:
                await driver.check()
            finally:
                await driver.close()
            left = {names[one["Id"]] for one in client.containers(all=True) if one["Id"] in names}
            assert left == {"alive", "foreign"}
            for container, kind in names.items():
                if kind in left:
                    client.remove_container(container)

    async def test_a_limit_that_the_engine_lacks_is_said_once(
        self, machines: Machines, making: Making, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver = making.make()
        try:
            for name in (machines.name(), machines.name()):
                await driver.create(name, machines.spec(storage=1 << 30))
        finally:
            await driver.close()
        said = [record.getMessage() for record in caplog.records if "cannot limit" in record.getMessage()]
        assert len(said) == 1
        assert "cannot limit what a sandbox writes to its files here" in said[0]


class TestPodman(EngineContract):
    engine = Podman

    async def test_with_a_network_there_is_one(self, machines: Machines) -> None:
        async with machines.one(network="All") as sandbox:
            routes = (await sandbox.exec(["cat", "/proc/net/route"])).text.splitlines()
            assert len(routes) > 1
            server = await asyncio.start_server(lambda _, writer: writer.close(), "0.0.0.0", 0)
            async with server:
                # The gateway is this machine: its address is that of the default route, in hexadecimal digits.
                gateway = socket.inet_ntoa(bytes.fromhex(routes[1].split()[2])[::-1])
                port = server.sockets[0].getsockname()[1]
                assert (await sandbox.exec(["nc", "-w", "5", gateway, str(port)])).succeeded

    async def test_an_engine_that_is_gone_is_named(self, making: Making, machines: Machines, place: Path) -> None:
        with running_engine(Podman, place / "second") as second:
            driver = replace(making, arguments={**making.arguments, "variables": {"DOCKER_HOST": second.url}}).make()
            try:
                name = machines.name()
                await driver.create(name, machines.spec())
                assert second._server is not None
                second._server.stop()
                with pytest.raises(SandboxUnavailable):
                    await driver.create(machines.name(), machines.spec())
                with pytest.raises(SandboxError, match="the engine does not answer"):
                    await driver.remove(name)
                second.start()
                await driver.remove(name)
                with contextlib.closing(second.client()) as client:
                    assert not client.containers(all=True)
            finally:
                await driver.close()


class TestDocker(EngineContract):
    engine = Docker
    changes = ('HEALTHCHECK --interval=1s CMD ["/bin/touch","/checked"]',)


def _layer(files: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()
