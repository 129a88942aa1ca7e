"""A sandbox in namespaces, from its first process: its files, devices, network and rights.

What is mounted is named by descriptors that were opened outside: once the process is the sandbox's root it may not pass
through directories of the user whose machine this is, and nothing of the image can lead a mount astray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from kuberoll_workers.sandboxes.namespaces import system
from kuberoll_workers.sandboxes.namespaces.filters import forbid_calls

NAMESPACES: Final = system.NEW_PROCESSES | system.NEW_NETWORK | system.NEW_IPC | system.NEW_NAMES | system.NEW_CGROUP
"""Namespaces that a sandbox has beside those of users and mounts."""

_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
# What Docker gives, without net_raw and mknod: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
# net_bind_service, sys_chroot, audit_write, setfcap.
CAPABILITIES: Final = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31})
_HOSTS: Final = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {name}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sandbox consists of.

    Attributes:
        name: Its name, which is its host name, too.
        layers: Directory that the names in `overlay` are relative to.
        overlay: Options of its root's overlay, without `upperdir` and `workdir`.
        directory: Its own directory: `upper`, `work` and `root` are in it.
        runtime: Directory of the runtime.
        place: Where that is in the sandbox.
        argv, environment: Its first program, and that one's variables.
        workdir: Working directory of its commands, made if it is missing.
        read_only: As in `SandboxSpec`.
        processes: As in `SandboxSpec`.
        storage: Bytes of its files that are in memory; None: they are on the disk.
        shared: Bytes of its /dev/shm and, where its root is read-only, of /tmp and /run each.
        shown: Directories of the host, without the first `/`, that are mounted in its root, read-only.
        covered: Directories and files below those that are hidden again.
        listener: Number that the listening socket's descriptor gets.
    """

    name: str
    layers: str
    overlay: str
    directory: str
    runtime: str
    place: str
    argv: list[str]
    environment: dict[str, str]
    workdir: str
    read_only: bool
    processes: int
    storage: int | None
    shared: int
    shown: list[str]
    covered: list[str]
    listener: int


def become(
    plan: Plan, listener: socket.socket, told: int, maker: int, mapped: Callable[[], None], joined: Callable[[], None]
) -> NoReturn:
    """Become the sandbox, in the process that was forked for it; it waits for the sandbox's end.

    Args:
        listener: Listening socket of the sandbox's server.
        told: Pipe that is told what went wrong; it is closed when nothing has.
        maker: Id of the process that has forked this one.
        mapped: Called in the new user namespace; returns when that has users.
        joined: Called before anything else: joins the control groups.
    """
    try:
        os.setsid()
        joined()
        system.unshare(system.NEW_USER | system.NEW_MOUNTS)
        # While this is still the user whose files they are, and in the namespace that mounts them.
        opened = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (plan.layers, plan.directory, plan.runtime)]
        shown = [os.open(f"/{name}", os.O_PATH | os.O_DIRECTORY) for name in plan.shown]
        devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES if os.path.exists(f"/dev/{name}")}
        mapped()
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        # So the sandbox ends with what has made it; only now, because a change of users would take it back.
        system.end_with_parent(signal.SIGKILL)
        if os.getppid() != maker:
            # It was too late.
            os._exit(1)
        system.unshare(NAMESPACES)
        alive, held = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(held)
            _begin(plan, opened, shown, devices, listener, told, alive)
        # What is held is closed when this process ends, and not before.
        os.closerange(0, held)
        os.closerange(held + 1, os.sysconf("SC_OPEN_MAX"))
        os.waitpid(first, 0)
    except BaseException as error:
        _tell(told, error)
    finally:
        os._exit(1)


def _begin(
    plan: Plan,
    opened: list[int],
    shown: list[int],
    devices: dict[str, int],
    listener: socket.socket,
    told: int,
    alive: int,
) -> NoReturn:
    """Become the sandbox's first process.

    Args:
        alive: Pipe that is closed at its other end when the parent is gone, whom a namespace of processes hides.
    """
    try:
        system.end_with_parent(signal.SIGKILL)
        if select.select([alive], [], [], 0.0)[0]:
            os._exit(1)
        os.setsid()
        system.mount("none", "/", flags=system.PRIVATE | system.RECURSIVE)
        layers, own, runtime = opened
        _mount_root(plan, layers, own, runtime, shown, devices)
        _bring_up_loopback()
        system.set_host_name(plan.name[:63])
        _prepare_files(plan)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A limit of this user namespace's users each, which holds for root, too; the control group has it for all.
        resource.setrlimit(resource.RLIMIT_NPROC, (plan.processes, plan.processes))
        # Nobody makes a user namespace, in which he would have all rights, within it.
        _write("/proc/sys/user/max_user_namespaces", "0")
        system.mount("/proc/sys", "/proc/sys", flags=system.BIND)
        system.restrict("/proc/sys", system.READ_ONLY)
        if plan.read_only:
            system.restrict("/", system.READ_ONLY)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(listener.fileno(), plan.listener)
        os.set_inheritable(plan.listener, True)
        # While there is still the right to do so without taking others' rights away.
        forbid_calls()
        system.keep_capabilities(CAPABILITIES)
        os.closerange(3, plan.listener)
        for number in range(plan.listener + 1, 256):
            if number != told:
                with contextlib.suppress(OSError):
                    os.close(number)
        os.execve(plan.argv[0], plan.argv, plan.environment)
    except BaseException as error:
        _tell(told, error)
    finally:
        os._exit(1)


def _mount_root(plan: Plan, layers: int, own: int, runtime: int, shown: list[int], devices: dict[str, int]) -> None:
    place = f"/proc/self/fd/{own}"
    if plan.storage is not None:
        system.mount("tmpfs", f"{place}/disk", "tmpfs", options=f"size={plan.storage},mode=755")
        for name in ("upper", "work"):
            os.mkdir(f"{place}/disk/{name}", 0o755)
    os.fchdir(layers)
    options = f"{plan.overlay},upperdir={place}/disk/upper,workdir={place}/disk/work"
    system.mount("overlay", f"{place}/root", "overlay", options=options)
    # The descriptor of the directory below the mount leads to that one.
    root = os.open(f"{place}/root", os.O_PATH | os.O_DIRECTORY)
    _show(plan, root, shown, devices["null"])
    system.mount(f"/proc/self/fd/{runtime}", _directory(root, plan.place.strip("/")), flags=system.BIND)
    system.restrict(_directory(root, plan.place.strip("/")), system.READ_ONLY | system.NO_SUID | system.NO_DEVICES)
    plain = system.NO_SUID | system.NO_DEVICES | system.NO_EXEC
    system.mount("proc", _directory(root, "proc"), "proc", plain)
    with contextlib.suppress(OSError):
        # Not to be had where parts of it are covered, and few programs miss it.
        system.mount("sysfs", _directory(root, "sys"), "sysfs", plain | system.READ_ONLY)
    system.mount("tmpfs", _directory(root, "dev"), "tmpfs", system.NO_SUID | system.NO_EXEC, "mode=755,size=64k")
    device = os.open(_directory(root, "dev"), os.O_PATH | os.O_DIRECTORY)
    for name, descriptor in devices.items():
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o666, dir_fd=device))
        system.mount(f"/proc/self/fd/{descriptor}", f"/proc/self/fd/{device}/{name}", flags=system.BIND)
    _mount_terminals(device)
    os.mkdir("shm", dir_fd=device)
    shared = f"/proc/self/fd/{device}/shm"
    system.mount("tmpfs", shared, "tmpfs", plain, f"mode=1777,size={plan.shared}")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, name, dir_fd=device)
    if plan.read_only:
        for name in ("tmp", "run"):
            options = f"mode=1777,size={plan.shared}"
            system.mount("tmpfs", _directory(root, name), "tmpfs", system.NO_SUID | system.NO_DEVICES, options)
    system.change_root(f"/proc/self/fd/{root}")
    os.close(root)


def _show(plan: Plan, root: int, shown: list[int], null: int) -> None:
    """Mount directories of the host in a root whose own files nobody else has made."""
    for name, opened in zip(plan.shown, shown, strict=True):
        # What is mounted below it must come along: a namespace of fewer rights may not look beneath.
        system.mount(f"/proc/self/fd/{opened}", _directory(root, name), flags=system.BIND | system.RECURSIVE)
        attributes = system.READ_ONLY | system.NO_SUID | system.NO_DEVICES
        system.restrict(_directory(root, name), attributes, recursive=True)
    for name in plan.covered:
        try:
            opened = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=root)
        except FileNotFoundError:
            continue
        place = f"/proc/self/fd/{opened}"
        if os.path.isdir(place):
            system.mount("tmpfs", place, "tmpfs", system.READ_ONLY | system.NO_DEVICES, "mode=755,size=4k")
        else:
            system.mount(f"/proc/self/fd/{null}", place, flags=system.BIND)


def _mount_terminals(device: int) -> None:
    os.mkdir("pts", dir_fd=device)
    place = f"/proc/self/fd/{device}/pts"
    options = "newinstance,ptmxmode=0666,mode=0620"
    with contextlib.suppress(OSError):
        try:
            system.mount("devpts", place, "devpts", system.NO_SUID | system.NO_EXEC, f"{options},gid=5")
        except OSError:
            # With one user there is no group `tty`.
            system.mount("devpts", place, "devpts", system.NO_SUID | system.NO_EXEC, options)
    os.symlink("pts/ptmx", "ptmx", dir_fd=device)


def _directory(root: int, name: str) -> str:
    """Path of a directory of the sandbox's root, made if it is missing; a link in its place is refused."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=root)
    # It stays open until the program is executed; once something is mounted there, it is opened anew.
    return f"/proc/self/fd/{os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)}"


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        # SIOCGIFFLAGS and SIOCSIFFLAGS; IFF_UP.
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(end, 0x8913, request), 16)
        fcntl.ioctl(end, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))


def _prepare_files(plan: Plan) -> None:
    """Write what a container's files have, now that the root is the sandbox's own."""
    with contextlib.suppress(OSError):
        os.makedirs("/etc", exist_ok=True)
        _write("/etc/hosts", _HOSTS.format(name=plan.name))
        _write("/etc/hostname", f"{plan.name}\n")
    with contextlib.suppress(FileExistsError):
        os.mkdir("/tmp", 0o1777)
        os.chmod("/tmp", 0o1777)
    os.makedirs(plan.workdir, exist_ok=True)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _tell(told: int, error: BaseException) -> None:
    number = error.errno if isinstance(error, OSError) else None
    where = error.filename if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    said: dict[str, Any] = {"errno": number, "text": f"{where}: {reason}" if where else reason}
    with contextlib.suppress(OSError):
        os.write(told, json.dumps(said).encode()[:4000])
