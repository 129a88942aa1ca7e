"""What sandboxes that are pods must do besides, whatever runs the pods."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, ClassVar, Final, Protocol

import pytest

from kuberoll_api.sandboxes import CAPABILITIES
from kuberoll_workers.sandboxes.connection import connect
from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.handle import Sandbox
from tests.sandboxes.contract import DriverContract, Machines

# Of linux/capability.h.
_BITS: Final = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
_DEVICES: Final = {
    *("console", "core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout"),
    *("termination-log", "tty", "urandom", "zero"),
}


class PodCluster(Protocol):
    """What runs the pods."""

    async def pod(self, sandbox: str) -> dict[str, Any]:
        """The pod of a sandbox."""
        ...

    async def end(self, sandbox: str, way: str) -> None:
        """End a sandbox's pod in one of `PodContract.ways_to_end`."""
        ...


class PodContract(DriverContract):
    """The contract, less what a cluster does: limits of processes, and who reaches whom."""

    limits_storage = False
    limits_processes = False
    isolates = False
    prepares = False
    keeps_loader_variables = False
    has_writable_workdir = False
    follows_killed = False

    ways_to_end: ClassVar[tuple[str, ...]] = ("delete",)
    """Ways in which others end a pod."""
    events: ClassVar[frozenset[tuple[str, str]]] = frozenset({("delete", "Deleted"), ("delete", "Error")})
    """What is said of each: of the container, where it is the first to end."""

    async def test_its_server_hears_nobody_from_inside(self, machines: Machines) -> None:
        async with machines.one() as sandbox:
            host, _, port = sandbox._pool.ticket.address.removeprefix("tcp:").rpartition(":")
            # It speaks first, to whom it hears.
            outside = _stranger(host, int(port))
            assert await asyncio.to_thread(outside.recv, 1) == b"\x16"
            for address in ("127.0.0.1", "127.1.2.3", host):
                done = await sandbox.exec(f"nc -w 3 {address} {port} </dev/null 2>/dev/null | wc -c")
                assert done.text == "0\n"
            # More than the strangers of whom it closes the oldest.
            crowd = f"for n in $(seq 50); do nc {host} {port} >/dev/null 2>&1 & done; wait"
            await sandbox.exec(f"{crowd}; {crowd}", user="app")
            for _ in range(3):
                await sandbox.ping(seconds=10)
                (await connect(sandbox._pool.ticket, sandbox._pool._context)).close()
            outside.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                # The rest of its greeting, and no end.
                while data := outside.recv(4096):
                    continue
                assert data, "it was closed"
            outside.close()

    async def test_connections_break_when_nobody_is_there(self, sandbox: Sandbox) -> None:
        async with sandbox._pool.connection() as connection:
            end = connection._writer.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            # Of an idle one, and of one with something on its way.
            assert idle + interval * count <= 15
            assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000

    async def test_an_end_that_others_make_is_a_loss(self, machines: Machines, cluster: PodCluster) -> None:
        for way in self.ways_to_end:
            async with machines.one() as sandbox, sandbox.start(["sleep", "1000"]) as process:
                waiting = asyncio.create_task(process.wait())
                await cluster.end(sandbox.name, way)
                with pytest.raises(SandboxLost):
                    await waiting
                ending = await machines.driver.ending(sandbox.name)
                assert ending is not None
                assert (way, ending.evidence.event) in self.events, ending

    async def test_whom_an_image_is_for_is_asked_once(self, machines: Machines, cluster: PodCluster) -> None:
        for _ in range(2):
            async with machines.one("user") as sandbox:
                assert (await sandbox.exec("id -un; echo $HOME; env | grep KUBEROLL")).text == "app\n/home/app\n"
                pod = await cluster.pod(sandbox.name)
        assert [item["name"] for item in pod["spec"]["initContainers"]] == ["runtime"]

    async def test_texts_with_dollars_arrive(self, machines: Machines) -> None:
        text = "$$5 $(HOME) $$(X) $ $"
        async with machines.one(environment={"TEXT": text}) as sandbox:
            assert (await sandbox.exec('printf %s "$TEXT"')).text == text

    # What docs/reference/sandboxes.md says that pods are kept from.

    async def test_root_has_the_rights_that_are_listed_and_a_filter(self, sandbox: Sandbox) -> None:
        status = (await sandbox.exec(["cat", "/proc/self/status"], user="root")).text
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        allowed = sum(1 << _BITS[name] for name in CAPABILITIES)
        assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {allowed}
        assert int(fields["CapAmb"], 16) == 0
        assert fields["Seccomp"].strip() == "2"

    async def test_no_part_of_the_cluster_is_inside(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("ls -a /var/run/secrets /run/secrets", user="root")
        assert not done.stdout
        done = await sandbox.exec(["env"], user="root")
        assert {line.partition("=")[0] for line in done.text.splitlines()} == {"PATH", "HOME"}

    async def test_devices_are_those_of_any_container(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec("ls /dev; for f in /dev/*; do [ -b $f ] && echo block; done", user="root")
        assert set(done.text.split()) <= _DEVICES

    @pytest.mark.parametrize(
        "command",
        [
            "mkdir -p /tmp/over && mount -t tmpfs x /tmp/over",
            "mkdir -p /tmp/over && mount --bind /bin /tmp/over",
            "mount -o remount,rw /.kuberoll",
            "mount -o remount,rw /proc/sys",
            "unshare -m true",
            "unshare -n true",
            "touch /.kuberoll/x",
            "echo 0:0 > /.kuberoll-user/user",
            "rm -f /.kuberoll/ld",
            "echo x > /proc/1/comm",
            "echo b > /proc/sysrq-trigger",
            "echo /tmp/x > /proc/sys/kernel/core_pattern",
            "echo /tmp/x > /sys/kernel/uevent_helper",
            "echo 0 > /proc/sys/net/ipv4/ip_forward",
            "echo other > /proc/sys/kernel/hostname",
            "mkdir /sys/fs/cgroup/memory/mine",
            "echo 1 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
            # Where both kinds are mounted, a file system without a use is above them.
            "[ -e /sys/fs/cgroup/cgroup.controllers ] && mkdir /sys/fs/cgroup/mine",
            "mknod /tmp/disk b 254 0",
            "chroot /proc/1/root true",
            "dd if=/proc/kcore of=/dev/null bs=1 count=1",
            "dd if=/dev/mem of=/dev/null bs=1 count=1",
            "ls /proc/1/root/",
            "ls /proc/1/cwd/",
        ],
    )
    async def test_root_cannot(self, sandbox: Sandbox, command: str) -> None:
        done = await sandbox.exec(command, user="root", timeout=30)
        assert not done.succeeded
        assert not done.timed_out
        await sandbox.ping(seconds=10)

    async def test_a_server_whose_files_are_all_removed_goes_on(self, machines: Machines) -> None:
        async with machines.one() as sandbox:
            await sandbox.exec("rm -rf /bin /etc /home /root /tmp /work /* 2>/dev/null", user="root", timeout=60)
            await sandbox.ping(seconds=10)
            await sandbox.write("/tmp/after", "written")
            assert await sandbox.read("/tmp/after") == b"written"


def _stranger(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=10)
