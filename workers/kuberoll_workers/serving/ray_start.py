"""Repeated attempts to start Ray.

Ray has fixed time limits for its own parts, which they may miss on a busy machine: the raylet exits when its agent has
not opened its port within 15 seconds, and the start fails after 30.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
ATTEMPTS: Final = 3
_CAUSE_CHARACTERS = 400

# A line of Ray's C++ parts at a level that ends the process, without the prefix that all such lines have.
_FATAL = re.compile(r"^\[[^\]]* [CF] \d+ \d+\] \(\w+\) \S+ +(.+)$", re.MULTILINE)
_PREAMBLE = re.compile(r"^.*?Check failed: (?:\S+ )?")


def start_in_attempts(start: Callable[[], object], clear: Callable[[], None], scratch: Path) -> None:
    """Start Ray; after a failure, clean up and retry.

    Args:
        start: Raises if Ray does not start.
        clear: Ends the processes that a failed start has left.
        scratch: Directory in which Ray keeps its sessions.

    Raises:
        RuntimeError: No attempt succeeded; the message has the reason of the last one, from Ray's logs if possible.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            start()
            return
        except Exception as error:
            cause = fatal_line(scratch) or f"{type(error).__name__}: {error}"
            clear()
            if attempt == ATTEMPTS:
                raise RuntimeError(f"Ray did not start in {ATTEMPTS} attempts: {cause}") from error
            _log.warning("Ray did not start, attempt %d of %d: %s", attempt, ATTEMPTS, cause)


def fatal_line(scratch: Path) -> str | None:
    """The message with which a part of Ray's newest session exited; None: none did."""
    sessions = sorted(path for path in scratch.glob("session_2*") if path.is_dir())
    for path in sorted((sessions[-1] / "logs").glob("*.err")) if sessions else ():
        if (found := _FATAL.search(path.read_text(errors="replace"))) is not None:
            return f"{path.stem}: {_PREAMBLE.sub('', found[1])[:_CAUSE_CHARACTERS]}"
    return None
