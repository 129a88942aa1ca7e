"""An interpreter that imports modules beforehand, for a process that `multiprocessing` spawns later.

A spawned process begins its imports only when it is started. vLLM's engine is such a process, and in a Ray actor it
cannot be forked: a spare interpreter imports vLLM while its parent does.

All private parts of `multiprocessing` that KubeRoll uses are in this module; `tests/serving/test_spare_interpreter.py`
holds it to them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import msgspec

from kuberoll_workers.serving.engines.imports import without_collection

_LENGTH = struct.Struct("=Q")
_THREADS_VARIABLE = "OMP_NUM_THREADS"

# Without their types, which typeshed does not have.
_UTIL: Any = util
_POPEN: Any = popen_spawn_posix.Popen
_SPAWN_PROCESS: Any = SpawnProcess


class StartedProcess(NamedTuple):
    """A process that has got its work.

    Attributes:
        sentinel: File descriptor that becomes readable when the process ends.
        work: File descriptor by whose end the process recognizes that of its parent.
    """

    pid: int
    sentinel: int
    work: int


class SpareInterpreter:
    """A child process that imports modules and then waits for its work.

    It is used once. Like a new interpreter it has the environment variables of the moment in which it gets its work,
    and it ends if its parent does.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it.

        Args:
            modules: Their names. Errors of an import are ignored: the work meets them again when it needs the module.
        """
        self._executable = spawn.get_executable()
        self._tracker = resource_tracker.getfd()
        self._sentinel, child_end = os.pipe()
        work, self._work = os.pipe()
        command = [os.fsdecode(part) for part in spawn.get_command_line()]
        command[command.index("-c") + 1] = (
            f"from {__name__} import main; main(tracker={self._tracker}, work={work}, modules={tuple(modules)!r})"
        )
        try:
            self.pid: int = _UTIL.spawnv_passfds(
                os.fsencode(self._executable), command, [self._tracker, work, child_end]
            )
        finally:
            os.close(work)
            os.close(child_end)
        self._free = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Spawn the next process of `multiprocessing` in this interpreter while the context lasts.

        Others are spawned as usual. At the end, the interpreter is killed if it was not used.
        """
        popen = SpawnProcess.__dict__["_Popen"]
        _SPAWN_PROCESS._Popen = staticmethod(lambda process: _Popen(process, self))
        try:
            yield
        finally:
            _SPAWN_PROCESS._Popen = popen
            self._close()

    def take(self, work: bytes) -> StartedProcess | None:
        """Give it its work.

        Args:
            work: As `multiprocessing.spawn` reads it.

        Returns:
            None if it cannot be used: it has work already, has ended, or is of another program than processes that
            are spawned now.
        """
        if not self._free or spawn.get_executable() != self._executable or resource_tracker.getfd() != self._tracker:
            return None
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return None
        self._free = False
        variables = msgspec.json.encode(dict(os.environ))
        # If it ends now, whoever waits for the process learns it.
        with contextlib.suppress(BrokenPipeError), open(self._work, "wb", closefd=False) as pipe:
            pipe.write(_LENGTH.pack(len(variables)) + variables + work)
        return StartedProcess(self.pid, self._sentinel, self._work)

    def _close(self) -> None:
        if self._free:
            self._free = False
            os.close(self._work)
            os.close(self._sentinel)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Popen(_POPEN):  # type: ignore[misc]
    """A process in the spare interpreter if that is possible, else in a new one."""

    def __init__(self, process: BaseProcess, spare: SpareInterpreter) -> None:
        self._spare = spare
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        work = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), work)
            reduction.dump(process, work)
        finally:
            set_spawning_popen(None)
        # Only an interpreter that starts can inherit file descriptors.
        started = None if self._fds else self._spare.take(work.getvalue())
        if started is None:
            self._fds: list[int] = []
            super()._launch(process)
            return
        self.pid, self.sentinel, pipe = started
        self.finalizer = util.Finalize(self, _UTIL.close_fds, (self.sentinel, pipe))


def main(*, tracker: int, work: int, modules: Sequence[str]) -> None:
    """The interpreter's entry point.

    Args:
        tracker: File descriptor of the parent's resource tracker.
        work: File descriptor from which the work is read.
    """
    _find_title()
    with without_collection():
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    try:
        variables = _read(work, *_LENGTH.unpack(_read(work, _LENGTH.size)))
    except EOFError:
        # The parent has ended.
        return
    _set_environment(msgspec.json.decode(variables, type=dict[str, str]))
    try:
        spawn.spawn_main(pipe_handle=work, tracker_fd=tracker)
    except SystemExit as end:
        # As forked processes end: `multiprocessing` has cleaned up, and to free every object takes seconds.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


def _read(descriptor: int, size: int) -> bytes:
    """Read so many bytes and not one more: `multiprocessing` reads those that follow."""
    data = b""
    while len(data) < size:
        if not (part := os.read(descriptor, size - len(data))):
            raise EOFError
        data += part
    return data


def _find_title() -> None:
    """Have `setproctitle`, by which vLLM and Ray name their processes, find the place of this process's title.

    It finds it by the first environment variable, once: after that one has changed, it names nothing and says nothing.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def _set_environment(variables: dict[str, str]) -> None:
    threads = os.environ.get(_THREADS_VARIABLE)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    changed = os.environ.get(_THREADS_VARIABLE)
    if changed is not None and changed != threads and (torch := sys.modules.get("torch")) is not None:
        # PyTorch has read the variable already.
        torch.set_num_threads(int(changed))
