"""Client of the launcher: runs confined programs, several at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from kuberoll_workers.data.causes import Evidence, ReasonName
from kuberoll_workers.environments.interface import Unavailable
from kuberoll_workers.environments.programs import scratch
from kuberoll_workers.environments.programs.model import (
    ConfinementUnavailable,
    MachineFull,
    Outcome,
    Program,
    ProgramFailed,
    ProgramKilled,
)

_START_SECONDS = 60.0


class ProgramLost(Unavailable, ProgramFailed):
    """The program, or who runs it, was killed from outside: nothing is known about it."""

    reason: ClassVar[ReasonName] = "ProcessKilled"


class DiskFull(Unavailable, MachineFull):
    """The machine had no room for a program's files."""

    reason: ClassVar[ReasonName] = "ResourceExhausted"


class ProgramRunner:
    """Runs confined programs. Thread-safe; its launcher is started with the first program."""

    def __init__(self, *, parallel: int | None = None, supervise_signals: bool = False) -> None:
        """
        Args:
            parallel: Programs at a time; None for one on each processor.
            supervise_signals: True to decide each signal in the supervisor, as on kernels before 6.12, where Landlock
                does not restrict signals.
        """
        self.parallel = parallel or len(os.sched_getaffinity(0))
        self._supervise_signals = supervise_signals
        self._slots = threading.BoundedSemaphore(self.parallel)
        self._lock = threading.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, program: Program) -> Outcome:
        """Run a program to its end.

        Raises:
            ConfinementUnavailable: This machine lacks a layer of the confinement.
            ProgramFailed: The program could not be started.
            ProgramLost: The machine killed it, or its supervisor.
            DiskFull: It had no room for its files.
        """
        with self._slots:
            directory = tempfile.mkdtemp(prefix="kuberoll-program-")
            try:
                for name, content in program.files.items():
                    Path(directory, name).write_bytes(content)
                return Outcome.from_json(self._ask(program.to_json(os.path.realpath(directory)) + b"\n"))
            except ProgramKilled as error:
                raise ProgramLost(str(error), evidence=Evidence(signal="SIGKILL")) from error
            except MachineFull as error:
                raise DiskFull(str(error), evidence=Evidence(error="ENOSPC")) from error
            finally:
                scratch.remove(directory)

    def run_all(self, programs: Sequence[Program]) -> list[Outcome]:
        """Run programs side by side; their outcomes in the same order."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(self.parallel, max(1, len(programs)))) as threads:
            return list(threads.map(self.run, programs))

    def check(self) -> None:
        """Start the launcher.

        Raises:
            ConfinementUnavailable: This machine lacks a layer of the confinement.
        """
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the launcher; programs that are running are killed."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"."], [theirs.fileno()])
                except OSError as error:
                    self._end()
                    raise ProgramLost(f"the launcher of programs is gone: {error}") from error
            answer = bytearray()
            try:
                ours.sendall(request)
                while chunk := ours.recv(1 << 20):
                    answer += chunk
            except OSError as error:
                raise ProgramLost(f"the program's supervisor is gone: {error}") from error
        if not answer:
            raise ProgramLost("the program's supervisor was killed, perhaps because the machine's memory ran out")
        return bytes(answer)

    def _started(self) -> socket.socket:
        if self._control is not None and self._launcher is not None and self._launcher.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        options = ["supervise-signals"] if self._supervise_signals else []
        # It needs its modules, and none of this process's other variables.
        variables = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PATH": os.environ.get("PATH", "")}
        with theirs:
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "kuberoll_workers.environments.programs.launcher"),
                    *(str(theirs.fileno()), *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        ours.settimeout(_START_SECONDS)
        said = bytearray()
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and (chunk := ours.recv(4096)):
                said += chunk
        ours.settimeout(None)
        message = json.loads(said) if said else "their launcher did not start"
        if message != "ok":
            self._end()
            raise ConfinementUnavailable(f"programs cannot be confined here: {message}")
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._launcher is not None:
            self._launcher.wait()
            self._launcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_control") is not None:
            self._end()
