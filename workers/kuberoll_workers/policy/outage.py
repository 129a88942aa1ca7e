"""Outages of a policy: none of its replicas answers. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol, runtime_checkable

PATIENCE_SECONDS: Final = 5.0
"""Time for which a replica that gets requests may be in trouble, for example overloaded, until it counts as gone."""


class Outage(NamedTuple):
    """An outage: its newest reason, and its duration in seconds."""

    reason: str
    seconds: float


@runtime_checkable
class RemotePolicy(Protocol):
    """A policy behind endpoints, which may be gone for a while."""

    def outage(self) -> Outage | None:
        """The outage that requests wait for now; None: there is none."""
        ...


class Silence(NamedTuple):
    """What is known of a replica that does not answer.

    Attributes:
        reason: The newest one.
        since: Time of its last sign of life, or from when it has been tried since.
        requests: Requests that were in flight there when it was found out.
    """

    reason: str
    since: float
    requests: int


class OutageWatch:
    """The troubles of each replica since its last sign of life."""

    def __init__(self) -> None:
        self._troubles: dict[str, float] = {}
        self._silent: dict[str, Silence] = {}
        self._reason = ""
        self._answered = False
        self._began: float | None = None
        # Since when a replica has been working again during an outage.
        self._recovered: float | None = None

    def record_trouble(self, name: str, reason: str, since: float, *, requests: int = 0, busy: bool = False) -> None:
        """Record why no request is answered by a replica, or why discovery does not find any, and since when.

        Args:
            requests: Requests in flight there.
            busy: True if it answers: that it takes no more requests, or none of ours.
        """
        self._reason = reason
        self._troubles.setdefault(name, since)
        if not busy:
            first = self._silent.get(name)
            self._silent[name] = Silence(reason, since, requests) if first is None else first._replace(reason=reason)

    def record_recovery(self, name: str) -> None:
        """Record that a replica is healthy, or that discovery works, or that the replica is gone for good."""
        self._troubles.pop(name, None)
        self._silent.pop(name, None)

    def record_answer(self, name: str) -> None:
        """Record that a replica has answered a request."""
        self.record_recovery(name)
        self._answered = True

    def keep(self, names: Collection[str]) -> None:
        """Forget the troubles of replicas that are not there any more: all but these, and discovery's."""
        for name in self._troubles.keys() - {"", *names}:
            self.record_recovery(name)

    def silent(self, now: float) -> dict[str, Silence]:
        """The replicas that have not answered for a while, by their names, those that are silent for longest first."""
        found = [
            (name, silence)
            for name, silence in self._silent.items()
            if name and now - silence.since >= PATIENCE_SECONDS
        ]
        return dict(sorted(found, key=lambda item: (item[1].since, item[0])))

    def update(self, now: float, *, usable: Collection[str]) -> Outage | None:
        """The present outage; None: there is none. It begins with the last trouble, and ends at a call.

        Args:
            usable: The replicas that get requests.
        """
        working = any(now - self._troubles.get(name, now) < PATIENCE_SECONDS for name in usable)
        if not working and self._troubles:
            self._recovered = None
            self._began = max(self._troubles.values()) if self._began is None else self._began
        elif self._began is not None:
            # Health alone proves little: it may fail all requests as soon as it gets some.
            self._recovered = now if self._recovered is None else self._recovered
            if self._answered or now - self._recovered >= PATIENCE_SECONDS:
                self._began = self._recovered = None
        self._answered = False
        return None if self._began is None else Outage(self._reason, now - self._began)

    def last(self, now: float) -> Outage | None:
        """The outage at the last update, if it still lasts."""
        return None if self._began is None else Outage(self._reason, now - self._began)
