"""The root cause of an engine's failure, found in its logs and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping

MESSAGE_CHARACTERS = 800

_HINTS = {
    signal.SIGKILL: "; most often by the kernel, out of memory: raise the memory limit",
    signal.SIGILL: "; the processor lacks an instruction: try another dtype (float32) or another build",
    signal.SIGBUS: "; most often /dev/shm is full: enlarge it",
}
_DEATH = re.compile(r"the engine's process \S+ was killed by signal [^\n]*")
# Ray's message about a signal that can be caught, in the log of a process that it started.
_CRASH = re.compile(r":actor_name:(\S+).*?^\*\*\* (SIG[A-Z]+) received at time=", re.MULTILINE | re.DOTALL)
# Ray's message about an actor whose connection has ended, whatever the reason.
_LOST_ACTOR = re.compile(r"class_name: (\S+).{0,600}?Worker exit type: SYSTEM_ERROR", re.DOTALL)

# Title of a process of Ray that has not taken that of its actor yet.
_NO_ACTOR = "IDLE"

_TRACEBACK = "Traceback (most recent call last):"
# The line below a traceback's frames, which are indented.
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
# The line after an exception's message of several lines.
_NEXT = re.compile(rf"[A-Z]+ \d|\(|:\w+:|The above exception|During handling|.*{re.escape(_TRACEBACK)}")
# Exceptions that follow from another one, and so are never the root cause.
_CONSEQUENCES = (
    _TRACEBACK,
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "Engine process failed to start",
    "Deploying application",
    "WorkerProc initialization failed",
    "Worker exit type: SYSTEM_ERROR",
    "The actor died because its node has died",
    # From the other members of a group when one of them dies.
    "Connection closed by peer",
    "Connection reset by peer",
)


def death_by_signal(exit_codes: Mapping[str, int | None]) -> str | None:
    """A sentence about the first process of an engine that a signal killed; None if there is none.

    Args:
        exit_codes: By process name, as in `multiprocessing`: negative numbers are signals.
    """
    killed = [(name, -code) for name, code in exit_codes.items() if code is not None and code < 0]
    # The surviving ones are ended by SIGTERM afterwards.
    killed.sort(key=lambda item: item[1] == signal.SIGTERM)
    for name, number in killed:
        try:
            known = signal.Signals(number)
        except ValueError:
            return f"the engine's process {name} was killed by signal {number}"
        return f"the engine's process {name} was killed by signal {number} ({known.name}){_HINTS.get(known, '')}"
    return None


def root_cause(texts: Iterable[str], killed: Mapping[str, int] | None = None) -> str | None:
    """Find the root cause of a failure: the last exception that does not follow from another one, or a death by signal.

    Args:
        texts: Logs with tracebacks, the most informative first.
        killed: Exit codes of processes killed by signals, by name, in the order of their deaths. Such a death may
            follow from an exception, so exceptions take precedence.

    Returns:
        The exception's name and message in one line, or a sentence about the death; None if neither is found.
    """
    texts = list(texts)
    for text in texts:
        causes = [
            words for words in _exceptions(text.splitlines()) if not any(known in words for known in _CONSEQUENCES)
        ]
        if causes:
            return causes[-1][:MESSAGE_CHARACTERS]
    # Ray writes a chain of exceptions under one heading, and a process that is killed raises none.
    logged = next((match[0] for text in texts if (match := _DEATH.search(text))), None)
    death = logged or death_by_signal(_with_actor(killed or {}, texts)) or _lost_actor(texts)
    return death[:MESSAGE_CHARACTERS] if death else None


def _with_actor(killed: Mapping[str, int], texts: Iterable[str]) -> Mapping[str, int]:
    """The same exit codes; a process that died before it had its actor's name has it from Ray's logs."""
    if _NO_ACTOR not in killed:
        return killed
    actor = next((match[1] for text in texts if (match := _LOST_ACTOR.search(text))), _NO_ACTOR)
    return {actor if name == _NO_ACTOR else name: code for name, code in killed.items()}


def _lost_actor(texts: Iterable[str]) -> str | None:
    """A sentence about an actor whose process died, from Ray's logs."""
    for text in texts:
        crash = _CRASH.search(text)
        if crash is not None and (number := signal.Signals.__members__.get(crash[2])) is not None:
            return death_by_signal({crash[1]: -number})
    for text in texts:
        if (match := _LOST_ACTOR.search(text)) is not None:
            # For any other signal Ray logs a message.
            return f"the process of {match[1]} ended without a message, as by SIGKILL{_HINTS[signal.SIGKILL]}"
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
        # Pydantic's link to its manual.
        if "For further information visit" not in line:
            yield from line.split()
