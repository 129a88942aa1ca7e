"""The one line of a log that says why an engine did not start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MESSAGE_CHARACTERS = 800

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
)


def root_cause(texts: Iterable[str]) -> str | None:
    """The last exception, of the first text that has one, that is not the consequence of another.

    Args:
        texts: Logs with tracebacks, the most telling first.

    Returns:
        Its name and message in one line; None if there is none.
    """
    for text in texts:
        found = [
            words for words in _exceptions(text.splitlines()) if not any(known in words for known in _CONSEQUENCES)
        ]
        if found:
            return found[-1][:MESSAGE_CHARACTERS]
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
