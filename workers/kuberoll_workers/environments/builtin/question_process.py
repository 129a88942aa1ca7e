"""Questions to a separate process, so that nothing that a policy wrote can block a worker.

The process imports a module once and forks a copy of itself that answers questions by its function `answer`. It has
limits of CPU time, which does not depend on the machine's load, and of memory. The kernel kills a copy that exceeds
them, even in the middle of a computation, and the next question gets a new copy within milliseconds. Only lines of JSON
cross the pipes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from kuberoll_workers.data.lifetime import end_with_parent
from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.process_access import drop_capabilities

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
        """
        with self._lock:
            reply = self._exchange(json.dumps(question).encode() + b"\n")
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
            self._end()
            raise ProcessFailed(f"the process of {self._options[0]} did not answer: {error}") from error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "kuberoll_workers.environments.builtin.question_process", *self._options],
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


class _Copy:
    """A forked copy of this process that answers questions until it exceeds a limit."""

    def __init__(self, answer: Callable[[Any], Any], *, cpu_seconds: float, memory: int, confined: bool) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours_in)
            os.close(ours_out)
            end_with_parent()
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if confined:
                _confine()
            _answer(answer, theirs_in, theirs_out, cpu_seconds)
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


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    drop_capabilities()
    if landlock.abi() > 0:
        landlock.restrict([])


def _answer(answer: Callable[[Any], Any], requests: int, replies: int, cpu_seconds: float) -> None:
    # The signal's default action kills the process even inside C code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in os.fdopen(requests, "rb"):
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply = {"reply": answer(question)}
        except (MemoryError, RecursionError, OverflowError):
            reply = {"limit": True}
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, json.dumps(reply).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Entry point of the process: questions on standard input, answers on standard output, one line of JSON each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    name, cpu_seconds, memory, confined = sys.argv[1:]
    # What is imported before the fork is available in every copy.
    module = importlib.import_module(name)
    getattr(module, "prepare", bool)()
    copy: _Copy | None = None
    for line in sys.stdin.buffer:
        copy = copy or _Copy(
            module.answer, cpu_seconds=float(cpu_seconds), memory=int(memory), confined=bool(int(confined))
        )
        reply = copy.reply(line)
        if reply is None:
            copy, reply = None, b'{"limit": true}\n'
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
