"""Zygote: a small process from which sandboxes are forked, and which removes what they leave.

python -m kuberoll_workers.sandboxes.namespaces.zygote DESCRIPTOR|remove DIRECTORY

With `remove` it only removes what a killed one has left in DIRECTORY. Otherwise, over the socket DESCRIPTOR come
requests, one object of JSON each: `create` with a `Plan` and limits, and `remove` with a name. Each is answered with
`name`, and `error` if it failed. When the other side closes the socket, or is gone, all sandboxes end, and DIRECTORY is
removed with the control groups. If this process is killed, its sandboxes end with it; the directory, on which it holds
a lock, is removed by the next one of the same user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

# Sandboxes load it when they cannot see its file any more.
import pyseccomp  # noqa: F401

from kuberoll_workers.environments import process_tree
from kuberoll_workers.sandboxes.namespaces import cgroups, machine, system
from kuberoll_workers.sandboxes.users import IdMap, id_map, situation, unavailable, write_maps

_MESSAGE_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 0.05


class _Sandbox:
    """A sandbox that was made here.

    Attributes:
        process: The process that waits for its first one.
        removed: True if somebody waits to be told that it is gone.
    """

    def __init__(self, process: int, directory: Path, group: cgroups.Group, memory: int | None) -> None:
        """`memory` is the number of bytes that its processes may have, if no control group limits them."""
        self.process = process
        self.directory = directory
        self.group = group
        self.memory = memory
        self.removed = False

    def check_memory(self) -> None:
        """Kill the largest of its processes if together they have more memory than they may."""
        if self.memory is None:
            return
        # The first below the one that waits for the sandbox is its server.
        _server, *others = [*process_tree.descendants(self.process)] or [0]
        used = {process: process_tree.resident(process) for process in others}
        if sum(used.values()) > self.memory:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(max(used, key=lambda process: used[process]), signal.SIGKILL)


class Zygote:
    """The process that makes sandboxes."""

    def __init__(self, channel: socket.socket, directory: Path) -> None:
        self._channel = channel
        self._directory = directory
        self._ids = id_map()
        self._owner = directory.name
        self._groups = cgroups.find_groups(self._owner)
        self._sandboxes: dict[str, _Sandbox] = {}
        # Processes that remove directories, and whom to tell when they have.
        self._removals: dict[int, str] = {}

    def serve(self) -> None:
        """Serve until the other side is gone; then nothing is left."""
        wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._tell({"missing": list(self._groups.missing), "problem": _problem()})
        while True:
            watched = any(sandbox.memory is not None for sandbox in self._sandboxes.values())
            ready, _, _ = select.select([self._channel.fileno(), wake], [], [], _LOOK_SECONDS if watched else None)
            for sandbox in self._sandboxes.values():
                sandbox.check_memory()
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 1 << 16)
            self._reap()
            if self._channel.fileno() in ready:
                request = self._channel.recv(_MESSAGE_BYTES)
                if not request:
                    break
                self._do(json.loads(request))
        self._end()

    def _do(self, request: dict[str, Any]) -> None:
        name = request["name"]
        if request["do"] == "create":
            try:
                self._create(request)
            except Exception as error:
                self._discard(name)
                self._tell({"name": name, "error": str(error) or type(error).__name__})
            else:
                self._tell({"name": name, "created": True})
        elif (sandbox := self._sandboxes.get(name)) is None:
            self._tell({"name": name, "removed": True})
        else:
            sandbox.removed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(sandbox.process, signal.SIGKILL)

    def _create(self, request: dict[str, Any]) -> None:
        plan = machine.Plan(**request["plan"])
        directory = Path(plan.directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        told, tell = os.pipe2(os.O_CLOEXEC)
        asked, ask = os.pipe2(os.O_CLOEXEC)
        answered, answer = os.pipe2(os.O_CLOEXEC)
        group: cgroups.Group | None = None
        process = -1
        try:
            self._prepare(directory)
            os.chdir(directory)
            listener.bind("socket")
            os.chmod("socket", 0o600)
            os.chdir("/")
            listener.listen(128)
            group = self._groups.make(plan.name, cgroups.Limits(**request["limits"]))
            maker = os.getpid()
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                self._channel.close()
                for descriptor in (told, asked, answer):
                    os.close(descriptor)

                def mapped() -> None:
                    os.write(ask, b".")
                    if not os.read(answered, 1):
                        os._exit(1)

                machine.become(plan, listener, tell, maker, mapped, group.join)
            memory = request["limits"]["memory"] if "memory" in self._groups.missing else None
            self._sandboxes[plan.name] = _Sandbox(process, directory, group, memory)
            for descriptor in (tell, ask, answered):
                os.close(descriptor)
            tell = ask = answered = -1
            if os.read(asked, 1):
                write_maps(process, self._ids)
                os.write(answer, b".")
            said = os.read(told, 4096)
        finally:
            listener.close()
            for descriptor in (told, tell, asked, ask, answered, answer):
                if descriptor >= 0:
                    os.close(descriptor)
            if process < 0 and group is not None:
                group.remove()
        if said:
            failure = json.loads(said)
            if failure["text"].startswith("unshare") and failure["errno"]:
                raise unavailable(OSError(failure["errno"], os.strerror(failure["errno"])))
            raise RuntimeError(failure["text"])

    def _prepare(self, directory: Path) -> None:
        """Make the sandbox's directory, which is its root's."""
        directory.mkdir(mode=0o711)
        for name in ("root", "disk", "disk/upper", "disk/work"):
            (directory / name).mkdir(mode=0o755)
        if situation().is_privileged:
            owner, group = self._ids.outside(0), self._ids.outside_group(0)
            for name in ("root", "disk", "disk/upper", "disk/work"):
                os.chown(directory / name, owner, group)

    def _discard(self, name: str) -> None:
        if (sandbox := self._sandboxes.get(name)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sandbox.process, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                if ended in self._removals:
                    if name := self._removals.pop(ended):
                        self._tell({"name": name, "removed": True})
                    continue
                for name, sandbox in list(self._sandboxes.items()):
                    if sandbox.process == ended:
                        del self._sandboxes[name]
                        self._clean(name, sandbox)

    def _clean(self, name: str, sandbox: _Sandbox) -> None:
        """Remove what an ended sandbox has left, in a process of its own."""
        if not sandbox.removed:
            self._tell({"name": name, "ended": True})
        process = os.fork()
        if process == 0:
            try:
                signal.set_wakeup_fd(-1)
                sandbox.group.remove()
                remove_tree(sandbox.directory, self._ids)
            finally:
                os._exit(0)
        self._removals[process] = name if sandbox.removed else ""

    def _end(self) -> None:
        for sandbox in self._sandboxes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(sandbox.process, signal.SIGKILL)
        while self._sandboxes or self._removals:
            try:
                ended = os.waitpid(-1, 0)[0]
            except ChildProcessError:
                break
            self._removals.pop(ended, None)
            for name, sandbox in list(self._sandboxes.items()):
                if sandbox.process == ended:
                    del self._sandboxes[name]
                    sandbox.removed = True
                    self._clean(name, sandbox)
        remove_tree(self._directory, self._ids)
        cgroups.remove_groups(self._owner)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode())


def _problem() -> str | None:
    """Why this process can make no namespaces; None if it can."""
    process = os.fork()
    if process == 0:
        try:
            signal.set_wakeup_fd(-1)
            system.unshare(system.NEW_USER | system.NEW_MOUNTS | machine.NAMESPACES)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return str(unavailable(OSError(code, os.strerror(code)))) if code > 0 else None


def remove_tree(directory: Path, ids: IdMap) -> None:
    """Remove a directory with files of a sandbox's users."""
    if situation().is_privileged:
        shutil.rmtree(directory, ignore_errors=True)
        return
    # As the root of its users: they may have closed their directories.
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.close(answer)
            system.unshare(system.NEW_USER)
            os.write(ask, b".")
            if os.read(answered, 1):
                with contextlib.suppress(PermissionError):
                    os.setgroups([])
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os._exit(0)
    os.close(ask)
    try:
        if os.read(asked, 1):
            with contextlib.suppress(Exception):
                write_maps(process, ids)
                os.write(answer, b".")
    finally:
        for descriptor in (asked, answered, answer):
            os.close(descriptor)
    os.waitpid(process, 0)
    shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Entry point of the process."""
    directory = Path(sys.argv[2])
    if sys.argv[1] == "remove":
        remove_tree(directory, id_map())
        cgroups.remove_groups(directory.name)
        return
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.setsid()
    os.umask(0o022)
    Zygote(channel, directory).serve()


if __name__ == "__main__":
    main()
