"""Sandboxes in namespaces: commands and files, whom they run as, what they reach, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

from kuberoll_workers.environments import process_tree
from kuberoll_workers.sandboxes.connection import Ticket, connect
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import CommandNotStarted, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.keys import context_of, make_key
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.runtime import find_runtime
from kuberoll_workers.sandboxes.shell import Shell
from tests.sandboxes.conftest import Leasing, left_in

pytestmark = pytest.mark.processes


async def lines(sandbox: Sandbox, command: str, **options: object) -> list[str]:
    done = await sandbox.exec(command, merged=True, timeout=30, **options)  # type: ignore[arg-type]
    return done.text.splitlines()


async def test_commands(lease: Leasing) -> None:
    async with lease() as one:
        box = one.sandbox
        done = await box.exec("echo out; echo err >&2; exit 3")
        assert (done.exit_code, done.signal, done.text, done.errors) == (3, None, "out\n", "err\n")
        done = await box.exec(["sh", "-c", "kill -TERM $$"])
        assert (done.exit_code, done.signal) == (None, signal.SIGTERM)
        whole = b"x" * (3 << 20)
        assert (await box.exec(["cat"], stdin=whole, output_bytes=4 << 20)).stdout == whole
        done = await box.exec("seq 1 100000", output_bytes=1000)
        assert done.stdout.startswith(b"1\n2\n")
        assert done.stdout.endswith(b"100000\n")
        assert len(done.stdout) + done.skipped[0] == sum(len(str(n)) + 1 for n in range(1, 100_001))
        assert await lines(box, "pwd; echo $GREETING $ADDED", environment={"ADDED": "there"}) == [
            "/work",
            "hello there",
        ]
        assert await lines(box, "pwd", workdir="/etc") == ["/etc"]
        with pytest.raises(CommandNotStarted, match="No such file or directory: nothing"):
            await box.exec(["nothing"])
        with pytest.raises(CommandNotStarted, match=r"working directory.*: /nowhere"):
            await box.exec("true", workdir="/nowhere")
        with pytest.raises(CommandNotStarted, match="no user 'nobody'"):
            await box.exec("true", user="nobody")


async def test_many_commands_at_once(lease: Leasing) -> None:
    async with lease(processes=500) as one:
        done = await asyncio.gather(*(one.sandbox.exec(["echo", str(number)]) for number in range(60)))
        assert [one.text for one in done] == [f"{number}\n" for number in range(60)]


async def test_what_a_command_started_ends_with_its_time_and_only_then(lease: Leasing) -> None:
    async with lease() as one:
        box = one.sandbox
        done = await box.exec("sleep 1000 & setsid sleep 1001 & (setsid setsid sleep 1002 &) ; sleep 1003", timeout=0.5)
        assert done.timed_out
        assert not [line for line in await lines(box, "ps") if "sleep" in line]
        assert await lines(box, "setsid sleep 1004 >/dev/null & echo started") == ["started"]
        assert [line for line in await lines(box, "ps") if "sleep 1004" in line]
        # Its output goes nowhere, and its keeper is not needed any more.
        await box.clear()
        left = await lines(box, "ps")
        assert not [line for line in left if "sleep" in line]


async def test_files(lease: Leasing, tmp_path: Path) -> None:
    async with lease() as one:
        box = one.sandbox
        await box.write("/deep/er/file", "text", mode=0o750)
        assert await lines(box, "stat -c '%a %u' /deep/er/file") == ["750 0"]
        assert await box.read("/deep/er/file", offset=1, size=2) == b"ex"
        await box.write("beside", "relative")
        assert await lines(box, "cat /work/beside") == ["relative"]
        await box.write("/home/app/own", b"mine", user="app")
        assert await lines(box, "stat -c '%u:%g %a' /home/app/own") == ["1000:1000 644"]
        await box.exec("chmod 600 /deep/er/file && ln -s /deep/er/file /link")
        await box.write("/link", "new")
        assert await lines(box, "stat -c '%a' /deep/er/file; cat /link") == ["600", "new"]
        # What was written can be executed at once.
        await box.write("/script", "#!/bin/sh\necho ran\n", mode=0o755)
        assert (await box.exec(["/script"])).text == "ran\n"
        for path, error in (("/nowhere", FileNotFoundError), ("/etc", IsADirectoryError)):
            with pytest.raises(error):
                await box.read(path)
        with pytest.raises(PermissionError):
            await box.read("/deep/er/file", user="app")
        with pytest.raises(PermissionError):
            await box.write("/etc/passwd", "mine", user="app")
        await box.exec("mkfifo /fifo")
        with pytest.raises(OSError, match="no ordinary file"):
            await box.read("/fifo")
        source = tmp_path / "tree"
        (source / "inner").mkdir(parents=True)
        (source / "inner" / "run").write_text("#!/bin/sh\n")
        (source / "inner" / "run").chmod(0o755)
        (source / "link").symlink_to("inner/run")
        await box.upload(source, "/tree")
        assert await lines(box, "stat -c '%a %F' /tree/inner/run; ls -l /tree/link | grep -c 'inner/run'") == [
            "755 regular file",
            "1",
        ]
        await box.remove("/tree/inner")
        await box.remove("/tree/inner")
        assert await lines(box, "ls /tree") == ["link"]


async def test_a_tree_from_inside_never_leads_out_of_its_place(lease: Leasing, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    async with lease() as one:
        box = one.sandbox
        await box.exec(
            "mkdir -p /tree/inner && cd /tree && echo ok > inner/file && ln -s inner/file good && "
            f"ln -s {secret} bad && ln -s / root && mkfifo pipe && ln -s {tmp_path} out"
        )
        await box.download("/tree", tmp_path / "got")
        await box.download("/tree/inner/file", tmp_path / "file")
    found = sorted(str(path.relative_to(tmp_path / "got")) for path in (tmp_path / "got").rglob("*"))
    assert found == ["good", "inner", "inner/file"]
    assert (tmp_path / "file").read_text() == "ok\n"
    assert secret.read_text() == "kept"


async def test_an_archive_of_others_never_leads_out_of_its_place_inside(lease: Leasing, tmp_path: Path) -> None:
    for name, kind, target in (("../etc/passwd", tarfile.REGTYPE, ""), ("link", tarfile.SYMTYPE, "/etc")):
        place = tmp_path / "bad.tar"
        with tarfile.open(place, "w") as archive:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
        async with lease() as one:
            with pytest.raises(OSError, match=r"outside|absolute"):
                await one.sandbox.unpack(place.read_bytes(), "/tree")
            assert (await one.sandbox.read("/etc/passwd")).startswith(b"root:")


async def test_users(lease: Leasing) -> None:
    async with lease() as one:
        assert await lines(one.sandbox, "id") == ["uid=0(root) gid=0(root)"]
        assert await lines(one.sandbox, "id; echo $HOME", user="app") == [
            "uid=1000(app) gid=1000(app) groups=10(wheel)",
            "/home/app",
        ]
        # Nothing of the server's own rights is left to it, nor can it stop what serves it.
        assert await lines(
            one.sandbox, "kill -9 1 2>&1; grep -c 'CapEff:.*[1-9a-f]' /proc/self/status", user="app"
        ) == [
            "sh: can't kill pid 1: Operation not permitted",
            "0",
        ]


async def test_what_a_sandbox_reaches(lease: Leasing) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with lease() as one:
            box = one.sandbox
            # Its own loopback, and nothing else.
            for host in ("127.0.0.1", "169.254.169.254", "10.0.0.1"):
                assert not (await box.exec(["nc", "-w", "2", host, str(port)], timeout=20)).succeeded
            assert await lines(box, "grep -c : /proc/net/dev; grep -vc Iface /proc/net/route") == ["1", "0"]
            inside = await box.forward("127.0.0.1", port)
            host, _, number = inside.partition(":")
            assert (await box.exec(["nc", "-w", "5", host, number], timeout=20)).succeeded


async def test_ports_of_a_sandbox(lease: Leasing) -> None:
    async with lease() as one, one.sandbox.start(["nc", "-ll", "-p", "8000", "-e", "cat"]):
        address = await one.sandbox.expose(8000)
        host, _, port = address.partition(":")
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"there and back")
            answer = await reader.read(100)
            writer.close()
            # Until the program listens, its port is closed.
            if answer:
                break
        assert answer == b"there and back"


async def test_the_server_inside_obeys_nobody_else(sandboxes: Sandboxes, lease: Leasing) -> None:
    async with lease() as one:
        ticket = one.sandbox._pool.ticket
        other = make_key()
        for name, key in ((ticket.name, other), ("another", ticket.key)):
            wrong = Ticket(name=name, address=ticket.address, certificate=key.certificate, private=key.private)
            with pytest.raises(SandboxLost):
                await connect(wrong, context_of(key))
        # Nothing inside can end it, hold it up, or look into it.
        signals = " ".join(str(number) for number in range(1, 65) if number not in (32, 33))
        assert (await lines(one.sandbox, f"for n in {signals}; do kill -$n 1; done; echo on"))[-1] == "on"
        assert "Permission denied" in (await lines(one.sandbox, "cat /proc/1/environ"))[0]
        assert not (await one.sandbox.exec("dd if=/proc/1/mem of=/dev/null bs=1 count=1", timeout=20)).succeeded
        await one.check()


async def test_limits(lease: Leasing) -> None:
    async with lease(processes=50, storage=8 << 20) as one:
        box = one.sandbox
        bomb = await box.exec("f() { f | f & }; f; sleep 1; echo on", timeout=20, merged=True)
        assert "can't fork" in bomb.text
        await box.clear()
        assert len(await lines(box, "ps")) < 6
        assert "No space left" in (await box.exec("dd if=/dev/zero of=/fill bs=1M count=20", merged=True)).text
        await box.exec("rm -f /fill")
        # Nor can what is in memory, and nobody frees, take that of the server.
        await box.exec("dd if=/dev/zero of=/dev/shm/fill bs=1M; yes > /fill")
        await one.check()
        await box.exec("rm -f /dev/shm/fill /fill")
        hog = await box.exec(["tail", "/dev/zero"], timeout=60)
        assert hog.signal == signal.SIGKILL
        await one.check()


async def test_ways_into_the_kernel_are_closed(lease: Leasing) -> None:
    async with lease() as one:
        for command in (
            "mount -t tmpfs none /mnt",
            "unshare -U true",
            "unshare -m true",
            "echo 1 > /proc/sys/kernel/core_uses_pid",
        ):
            assert not (await one.sandbox.exec(command)).succeeded, command


async def test_a_root_that_cannot_be_written_to(lease: Leasing) -> None:
    async with lease(read_only=True) as one:
        done = await one.sandbox.exec("echo a > /work/file || echo b > /tmp/file && cat /tmp/file", merged=True)
        assert "Read-only file system" in done.text
        assert done.text.endswith("b\n")


async def test_a_shell_goes_on(lease: Leasing) -> None:
    async with lease() as one:
        shell = Shell(one.sandbox, output_characters=1000)
        assert (await shell.run("cd /etc; export A=1; x=2", timeout=20)).exit_code == 0
        assert (await shell.run("pwd; echo $A $x", timeout=20)).output == "/etc\n1 2\n"
        done = await shell.run("echo 'it'\"'\"'s'; printf 'no newline'; false", timeout=20)
        assert (done.output, done.exit_code) == ("it's\nno newline", 1)
        # It cannot read what comes next, and a mistake of its syntax is its own.
        assert (await shell.run("cat; read line", timeout=20)).output == ""
        assert "syntax error" in (await shell.run("if then", timeout=20)).output
        done = await shell.run("exit 3", timeout=20)
        assert (done.exit_code, done.ended) == (3, True)
        assert (await shell.run("pwd", timeout=20)).output == "/work\n"
        done = await shell.run("echo before; sleep 1000", timeout=0.5)
        assert (done.output, done.timed_out, done.ended) == ("before\n", True, True)
        # The shell is gone at once for its user, and its processes soon after.
        async with asyncio.timeout(60):
            while [line for line in await lines(one.sandbox, "ps") if "sleep" in line]:
                pass
        long = (await shell.run("seq 1 10000", timeout=20)).output
        assert long.startswith("1\n2\n")
        assert long.endswith("9999\n10000\n")
        assert "bytes are left out here" in long
        await shell.close()


async def test_work_in_a_sandbox_that_is_gone_counts_for_nothing(lease: Leasing, sandboxes: Sandboxes) -> None:
    async def play(*, swallow: bool) -> str:
        async with lease() as one:
            [first] = [pid for pid in descendants_of_zygote(sandboxes) if is_server(pid)]
            os.kill(first, signal.SIGKILL)
            try:
                await one.sandbox.exec("true")
            except SandboxLost:
                if not swallow:
                    raise RuntimeError("an agent's own error") from None
            return "reward"

    for swallow in (True, False):
        with pytest.raises(SandboxLost):
            await play(swallow=swallow)
    assert (sandboxes.in_use, sandboxes.lost) == (0, 2)


def descendants_of_zygote(sandboxes: Sandboxes) -> list[int]:
    process = sandboxes._driver._process  # type: ignore[attr-defined]
    return list(process_tree.descendants(process.pid))


def is_server(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return (
        b"kuberoll_guest" in command and "NSpid:" in status and status.split("NSpid:")[1].split("\n")[0].endswith("\t1")
    )


async def test_a_sandbox_ends_with_its_lease(sandboxes: Sandboxes, busybox: str) -> None:
    driver = sandboxes._driver
    ticket = await driver.create("alone", SandboxSpec(image=busybox, lease_seconds=1.0))
    [first] = [pid for pid in descendants_of_zygote(sandboxes) if is_server(pid)]
    ended = os.pidfd_open(first)
    try:
        # Nobody renews it: what was heard last is the driver's own check.
        await asyncio.to_thread(select.select, [ended], [], [], 60.0)
        with pytest.raises(SandboxLost):
            await connect(ticket, context_of(ticket.key))
    finally:
        os.close(ended)
    await driver.remove("alone")


async def test_nothing_is_left_of_a_worker_that_is_killed(cache: Path, busybox: str, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from kuberoll_workers.sandboxes.driver import SandboxSpec
        from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver

        async def main():
            driver = NamespaceDriver(cache=Path({str(cache)!r}), scratch=Path({str(tmp_path)!r}))
            await asyncio.gather(*(driver.create(f"one-{{n}}", SandboxSpec(image={busybox!r})) for n in range(3)))
            print(driver._process.pid, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    worker = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    if not (line := worker.stdout.readline()):
        worker.wait()
        pytest.skip("this machine has no sandboxes")
    zygote = os.pidfd_open(int(line))
    processes = list(process_tree.descendants(int(line)))
    assert len([pid for pid in processes if is_server(pid)]) == 3
    worker.kill()
    worker.wait()
    worker.stdout.close()
    await asyncio.to_thread(select.select, [zygote], [], [], 60.0)
    os.close(zygote)
    assert not [pid for pid in processes if is_server(pid)]
    assert left_in(tmp_path) == []


async def test_an_image_that_is_not_there_is_named(sandboxes: Sandboxes, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="nowhere"):
        async with sandboxes.lease(SandboxSpec(image=f"oci:{tmp_path}/nowhere")):
            pass


async def test_a_runtime_takes_nothing_of_the_image(cache: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        runtime = await asyncio.to_thread(find_runtime, tmp_path)
    finally:
        os.umask(before)
    places = [runtime.directory, *runtime.directory.rglob("*")]
    assert all(path.stat().st_mode & 0o004 for path in places)
    loader = (runtime.directory / "ld").read_bytes()
    assert b"/etc/ld.so.preload" not in loader
    assert b"/.kuberoll/preload" in loader


async def test_a_sandbox_may_be_removed_by_several_at_once(sandboxes: Sandboxes, busybox: str) -> None:
    driver = sandboxes._driver
    await driver.create("twice", SandboxSpec(image=busybox))
    async with asyncio.timeout(60):
        await asyncio.gather(*(driver.remove("twice") for _ in range(3)))


async def test_many_at_once(lease: Leasing) -> None:
    async def use(number: int) -> str:
        async with lease() as one:
            return (await one.sandbox.exec(f"echo {number}")).text

    assert await asyncio.gather(*map(use, range(20))) == [f"{number}\n" for number in range(20)]
