"""Replicas that give no sign of life while they have requests or sessions. Pure: the time is an argument.

Silence alone says nothing: a response may take minutes. So a replica that has been silent for a while is asked for its
health, over a connection of its own, and counts as lost only when it does not say that it is well.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SILENT_SECONDS: Final = 5.0
"""Time without a sign of life after which a replica is asked for its health."""


class Loss(NamedTuple):
    """A replica's loss.

    Attributes:
        problem: What is wrong with it.
        at: Time at which that was found.
        stalled: True if it said so itself, which is no node's or network's fault.
    """

    problem: str
    at: float
    stalled: bool


class SilenceWatch:
    """Since when each replica with requests in flight or open sessions has been silent, and which of them are lost."""

    def __init__(self) -> None:
        self._silent_since: dict[str, float] = {}
        self._lost: dict[str, Loss] = {}

    @property
    def lost(self) -> dict[str, Loss]:
        """The replicas that are lost, by their ids."""
        return dict(self._lost)

    def begin(self, name: str, now: float) -> None:
        """Record that a request is sent to a replica, or a session opened there."""
        self._silent_since.setdefault(name, now)

    def end(self, name: str) -> None:
        """Record that a replica has no more of either: nothing is expected of it."""
        self._silent_since.pop(name, None)
        self._lost.pop(name, None)

    def hear(self, name: str, now: float) -> None:
        """Record a sign of life: an answer to a request, or that a replica says that it is well."""
        if name in self._silent_since:
            self._silent_since[name] = now
        self._lost.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Replicas to ask for their health; those that are lost are probed by the breaker."""
        return [
            name
            for name, since in self._silent_since.items()
            if now - since >= SILENT_SECONDS and name not in self._lost
        ]

    def silent_since(self, name: str) -> float | None:
        """Time of the last sign of life of a replica, or of its first request after it had none; None: it has none."""
        return self._silent_since.get(name)

    def lose(self, name: str, since: float, loss: Loss) -> bool:
        """Record that a replica is not well, if it has been silent since `since`; True if it is lost now."""
        if self._silent_since.get(name) != since:
            return False
        self._lost.setdefault(name, loss)
        return True
