"""The process that answers questions: `python -m`, started by `question_process`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from kuberoll_workers.data.lifetime import end_with_parent
from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.process_access import drop_capabilities


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

    def reply(self, request: bytes) -> bytes | int:
        """The reply to a request; the number of the signal that has killed the copy, 0 if none has."""
        with contextlib.suppress(OSError):
            os.write(self._to, request)
            line = self._replies.readline()
            if line.endswith(b"\n"):
                return line
        self._replies.close()
        os.close(self._to)
        _, status = os.waitpid(self.pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


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
        if isinstance(reply, int):
            copy, reply = None, b'{"killed": %d}\n' % reply
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
