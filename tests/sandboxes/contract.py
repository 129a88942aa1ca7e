"""What every driver of sandboxes must do: a class of tests, which each driver's tests inherit.

A subclass has the fixtures `making`, how its driver is made, and `traces`, a function that finds all that there is on
this machine of the driver's sandboxes. A driver and a sandbox serve a whole class (`conftest.py`); what may end a
sandbox, or needs one of its own kind, has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.sandboxes.connection import connect
from kuberoll_workers.sandboxes.driver import Driver, SandboxSpec
from kuberoll_workers.sandboxes.errors import CommandNotStarted, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.keys import context_of, make_key
from tests.sandboxes import making as making_module
from tests.sandboxes.making import Making
from tests.sandboxes.waiting import until

ROOT = Path(__file__).parents[2]
Processes = Callable[[str], list[int]]
"""Ids of all processes of a sandbox; where they are not of this machine, others in their place, as many or few."""
Traces = Callable[[], set[str]]
"""What there is on this machine of a driver: containers, mounts, control groups, and directories, which begin with
`directory`."""


class Machines:
    """Makes sandboxes of one driver.

    Attributes:
        driver: The driver.
    """

    def __init__(self, driver: Driver, images: Mapping[str, str]) -> None:
        """`images` are references by name."""
        self.driver = driver
        self._images = images

    def spec(self, image: str = "plain", **fields: Any) -> SandboxSpec:
        """A sandbox of an image."""
        return SandboxSpec(image=self._images.get(image, image), **fields)

    @staticmethod
    def name() -> str:
        """A name that no other has."""
        return f"test-{secrets.token_hex(4)}"

    @asynccontextmanager
    async def one(self, image: str = "plain", **fields: Any) -> AsyncIterator[Sandbox]:
        """Have a sandbox for the time of the block."""
        name = self.name()
        sandbox = Sandbox(await self.driver.create(name, self.spec(image, **fields)))
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await self.driver.remove(name)


@pytest.mark.asyncio(loop_scope="class")
class DriverContract:
    """The tests; `Driver` and `Sandbox` say what they test."""

    limits_storage = True
    """False if the driver cannot limit what a sandbox writes here; then it says so once."""
    limits_memory = True
    """False if the driver cannot limit memory here."""
    limits_processes = True
    """False if somebody else does: a kubelet."""
    isolates = True
    """False if somebody else keeps sandboxes from the network: a cluster's network policies."""
    prepares = True
    """False if images come when a sandbox starts."""
    keeps_loader_variables = True
    """False if variables of an image that are the dynamic loader's are lost."""
    has_writable_workdir = True
    """False if the working directory is read-only where the root is."""
    follows_killed = True
    """False if what a killed driver left ends with its lease, and not when the next one comes."""

    # Commands.

    async def test_a_program_has_its_arguments_as_they_are(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "", "ü\n"])
        assert (done.exit_code, done.signal, done.stdout.decode()) == (0, None, "a b|$HOME||ü\n|")

    async def test_a_text_is_for_the_shell(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("echo out; echo err >&2; exit 3")
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")

    async def test_outputs_may_be_merged(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("echo 1; echo 2 >&2; echo 3", merged=True)
        assert (done.stdout, done.stderr) == (b"1\n2\n3\n", b"")

    async def test_a_signal_that_ends_a_command_is_known(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("kill -SEGV $$")
        assert (done.exit_code, done.signal) == (None, signal.SIGSEGV)

    async def test_input_of_any_size_arrives(self, sandbox: Sandbox) -> None:
        data = secrets.token_bytes(5 << 20)
        done = await sandbox.exec(["sha256sum"], stdin=data)
        assert done.text.split()[0] == hashlib.sha256(data).hexdigest()
        echoed = await sandbox.exec(["cat"], stdin=data, output_bytes=6 << 20)
        assert echoed.stdout == data

    async def test_of_much_output_the_beginning_and_the_end_are_kept(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("seq 100000 199999; echo oops >&2", output_bytes=1000)
        whole = b"".join(b"%d\n" % number for number in range(100_000, 200_000))
        assert done.stdout == whole[:500] + whole[-500:]
        assert done.skipped == (len(whole) - 1000, 0)
        assert done.stderr == b"oops\n"

    async def test_output_comes_while_a_command_runs(self, sandbox: Sandbox) -> None:
        async with sandbox.start(["cat"]) as process:
            output = aiter(process)
            for word in (b"one", b"two"):
                await process.write(word)
                assert await anext(output) == ("stdout", word)
            await process.end_input()
            with pytest.raises(StopAsyncIteration):
                await anext(output)

    async def test_a_command_that_is_over_its_time_ends_with_all_that_it_started(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(
            "setsid sleep 7001 & (sleep 7002 & exec setsid sh -c '(sleep 7003 &) ; sleep 7004') & sleep 7005",
            timeout=0.5,
        )
        assert done.timed_out
        assert not done.succeeded
        assert "sleep 700" not in (await sandbox.exec(["ps"])).text

    async def test_what_is_left_in_the_background_stays_until_it_is_cleared(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("sleep 8001 & setsid sleep 8002 >/dev/null 2>&1 &")
        assert done.succeeded
        there = (await sandbox.exec(["ps"])).text
        assert "sleep 8001" in there
        assert "sleep 8002" in there
        await sandbox.clear()
        assert "sleep 800" not in (await sandbox.exec(["ps"])).text

    async def test_what_is_under_way_ends_when_its_sandbox_is_given_up(self, machines: Machines) -> None:
        async with machines.one() as sandbox:
            async with sandbox.start("echo there; sleep 9002") as process:
                assert await anext(aiter(process)) == ("stdout", b"there\n")
                waiting = asyncio.create_task(process.wait())
                await asyncio.sleep(0)
                # As when its node is gone, and nothing tells of it.
                sandbox.lose(SandboxLost("nobody has heard of its node"))
                with pytest.raises(SandboxLost):
                    await waiting
            with pytest.raises(SandboxLost, match="nobody has heard of its node"):
                await sandbox.exec("true")

    async def test_a_command_that_is_left_alone_is_killed(self, sandbox: Sandbox) -> None:
        async with sandbox.start("trap '' TERM HUP INT; echo there; sleep 9001") as process:
            assert await anext(aiter(process)) == ("stdout", b"there\n")
        # Its end is not waited for.
        async with asyncio.timeout(60):
            while "sleep 9001" in (await sandbox.exec(["ps"])).text:
                continue

    async def test_many_commands_run_at_once(self, sandbox: Sandbox) -> None:
        done = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(30)))
        assert [one.text for one in done] == [f"{number}\n" for number in range(30)]

    @pytest.mark.parametrize(
        ("arguments", "number"),
        [
            ({"command": ["no-such-program"]}, errno.ENOENT),
            ({"command": ["/etc/passwd"]}, errno.EACCES),
            ({"command": ["true"], "workdir": "/no/such/place"}, errno.ENOENT),
        ],
    )
    async def test_what_cannot_start_says_why(self, sandbox: Sandbox, arguments: Any, number: int) -> None:
        with pytest.raises(CommandNotStarted) as raised:
            await sandbox.exec(**arguments)
        assert raised.value.errno == number

    # Users, places and variables.

    async def test_commands_have_no_variables_but_those_that_they_are_given(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(["env"], environment={"A": "1 2", "Ü": "ü"})
        found = dict(line.split("=", 1) for line in done.text.splitlines())
        assert found == {"PATH": "/bin", "HOME": "/root", "A": "1 2", "Ü": "ü"}

    async def test_the_working_directory_is_made(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["pwd"])).text == "/new/place\n"
        assert (await sandbox.exec(["pwd"], workdir="/etc")).text == "/etc\n"
        assert (await sandbox.exec("stat -c %a /tmp")).text == "1777\n"

    async def test_commands_run_as_whom_they_are_told_to(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec("id -u; id -g")).text == "0\n0\n"
        await sandbox.write("/etc/shadow", "root:secret", mode=0o600)
        done = await sandbox.exec("id -u; id -g; id -G; echo $HOME; cat /etc/shadow", user="app")
        assert done.text == "1000\n1000\n1000 10\n/home/app\n"
        assert "Permission denied" in done.errors
        assert (await sandbox.exec("id -u; id -g", user="1001:wheel")).text == "1001\n10\n"
        assert (await sandbox.exec("id -u; id -g", user="4321:1234")).text == "4321\n1234\n"

    async def test_a_user_does_not_become_root_again(self, sandbox: Sandbox) -> None:
        status = (await sandbox.exec(["cat", "/proc/self/status"], user="app")).text
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["1000"] * 4
        assert fields["Gid"].split() == ["1000"] * 4
        assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}

    async def test_a_user_whom_the_image_does_not_have_is_named(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandNotStarted, match="no user 'somebody' in /etc/passwd"):
            await sandbox.exec(["true"], user="somebody")

    async def test_users_of_the_image_are_found_when_somebody_has_deleted_them(self, sandbox: Sandbox) -> None:
        await sandbox.exec("rm -f /etc/passwd /etc/group", user="0")
        assert (await sandbox.exec("id -u; id -g", user="root")).text == "0\n0\n"
        assert (await sandbox.exec("id -u; id -g", user="app")).text == "1000\n1000\n"
        assert (await sandbox.exec("id -u; id -g", user="1001:wheel")).text == "1001\n10\n"

    async def test_an_image_says_who_works_where(self, machines: Machines) -> None:
        async with machines.one("user", environment={"TASK": "7"}) as sandbox:
            done = await sandbox.exec("id -un; pwd; echo $HOME $TASK; touch mine && stat -c %U mine")
            assert done.text == "app\n/home/app\n/home/app 7\napp\n"
            assert (await sandbox.exec("id -un", user="root")).text == "root\n"
            await sandbox.write("/home/app/written", "x")
            assert (await sandbox.exec("stat -c %U /home/app/written")).text == "app\n"

    async def test_a_sandbox_may_have_another_user_and_place(self, machines: Machines) -> None:
        async with machines.one("user", user="1234:10", workdir="/home/app/below/this") as sandbox:
            assert (await sandbox.exec("id -u; id -g; pwd")).text == "1234\n10\n/home/app/below/this\n"

    # Files.

    async def test_files_are_written_and_read(self, sandbox: Sandbox) -> None:
        data = secrets.token_bytes(3 << 20)
        await sandbox.write("/data/new/file", data, mode=0o640)
        assert await sandbox.read("/data/new/file") == data
        assert await sandbox.read("/data/new/file", offset=1000, size=10) == data[1000:1010]
        assert (await sandbox.exec("stat -c %a /data/new/file; ls -A /data/new")).text == "640\nfile\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("/data/none")
        with pytest.raises(IsADirectoryError):
            await sandbox.read("/data")
        with pytest.raises(PermissionError):
            await sandbox.read("/etc/shadow", user="app")
        with pytest.raises(PermissionError):
            await sandbox.write("/etc/passwd", "root::0:0", user="app")

    async def test_what_never_ends_is_not_read(self, sandbox: Sandbox) -> None:
        await sandbox.exec("mkfifo -m 666 /tmp/pipe")
        for path in ("/tmp/pipe", "/dev/zero"):
            with pytest.raises(OSError, match="no ordinary file"):
                await sandbox.read(path)

    async def test_trees_go_in_and_come_out(self, sandbox: Sandbox, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        (tree / "empty").mkdir(parents=True)
        (tree / "a ü\n").write_bytes(secrets.token_bytes(300_000))
        (tree / "run").write_text("#!/bin/sh\necho ran\n")
        (tree / "run").chmod(0o755)
        (tree / "link").symlink_to("run")
        await sandbox.upload(tree, "/up/there")
        assert (await sandbox.exec("/up/there/link")).text == "ran\n"
        await sandbox.download("/up/there", tmp_path / "back")
        assert _tree(tmp_path / "back") == _tree(tree)
        await sandbox.upload(tree / "run", "/up/one")
        await sandbox.download("/up/one", tmp_path / "one")
        assert (tmp_path / "one").read_text() == "#!/bin/sh\necho ran\n"

    async def test_nothing_is_written_outside_of_where_a_tree_goes(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await sandbox.exec(
            "mkdir -p /evil/d; cd /evil; ln -s /etc/passwd absolute; ln -s ../../../../../../etc/passwd up; "
            "ln -s / root; ln -s .. d/above; mkfifo pipe; ln -s . self; echo x > d/file; ln d/file hard; "
            "ln -s no/where dangling; chmod 4777 hard; mknod null c 1 3; touch -- '-rf' '..x'"
        )
        target = tmp_path / "target"
        await sandbox.download("/evil", target)
        found = {str(path.relative_to(target)) for path in target.rglob("*")}
        assert found == {"d", "d/above", "d/file", "hard", "self", "dangling", "-rf", "..x"}
        assert not (target / "hard").stat().st_mode & 0o6000
        assert all(path.resolve().is_relative_to(target.resolve()) for path in target.rglob("*"))
        assert await asyncio.to_thread(lambda: [*tmp_path.iterdir()]) == [target]

    async def test_a_download_has_a_limit(self, sandbox: Sandbox, tmp_path: Path) -> None:
        await sandbox.exec("mkdir /large; dd if=/dev/zero of=/large/file bs=1M count=4")
        with pytest.raises(OSError, match="more than") as raised:
            await sandbox.download("/large", tmp_path / "large", size=1 << 20)
        assert raised.value.errno == errno.EFBIG

    # Ports and the network.

    async def test_a_port_inside_is_reachable_from_here(self, sandbox: Sandbox) -> None:
        await sandbox.exec("mkdir -p /www; echo served > /www/page; httpd -p 127.0.0.1:8080 -h /www")
        host, _, port = (await sandbox.expose(8080)).partition(":")
        pages = await asyncio.gather(*(_get(host, int(port), "/page") for _ in range(5)))
        assert all(page.endswith(b"served\n") for page in pages)

    async def test_an_address_outside_is_reachable_from_inside(self, sandbox: Sandbox) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"policy\n" * 10_000)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            inside = await sandbox.forward("127.0.0.1", server.sockets[0].getsockname()[1])
            for _ in range(3):
                assert (
                    await sandbox.exec(["wget", "-q", "-O", "-", f"http://{inside}/"])
                ).stdout == b"policy\n" * 10_000

    async def test_without_a_network_nothing_is_reachable(self, sandbox: Sandbox) -> None:
        if not self.isolates:
            pytest.skip("the driver leaves that to the cluster")
        connected = asyncio.Event()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            writer.close()

        async with await asyncio.start_server(note, "0.0.0.0", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for host in {"127.0.0.1", *_addresses()}:
                # Its own loopback has nobody at this port.
                done = await sandbox.exec(["nc", "-w", "3", host, str(port)])
                assert done.exit_code
            for host, at in (("169.254.169.254", 80), ("1.1.1.1", 443), ("10.96.0.1", 443)):
                done = await sandbox.exec(["nc", "-w", "3", host, str(at)])
                assert "unreachable" in done.errors
            assert not (await sandbox.exec(["nslookup", "example.com"], timeout=30)).succeeded
            assert not (await sandbox.exec(["nslookup", "example.com", "8.8.8.8"], timeout=30)).succeeded
            assert not (await sandbox.exec(["ping", "-c", "1", "-W", "2", "1.1.1.1"])).succeeded
        assert not connected.is_set()
        devices = (await sandbox.exec(["ls", "/sys/class/net"])).text.split()
        assert set(devices) <= {"lo"}
        routes = (await sandbox.exec("tail -n +2 /proc/net/route; cat /proc/net/ipv6_route")).text.split("\n")
        assert all(line.endswith("lo") for line in filter(None, routes))

    # Its protection from what runs inside.

    async def test_nobody_inside_ends_or_stops_the_server(self, sandbox: Sandbox) -> None:
        # Signals 32 and 33 are the C library's.
        numbers = [number for number in range(1, 65) if number not in (32, 33)]
        await sandbox.exec("for n in " + " ".join(map(str, numbers)) + "; do kill -$n 1; done", user="root")
        await sandbox.ping(seconds=10)
        for command in ("pkill -9 python3; pkill -9 -f kuberoll; killall -9 ld", "kill -9 -1", "kill -STOP -1"):
            with contextlib.suppress(SandboxLost):
                await sandbox.exec(command, timeout=1, user="root")
            await sandbox.ping(seconds=10)
        await sandbox.clear()
        assert (await sandbox.exec(["echo", "here"])).text == "here\n"

    async def test_the_servers_memory_is_closed(self, sandbox: Sandbox) -> None:
        for user in ("root", "app"):
            for file in ("mem", "environ", "maps", "auxv", "syscall", "stack"):
                done = await sandbox.exec(["dd", f"if=/proc/1/{file}", "bs=100", "count=1"], user=user)
                assert not done.stdout, file
            done = await sandbox.exec(
                "for f in root exe cwd fd/3 fd/4 fd/5; do readlink /proc/1/$f; done; "
                "cat /proc/1/fd/*; ls /proc/1/root/",
                user=user,
            )
            assert not done.stdout

    async def test_no_secret_is_inside(self, sandbox: Sandbox) -> None:
        private = sandbox._pool.ticket.private.split("\n")[1].encode()
        assert len(private) > 50
        done = await sandbox.exec(
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env; "
            "find / -xdev -type f -size -1000 -exec grep -l 'PRIVATE KEY' {} \\;",
            output_bytes=8 << 20,
        )
        assert done.stdout
        assert b"PRIVATE" not in done.stdout.replace(b"'PRIVATE KEY'", b"").replace(b"grep -l PRIVATE KEY", b"")
        assert private not in done.stdout

    async def test_nobody_inside_takes_the_servers_place(self, sandbox: Sandbox) -> None:
        """Whoever could put a socket where the handle finds the server's would answer for it."""
        assert not (await sandbox.exec("find / -xdev -type s", user="root")).stdout
        await sandbox.exec("rm -rf /.kuberoll /.kuberoll-socket/* /run/*; echo x > /.kuberoll/ld", user="root")
        await sandbox.ping(seconds=10)
        pool = sandbox._pool
        connection = await connect(pool.ticket, pool._context)
        connection.close()
        await sandbox.upload(ROOT / "tests/sandboxes", "/uploaded")

    async def test_it_obeys_one_key(self, sandbox: Sandbox) -> None:
        ticket = sandbox._pool.ticket
        other = make_key()
        with pytest.raises(SandboxLost):
            await connect(replace(ticket, private=other.private, certificate=other.certificate), context_of(other))
        with pytest.raises(SandboxLost, match="this is the sandbox"):
            await connect(replace(ticket, name="another"), context_of(ticket.key))
        strangers = [_stranger(ticket.address) for _ in range(40)]
        await sandbox.ping(seconds=10)
        assert (await sandbox.exec(["echo", "here"])).text == "here\n"
        for stranger in strangers:
            stranger.close()

    async def test_a_sandbox_has_no_rights_on_this_machine(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(
            "mount -t tmpfs x /mnt; mount -t proc x /mnt; hostname other; echo b > /proc/sysrq-trigger; "
            "echo 1 > /proc/sys/kernel/panic; mknod /tmp/disk b 254 0; chroot / mknod /tmp/disk b 254 0; "
            "date -s 2001-01-01; dmesg; swapoff -a; insmod /etc/passwd; ls /dev; reboot -f",
            user="root",
            merged=True,
        )
        assert "Permission denied" in done.text or "not permitted" in done.text
        assert not {"vda", "sda", "mem", "kmsg", "kvm", "fuse"} & set(done.text.split())
        writable = await sandbox.exec("for d in /sys/fs/cgroup/*; do mkdir $d/mine && echo $d; done", user="root")
        assert not writable.stdout

    # Limits.

    async def test_a_fork_bomb_ends(self, machines: Machines, processes_of: Processes) -> None:
        if not self.limits_processes:
            pytest.skip("the driver leaves that to the cluster")
        async with machines.one(processes=64) as sandbox:
            await sandbox.exec("f() { while true; do f & done; }; f >/dev/null 2>&1 &")
            await sandbox.clear()
            done = await sandbox.exec("while true; do sleep 4000 & done")
            assert "can't fork" in done.errors
            assert 50 < len(processes_of(sandbox.name)) < 64 + 16
            with pytest.raises(CommandNotStarted) as raised:
                await asyncio.gather(*(sandbox.exec(["sleep", "4001"]) for _ in range(16)))
            assert raised.value.errno == errno.EAGAIN
            await sandbox.clear()
            assert (await sandbox.exec(["echo", "here"])).text == "here\n"

    async def test_who_wants_too_much_memory_is_killed_and_not_the_server(self, machines: Machines) -> None:
        if not self.limits_memory:
            pytest.skip("the driver cannot limit memory here")
        async with machines.one(memory=128 << 20) as sandbox:
            for _ in range(3):
                done = await sandbox.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=500M", "count=1"])
                assert (done.exit_code, done.signal) == (None, signal.SIGKILL)
            await sandbox.exec("dd if=/dev/zero of=/dev/shm/file bs=1M count=500")
            await sandbox.exec("rm -f /dev/shm/file")
            await sandbox.ping(seconds=10)
            assert (await sandbox.exec(["echo", "here"])).text == "here\n"

    async def test_a_full_disk_is_its_own(self, machines: Machines) -> None:
        if not self.limits_storage:
            pytest.skip("the driver cannot limit what a sandbox writes on this machine")
        async with machines.one(storage=32 << 20) as sandbox:
            done = await sandbox.exec(["dd", "if=/dev/zero", "of=/file", "bs=1M", "count=100"])
            assert not done.succeeded
            assert "No space left" in done.errors or "quota" in done.errors
            await sandbox.exec("rm /file; echo here > /file")
            assert await sandbox.read("/file") == b"here\n"

    async def test_processors_are_limited_without_harm(self, machines: Machines) -> None:
        async with machines.one(cpus=0.5) as sandbox, machines.one(cpus=1000) as other:
            assert (await sandbox.exec(["echo", "here"])).text == "here\n"
            assert (await other.exec(["echo", "here"])).text == "here\n"

    # Images.

    async def test_an_images_own_program_does_not_run(self, machines: Machines) -> None:
        async with machines.one("entry") as sandbox:
            assert (await sandbox.exec(["ls", "/"])).succeeded
            assert not (await sandbox.exec("ls -d /ran*")).stdout

    async def test_variables_of_an_image_do_not_reach_the_server(self, machines: Machines) -> None:
        async with machines.one("preload") as sandbox:
            done = await sandbox.exec(["env"])
            expected = {"PYTHONHOME=/srv", "LD_LIBRARY_PATH=/srv", "GREETING=hello, world"}
            expected |= {"LD_PRELOAD=/srv/task.txt"} if self.keeps_loader_variables else set()
            assert expected <= {*done.text.splitlines()}
            await sandbox.write("/file", "x")
            await sandbox.upload(ROOT / "tests/sandboxes", "/uploaded")

    async def test_a_root_may_be_read_only(self, machines: Machines) -> None:
        async with machines.one("workdir", read_only=True) as sandbox:
            new = "/srv/new" if self.has_writable_workdir else "/run/new"
            done = await sandbox.exec(f"cat task.txt && echo x > {new} && echo x > /tmp/new && cat {new} /tmp/new")
            assert done.text == "a task\nx\nx\n"
            for place in ("/new", "/etc/passwd", "/bin/sh", *(() if self.has_writable_workdir else ("/srv/new",))):
                done = await sandbox.exec(["touch", place])
                assert "Read-only file system" in done.errors
            await sandbox.write("/tmp/run", "#!/bin/sh\necho ran", mode=0o755)
            assert (await sandbox.exec(["/tmp/run"])).text == "ran\n"

    async def test_an_image_that_is_not_there_is_named(self, machines: Machines, tmp_path: Path) -> None:
        for image in (
            "localhost:1/none/such:1",
            f"docker-archive:{tmp_path}/none.tar",
            f"oci:{tmp_path}:tag",
            "Not So",
        ):
            driver, spec = machines.driver, machines.spec(image, start_seconds=3)
            with pytest.raises(SandboxUnavailable) as raised:
                await (driver.prepare(image) if self.prepares else driver.create(machines.name(), spec))
            assert image.partition(":")[2].partition(":")[0] in str(raised.value)

    async def test_an_image_of_musl(self, machines: Machines, musl: str) -> None:
        async with machines.one(musl) as sandbox:
            done = await sandbox.exec(["hello"])
            assert (done.text, done.errors) == ("hello from musl\n", "")
            # Root inside may not limit the server.
            assert not (await sandbox.exec(["choke"], user="root")).succeeded
            assert (await sandbox.exec(["hello"])).succeeded

    @pytest.mark.slow
    async def test_an_image_of_debian(self, machines: Machines, debian: str) -> None:
        async with machines.one(debian, memory=256 << 20) as sandbox:
            done = await sandbox.exec(["bash", "-c", "cat /etc/debian_version; python3 -c 'import ssl; print(6 * 7)'"])
            assert done.text.endswith("\n42\n")
            # Its own tools, with rights that root has in a machine.
            done = await sandbox.exec(
                "useradd -m worker && su worker -c 'id -un; echo x > ~/file' && chown root ~worker/file"
            )
            assert done.text == "worker\n"
            done = await sandbox.exec("python3 -c 'x = bytearray(1 << 30)'")
            assert done.signal == signal.SIGKILL or done.exit_code == 137
            await sandbox.ping(seconds=10)

    # Its life.

    async def test_a_sandbox_ends_when_nobody_renews_its_lease(
        self, machines: Machines, traces: Traces, processes_of: Processes
    ) -> None:
        before = traces()
        name = machines.name()
        sandbox = Sandbox(await machines.driver.create(name, machines.spec(lease_seconds=2)))
        async with sandbox.start(["sleep", "1000"]) as process:
            with pytest.raises(SandboxLost):
                await process.wait()
        await sandbox.close()
        await until(lambda: not processes_of(name) and running(traces()) <= before, "it is gone")
        await machines.driver.remove(name)
        await until(lambda: traces() <= before, "nothing is left")

    async def test_nobody_who_is_not_its_handle_renews_a_lease(self, machines: Machines) -> None:
        name = machines.name()
        ticket = await machines.driver.create(name, machines.spec(lease_seconds=2))
        sandbox = Sandbox(ticket)
        other = make_key()
        wrong, context = replace(ticket, private=other.private, certificate=other.certificate), context_of(other)
        async with sandbox.start("while true; do nc -w 1 127.0.0.1 1; done") as process:
            ended = asyncio.create_task(process.wait())
            while not ended.done():
                with pytest.raises(SandboxLost):
                    await connect(wrong, context)
                # A connection that is refused at once lets nobody else have a turn.
                await asyncio.sleep(0)
            with pytest.raises(SandboxLost):
                await ended
        await sandbox.close()
        await machines.driver.remove(name)

    async def test_twenty_at_once(self, machines: Machines, traces: Traces, processes_of: Processes) -> None:
        before = traces()
        names = [machines.name() for _ in range(20)]
        tickets = await asyncio.gather(*(machines.driver.create(name, machines.spec()) for name in names))
        sandboxes = [Sandbox(ticket) for ticket in tickets]
        await asyncio.gather(*(sandbox.write("/name", sandbox.name) for sandbox in sandboxes))
        done = await asyncio.gather(*(sandbox.exec("cat /name; echo; ps | wc -l") for sandbox in sandboxes))
        assert [one.text.split()[0] for one in done] == names
        for sandbox in sandboxes:
            await sandbox.close()
        # Twice each: somebody else may be removing it.
        await asyncio.gather(*(machines.driver.remove(name) for name in names * 2))
        await until(lambda: traces() <= before, "all are gone")
        assert not [name for name in names if processes_of(name)]

    async def test_what_is_not_there_is_removed(self, machines: Machines) -> None:
        await machines.driver.remove("nobody-has-made-this")

    async def test_a_sandbox_that_starts_for_too_long_is_removed(
        self, machines: Machines, traces: Traces, processes_of: Processes
    ) -> None:
        before = traces()
        name = machines.name()
        with pytest.raises(SandboxUnavailable, match="did not start within"):
            await machines.driver.create(name, machines.spec(start_seconds=0.001))
        await until(lambda: traces() <= before and not processes_of(name), "it is gone")

    async def test_a_sandbox_whose_start_is_cancelled_is_removed(
        self, machines: Machines, traces: Traces, processes_of: Processes
    ) -> None:
        before = traces()
        names = [machines.name() for _ in range(6)]
        for number, name in enumerate(names):
            creating = asyncio.create_task(machines.driver.create(name, machines.spec()))
            # At different places of its start.
            await asyncio.wait((creating,), timeout=0.05 * number)
            if creating.done():
                await machines.driver.remove(name)
                continue
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        await until(lambda: traces() <= before, "all are gone")
        assert not [name for name in names if processes_of(name)]

    async def test_a_worker_that_is_killed_leaves_nothing_after_the_lease(
        self, machines: Machines, making: Making, traces: Traces, processes_of: Processes
    ) -> None:
        before = traces()
        name = machines.name()
        await _killed(making, name, machines.spec(lease_seconds=2), processes_of)
        await until(lambda: running(traces()) <= before and not processes_of(name), "its lease is over")

    async def test_the_next_driver_removes_what_a_killed_one_left(
        self, machines: Machines, making: Making, traces: Traces, processes_of: Processes
    ) -> None:
        if not self.follows_killed:
            pytest.skip("it ends with its lease")
        before = traces()
        name = machines.name()
        await _killed(making, name, machines.spec(lease_seconds=600), processes_of)
        driver = making.make()
        try:
            await driver.check()
            await until(lambda: running(traces()) <= before and not processes_of(name), "it is gone")
        finally:
            await driver.close()
        assert traces() <= before

    async def test_a_driver_that_is_closed_leaves_nothing(
        self, machines: Machines, making: Making, traces: Traces, processes_of: Processes
    ) -> None:
        before = traces()
        driver = making.make()
        names = [machines.name() for _ in range(3)]
        for name in names:
            await driver.create(name, machines.spec())
        await driver.close()
        await until(lambda: traces() <= before, "nothing is left")
        assert not [name for name in names if processes_of(name)]


def running(traces: set[str]) -> set[str]:
    """What keeps this machine busy: not the directories in which nothing happens any more."""
    return {trace for trace in traces if not trace.startswith("directory")}


async def _killed(making: Making, name: str, spec: SandboxSpec, processes_of: Processes) -> None:
    """Have another process make a sandbox, and kill it."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", making_module.__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(pickle.dumps((making, name, spec)))
        worker.stdin.close()
        assert await worker.stdout.readline() == b"ready\n"
        assert processes_of(name)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


def processes_here(name: str) -> list[int]:
    """Ids of all processes of a sandbox."""
    sought = f'"name":"{name}"'.encode()
    namespaces: dict[str, list[int]] = {}
    found = ""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            namespace = str((directory / "ns/pid").readlink())
            namespaces.setdefault(namespace, []).append(int(directory.name))
            if sought in (directory / "environ").read_bytes():
                found = namespace
    return namespaces.get(found, [])


def _tree(root: Path) -> dict[str, tuple[int, object]]:
    """Modes and contents of everything below a directory, by path."""
    found: dict[str, tuple[int, object]] = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        content: object = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (mode, content)
    return found


def _stranger(address: str) -> socket.socket:
    """A connection of somebody who says nothing."""
    kind, _, place = address.partition(":")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)
    found = socket.socket(socket.AF_UNIX)
    found.connect(place)
    return found


async def _get(host: str, port: int, page: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {page} HTTP/1.0\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    return data


def _addresses() -> set[str]:
    """Addresses of this machine by which others would reach it."""
    found = set()
    for target in ("192.0.2.1", "10.0.0.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            # Nothing is sent.
            end.connect((target, 9))
            found.add(str(end.getsockname()[0]))
    return found
