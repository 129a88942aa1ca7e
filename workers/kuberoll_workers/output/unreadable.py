"""Unreadable stored lines: left out with a warning, so that one of them does not make the others inaccessible."""

from __future__ import annotations

import logging

from kuberoll_workers.data.record import RecordError

_log = logging.getLogger(__name__)

_MOST = 100
_warned: set[str] = set()


def file_of(shard: str) -> str:
    """Name of the file that keeps the unreadable lines of a shard after its conversion to another format."""
    return f"unreadable-{shard.removeprefix('shard-')}.jsonl"


def warn_unreadable(error: RecordError, *, trajectory: bool) -> None:
    """Warn about an unreadable line, once even if the file is read repeatedly, and for at most a hundred lines.

    Args:
        error: Error that names the file and the line.
        trajectory: True if the line was a finished trajectory, False for a failure or a dropped one.
    """
    message = str(error)
    if message in _warned or len(_warned) > _MOST:
        return
    _warned.add(message)
    if len(_warned) > _MOST:
        _log.warning("more than %d stored lines cannot be read; further ones are left out silently", _MOST)
        return
    consequence = (
        "its trajectory counts as not done, and is run again when the run is resumed" if trajectory else "left out"
    )
    _log.warning("%s; the line stays where it is: %s", message, consequence)
