"""How many episodes are prepared before they begin, where a job does not say it."""

from __future__ import annotations

from typing import Final

_PART: Final = 8


def usual_ahead(concurrency: int) -> int:
    """Number of episodes that a worker prepares beside so many that run: an eighth, at least one.

    It hides a start completely that takes at most an eighth of the time of its trajectories.
    """
    return -(-concurrency // _PART)
