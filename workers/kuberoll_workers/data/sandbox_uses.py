"""What a trajectory's stored metadata says of the sandboxes that it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxUse:
    """A sandbox that a trajectory had.

    Attributes:
        asked: Unix time at which it was asked for.
        start_seconds: Time that its start took, waiting for other starts included.
        seconds: Time from its start to its end.
        ahead_seconds: The part of it before its trajectory had come to need it, where it was started ahead.
        left: True if it could not be removed.
    """

    asked: float
    start_seconds: float
    seconds: float
    ahead_seconds: float = 0.0
    left: bool = False

    @property
    def began(self) -> float:
        """Unix time from which it was there."""
        return self.asked + self.start_seconds


class SandboxUses(NamedTuple):
    """All sandboxes of a trajectory.

    Attributes:
        uses: Those in which it was played and scored.
        lost: Number of those that were lost before, in which it began.
    """

    uses: list[SandboxUse]
    lost: int


class _Result(msgspec.Struct):
    sandboxes: list[SandboxUse]
    sandboxes_lost: int = 0


def uses_of(metadata: Mapping[str, Any] | None) -> SandboxUses | None:
    """The sandboxes of a trajectory, of `metadata.result`; None if it says nothing of any."""
    found = (metadata or {}).get("result")
    if not isinstance(found, Mapping) or "sandboxes" not in found:
        return None
    try:
        result = msgspec.convert(found, _Result)
    except msgspec.ValidationError:
        # Another environment's own field of this name.
        return None
    return SandboxUses(result.sandboxes, result.sandboxes_lost)
