"""Stored lines that cannot be read: left out with a warning, so that one of them does not lock in all the others."""

from __future__ import annotations

import logging

from kuberoll_workers.data.record import RecordError

_log = logging.getLogger(__name__)

_MOST = 100
_warned: set[str] = set()


def file_of(shard: str) -> str:
    """Where the unreadable lines of a shard are kept once the rest of it is in another format."""
    return f"unreadable-{shard.removeprefix('shard-')}.jsonl"


def set_aside(error: RecordError, *, trajectory: bool) -> None:
    """Warn of a line, once however often the file is read; after a hundred lines no further ones are named.

    Args:
        error: Names the file and the line.
        trajectory: Whether a finished trajectory is lost with it, as opposed to a failure or a dropped one.
    """
    message = str(error)
    if message in _warned or len(_warned) > _MOST:
        return
    _warned.add(message)
    if len(_warned) > _MOST:
        _log.warning("more than %d stored lines cannot be read; further ones are left out without a word", _MOST)
        return
    consequence = (
        "its trajectory counts as not done, and the run plays it again when it is resumed" if trajectory else "left out"
    )
    _log.warning("%s; the line stays where it is: %s", message, consequence)
