"""Questions to a separate process, so that nothing that a policy wrote can block a worker.

The process (`question_server`) imports a module once and forks a copy of itself that answers questions by its function
`answer`. It has limits of CPU time, which does not depend on the machine's load, and of memory. The kernel kills a copy
that exceeds them, even in the middle of a computation, and the next question gets a new copy within milliseconds. Only
lines of JSON cross the pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from kuberoll_workers.data.causes import Evidence, ReasonName
from kuberoll_workers.environments.interface import Unavailable

CPU_SECONDS = 5.0
"""Default limit of CPU time of one question."""

MEMORY = 4 << 30
"""Default limit of the answering process's address space, in bytes."""

PATIENCE_SECONDS = 120.0
"""Wall-clock limit of one question; beyond it the process is considered broken, however loaded the machine is."""


class LimitExceeded(Exception):
    """A question exceeded its CPU time or memory; it has no answer."""


class ProcessFailed(Exception):
    """The process does not work; nothing is known about the question."""


class ProcessLost(Unavailable, ProcessFailed):
    """It was killed from outside, as by a machine that has no memory left."""

    reason: ClassVar[ReasonName] = "ProcessKilled"


# What KubeRoll does not send to it: its limits end it by SIGPROF, SIGSEGV or SIGABRT.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM)
_END_SECONDS: Final = 5.0


class QuestionProcess:
    """Client of the process. Thread-safe; one question is answered at a time."""

    def __init__(
        self,
        module: str,
        *,
        cpu_seconds: float = CPU_SECONDS,
        memory: int = MEMORY,
        confined: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """
        Args:
            module: Module with `answer`, from a question to its reply, both JSON, and optionally `prepare`, called once
                before the first question.
            cpu_seconds: Limit of CPU time of one question.
            memory: Limit of the answering process's address space, in bytes.
            confined: True to take all files, and the privileges of root, from the answering process.
            patience: Wall-clock limit of one question.
        """
        self._options = [module, str(cpu_seconds), str(memory), str(int(confined))]
        self._patience = patience
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def reply(self, question: Any) -> Any:
        """The reply to a question.

        Raises:
            LimitExceeded: The question exceeded its limits.
            ProcessFailed: The process ended, cannot be started, or does not answer.
            ProcessLost: It was killed from outside.
        """
        with self._lock:
            reply = self._exchange(json.dumps(question).encode() + b"\n")
        if "killed" in reply:
            self._refuse_if_from_outside(reply["killed"])
            raise LimitExceeded
        if "limit" in reply:
            raise LimitExceeded
        if "failed" in reply:
            raise ProcessFailed(reply["failed"])
        return reply["reply"]

    def _exchange(self, request: bytes) -> Any:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self._patience)
            line = process.stdout.readline() if ready else b""
            return json.loads(line)
        except (OSError, ValueError) as error:
            number = _signal(process)
            self._end()
            self._refuse_if_from_outside(number)
            raise ProcessFailed(f"the process of {self._options[0]} did not answer: {error}") from error

    def _refuse_if_from_outside(self, number: int) -> None:
        if number in _FROM_OUTSIDE:
            name = signal.Signals(number).name
            raise ProcessLost(
                f"the process of {self._options[0]} was killed from outside ({name}), perhaps because the machine's "
                "memory ran out",
                evidence=Evidence(signal=name),
            )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "kuberoll_workers.environments.builtin.question_server", *self._options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # It needs its modules, and none of the worker's other variables.
                    env={
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        "PATH": os.environ.get("PATH", os.defpath),
                        "PYTHONHASHSEED": "0",
                    },
                )
            except OSError as error:
                raise ProcessFailed(f"the process of {self._options[0]} cannot be started: {error}") from error
        return self._process

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The pipe closes with this object, so the process would end anyway.
        if (process := self.__dict__.get("_process")) is not None:
            process.kill()
            process.wait()


def _signal(process: subprocess.Popen[bytes]) -> int:
    """The number of the signal that ended a process which has not replied; not positive if none did, or it goes on."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 0)
    at_end = bool(ready) and not process.stdout.peek(1)  # type: ignore[attr-defined]
    with contextlib.suppress(subprocess.TimeoutExpired):
        # One that does not answer goes on, and has had its time.
        return -process.wait(_END_SECONDS if at_end else 0)
    return 0
