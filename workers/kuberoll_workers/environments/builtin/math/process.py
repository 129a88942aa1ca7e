"""Algebra in a separate process, so that no expression can block a worker.

The process imports sympy once and forks a copy of itself that answers questions. The copy has limits of CPU time, which
does not depend on the machine's load, and of memory. The kernel kills a copy that exceeds them, even in the middle of a
computation, and the next question gets a new copy within milliseconds. Only lines of JSON cross the pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

from kuberoll_workers.data.lifetime import end_with_parent

CPU_SECONDS = 5.0
"""Default limit of CPU time of one question."""

MEMORY = 4 << 30
"""Limit of the answering process's address space, in bytes."""

PATIENCE_SECONDS = 120.0
"""Wall-clock limit of one question; beyond it the process is considered broken, however loaded the machine is."""


class AlgebraLimit(Exception):
    """A question exceeded its CPU time or memory; it has no answer."""


class AlgebraFailed(Exception):
    """The algebra process does not work; nothing is known about the question."""


class AlgebraProcess:
    """Client of the algebra process. Thread-safe; one question is answered at a time."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS, patience: float = PATIENCE_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._patience = patience
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, truth: str, answer: str) -> bool | None:
        """Answer to one of `algebra.QUESTIONS`; None if one of the two texts is not mathematics.

        Raises:
            AlgebraLimit: The question exceeded its limits.
            AlgebraFailed: The process ended, cannot be started, or does not answer.
        """
        with self._lock:
            reply = self._exchange(json.dumps([question, truth, answer]).encode() + b"\n")
        if reply == "limit":
            raise AlgebraLimit(question)
        return None if reply == "unreadable" else bool(reply)

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
            self._end()
            raise AlgebraFailed(f"the algebra process did not answer: {error}") from error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "kuberoll_workers.environments.builtin.math.process",
                        str(self._cpu_seconds),
                    ],
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
                raise AlgebraFailed(f"the algebra process cannot be started: {error}") from error
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


class _Copy:
    """A forked copy of this process that answers questions until it exceeds a limit."""

    def __init__(self, cpu_seconds: float) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours_in)
            os.close(ours_out)
            end_with_parent()
            _answer(theirs_in, theirs_out, cpu_seconds)
        os.close(theirs_in)
        os.close(theirs_out)
        self._to = ours_out
        self._replies = os.fdopen(ours_in, "rb")

    def reply(self, request: bytes) -> bytes | None:
        """The reply to a request; None if the copy was killed."""
        with contextlib.suppress(OSError):
            os.write(self._to, request)
            line = self._replies.readline()
            if line.endswith(b"\n"):
                return line
        self._replies.close()
        os.close(self._to)
        os.waitpid(self.pid, 0)
        return None


def _answer(requests: int, replies: int, cpu_seconds: float) -> None:
    from kuberoll_workers.environments.builtin.math import algebra as math_algebra

    # The signal's default action kills the process even inside C code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in os.fdopen(requests, "rb"):
        question, truth, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply: bool | str = bool(math_algebra.QUESTIONS[question](truth, answer))
        except math_algebra.Unreadable:
            reply = "unreadable"
        except (MemoryError, RecursionError, OverflowError):
            reply = "limit"
        except Exception:
            # sympy raises many kinds of errors for incomparable values.
            reply = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, json.dumps(reply).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Entry point of the process: questions on standard input, answers on standard output, one line of JSON each."""
    from kuberoll_workers.environments.builtin.math import algebra as math_algebra

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    cpu_seconds = float(sys.argv[1])
    # Modules imported before the fork are available in every copy.
    math_algebra.equal("\\frac{1}{2} x + \\sqrt{2}", "\\sqrt{2} + 0.5 x")
    copy: _Copy | None = None
    for line in sys.stdin.buffer:
        copy = copy or _Copy(cpu_seconds)
        reply = copy.reply(line)
        if reply is None:
            copy, reply = None, b'"limit"\n'
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
