"""The one line of a log that says why an engine did not start."""

from __future__ import annotations

import re
from collections.abc import Iterable

MESSAGE_CHARACTERS = 1500

_ERROR_LINE = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.+)$")
# What is raised because something else was: never the cause.
_CONSEQUENCES = ("Engine core initialization failed", "Engine process failed to start", "Deploying application")


def root_cause(texts: Iterable[str]) -> str | None:
    """The first line of a log or traceback that names an error and is not the consequence of another.

    Args:
        texts: Most telling first.
    """
    for text in texts:
        for line in text.splitlines():
            found = _ERROR_LINE.search(line.rstrip())
            if found and not any(consequence in line for consequence in _CONSEQUENCES):
                kind = found.group(1).rpartition(".")[2]
                return f"{kind}: {found.group(2)}"[:MESSAGE_CHARACTERS]
    return None
