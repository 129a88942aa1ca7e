"""An environment that tries what its metadata names, and says in its observation how it went."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kuberoll_workers.environments.interface import EnvironmentReturn


def _trace(pid: str) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    if libc.ptrace(attach, int(pid), 0, 0) != 0:
        raise PermissionError(ctypes.get_errno(), "ptrace")
    libc.ptrace(detach, int(pid), 0, 0)
    return "traced"


def _memory(pid: str) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8)

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    own = Vector(ctypes.addressof(buffer), 8)
    with Path(f"/proc/{pid}/maps").open() as maps:
        theirs = Vector(int(maps.readline().partition("-")[0], 16), 8)
    if libc.process_vm_readv(int(pid), ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0) < 0:
        raise PermissionError(ctypes.get_errno(), "process_vm_readv")
    return "read"


def _remove(path: str) -> str:
    os.unlink(path)
    return "removed"


def _link(path: str) -> str:
    os.link(path, f"{tempfile.gettempdir()}/linked")
    return "linked"


def _signal(pid: str) -> str:
    os.kill(int(pid), signal.SIGCONT)
    return "sent"


def _write(path: str) -> str:
    Path(path).write_text("mine")
    return "written"


def _descriptors(_: str) -> str:
    return ",".join(sorted(os.readlink(f"/proc/self/fd/{name}").partition(":")[0] for name in _open_descriptors()))


def _open_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def _connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return "connected"


def _send(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", path)
    return "sent"


def _own_socket(_: str) -> str:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(f"{tempfile.gettempdir()}/own")
        server.listen()
        client.connect(f"{tempfile.gettempdir()}/own")
    return "connected"


def _lock(_: str) -> str:
    with multiprocessing.get_context("spawn").Lock():
        return "locked"


def _touch(change: Callable[..., None], *arguments: Any) -> Callable[[str], str]:
    def touch(path: str) -> str:
        change(path, *arguments)
        return "changed"

    return touch


TRIES: dict[str, Callable[[str], str]] = {
    "read": lambda path: Path(path).read_text(errors="replace")[:80],
    "list": lambda path: ",".join(sorted(os.listdir(path))),
    "write": _write,
    "remove": _remove,
    "link": _link,
    "rename": lambda path: str(Path(path).rename(Path(tempfile.gettempdir()) / "moved")),
    "variable": lambda name: os.environ[name],
    "trace": _trace,
    "memory": _memory,
    "signal": _signal,
    "descriptors": _descriptors,
    "scratch": lambda _: _write(f"{tempfile.gettempdir()}/file"),
    "program": lambda text: subprocess.run(
        [sys.executable, "-c", f"print({text!r})"], check=True, capture_output=True, text=True
    ).stdout.strip(),
    "cat": lambda path: subprocess.run(["cat", path], check=True, capture_output=True, text=True).stdout[:80],
    "lock": _lock,
    "connect": _connect,
    "send": _send,
    "own socket": _own_socket,
    "resolve": lambda name: str(socket.getaddrinfo(name, 80)[0][4][0]),
    "import": lambda name: str(__import__(name).__name__),
    "mode": _touch(os.chmod, 0o600),
    "owner": _touch(os.chown, os.getuid(), os.getgid()),
    "times": _touch(os.utime, (0, 0)),
    "attribute": _touch(os.setxattr, "user.mine", b"mine"),
    "device": lambda path: str(Path(path).write_bytes(b"x")),
}


class Prying:
    """Tries what the episode's metadata says."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        said = []
        for state in metadata:
            try:
                said.append(f"ok {TRIES[state['try']](state['at'])}")
            except Exception as error:
                said.append(f"{type(error).__name__}")
        size = len(logs)
        return EnvironmentReturn(
            [{"role": "environment", "content": text} for text in said], None, None, [0.0] * size, [True] * size
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}
