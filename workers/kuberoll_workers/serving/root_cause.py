"""The one line of a log that says why an engine did not start."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping

MESSAGE_CHARACTERS = 800

_HINTS = {
    signal.SIGKILL: "; most often that is the kernel, out of memory: give it more",
    signal.SIGILL: "; this processor lacks an instruction that it needs: try another dtype (float32), or another build",
    signal.SIGBUS: "; most often /dev/shm is full: give it more",
}
_DEATH = re.compile(r"the engine's process \S+ was killed by signal [^\n]*")
# Ray's own words, in the log of a process that it started, about signals that can be caught.
_CRASH = re.compile(r":actor_name:(\S+).*?^\*\*\* (SIG[A-Z]+) received at time=", re.MULTILINE | re.DOTALL)
# Ray's words about an actor whose connection has ended, for whatever reason.
_LOST_ACTOR = re.compile(r"class_name: (\S+).{0,600}?Worker exit type: SYSTEM_ERROR", re.DOTALL)

_TRACEBACK = "Traceback (most recent call last):"
# The line below a traceback's frames, which are indented.
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
# What ends an exception's message of several lines.
_NEXT = re.compile(rf"[A-Z]+ \d|\(|:\w+:|The above exception|During handling|.*{re.escape(_TRACEBACK)}")
# What is raised because something else was: never the cause.
_CONSEQUENCES = (
    _TRACEBACK,
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "Engine process failed to start",
    "Deploying application",
    "WorkerProc initialization failed",
    "Worker exit type: SYSTEM_ERROR",
    "The actor died because its node has died",
    # The others of a group when one of them dies.
    "Connection closed by peer",
    "Connection reset by peer",
)


def death_by_signal(exit_codes: Mapping[str, int | None]) -> str | None:
    """A sentence about the process of an engine that a signal ended; None: there is none.

    Args:
        exit_codes: By the name of the process, as `multiprocessing` has them: a signal's number is negative.
    """
    killed = [(name, -code) for name, code in exit_codes.items() if code is not None and code < 0]
    # Those that still lived are ended in the wake of the first, by SIGTERM.
    killed.sort(key=lambda item: item[1] == signal.SIGTERM)
    for name, number in killed:
        try:
            known = signal.Signals(number)
        except ValueError:
            return f"the engine's process {name} was killed by signal {number}"
        return f"the engine's process {name} was killed by signal {number} ({known.name}){_HINTS.get(known, '')}"
    return None


def root_cause(texts: Iterable[str], killed: Mapping[str, int] | None = None) -> str | None:
    """The last exception, of the first text that has one, that is not the consequence of another; or a death.

    Args:
        texts: Logs with tracebacks, the most telling first.
        killed: Exit codes of the processes that were seen to end by a signal, by name, the first to die first. That
            may be in the wake of an exception, so an exception comes first.

    Returns:
        Its name and message in one line; None if there is none.
    """
    texts = list(texts)
    for text in texts:
        found = [
            words for words in _exceptions(text.splitlines()) if not any(known in words for known in _CONSEQUENCES)
        ]
        if found:
            return found[-1][:MESSAGE_CHARACTERS]
    # Ray writes a chain of exceptions with one heading only, and what kills a process is no exception at all.
    logged = next((match[0] for text in texts if (match := _DEATH.search(text))), None)
    death = logged or death_by_signal(killed or {}) or _lost_actor(texts)
    return death[:MESSAGE_CHARACTERS] if death else None


def _lost_actor(texts: Iterable[str]) -> str | None:
    """A sentence about an actor whose process died, from what Ray says of it."""
    for text in texts:
        crash = _CRASH.search(text)
        if crash is not None and (number := signal.Signals.__members__.get(crash[2])) is not None:
            return death_by_signal({crash[1]: -number})
    for text in texts:
        if (match := _LOST_ACTOR.search(text)) is not None:
            # Any other signal leaves Ray's words in the log.
            return f"the process of {match[1]} ended without a word, as by SIGKILL{_HINTS[signal.SIGKILL]}"
    return None


def _exceptions(lines: list[str]) -> Iterator[str]:
    frames = False
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            frames = True
        elif frames and line[:1] not in ("", " "):
            frames = False
            if (exception := _EXCEPTION.match(line)) is not None:
                name, message = exception.group(1).rpartition(".")[2], exception.group(2) or ""
                yield " ".join([f"{name}:", *message.split(), *_continuation(lines[number + 1 :])])


def _continuation(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if _NEXT.match(line):
            return
        # Pydantic's address of its own manual.
        if "For further information visit" not in line:
            yield from line.split()
