"""Algebra in a process of its own, so that no expression can stop a worker.

The process imports sympy once and forks a copy of itself that answers questions. The copy has a limit of processor
time, which the load of the machine does not use up, and one of memory; the kernel ends a copy that is over it, in the
middle of any computation, and the next question has a new copy within milliseconds. Only lines of JSON cross the pipes.
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
"""Processor time that one question may take."""

MEMORY = 4 << 30
"""Bytes of address space of the process that answers."""

PATIENCE_SECONDS = 120.0
"""Wall time after which an answer that does not come is a fault of the process, however loaded the machine is."""


class AlgebraLimit(Exception):
    """A question took more processor time or memory than it may: it has no answer."""


class AlgebraFailed(Exception):
    """The process that does the algebra does not work. Nothing is said about the question."""


class AlgebraProcess:
    """A client of the process. Safe in threads; one question is answered at a time."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS, patience: float = PATIENCE_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._patience = patience
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, truth: str, answer: str) -> bool | None:
        """The answer to one of `math_algebra.QUESTIONS`; None: one of the two is no mathematics.

        Raises:
            AlgebraLimit: It was too much to compute.
            AlgebraFailed: The process ended, cannot be started, or says nothing.
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
            raise AlgebraFailed(f"the process that does the algebra gave no answer: {error}") from error

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
                    # It needs to find its modules, and nothing else that the worker knows.
                    env={
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        "PATH": os.environ.get("PATH", os.defpath),
                        "PYTHONHASHSEED": "0",
                    },
                )
            except OSError as error:
                raise AlgebraFailed(f"the process that does the algebra cannot be started: {error}") from error
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
        # Its end of the pipe closes with it; the process sees that and ends.
        if (process := self.__dict__.get("_process")) is not None:
            process.kill()
            process.wait()


class _Copy:
    """A forked copy of this process that answers questions, until it is over a limit."""

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
        """None: it is gone."""
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

    # The default action of the signal ends the process even within a computation of C.
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
            # sympy has many kinds of "this cannot be compared".
            reply = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, json.dumps(reply).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """The process's entry point: questions at standard input, answers at standard output, a line of JSON each."""
    from kuberoll_workers.environments.builtin.math import algebra as math_algebra

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    cpu_seconds = float(sys.argv[1])
    # What is imported before the fork is there in every copy.
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
