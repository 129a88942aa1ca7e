"""Signs of why a job's objects wait: the events about them, and the claims that they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple


class Subject(NamedTuple):
    """An object that events are about, in the job's namespace.

    Attributes:
        uid: Empty if it is not known: events about an earlier object of the same name count, too.
    """

    kind: str
    name: str
    uid: str = ""


class ClusterEvent(NamedTuple):
    """An event.

    Attributes:
        type: `Normal` or `Warning`.
        seen: When it was seen last, as Kubernetes wrote it; empty if that is unknown.
    """

    type: str
    reason: str
    message: str
    seen: str


def read_event(item: Mapping[str, Any]) -> ClusterEvent:
    """The event of an object of kind Event, core/v1 or events.k8s.io/v1."""
    series = item.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        item.get("lastTimestamp") or item.get("deprecatedLastTimestamp"),
        item.get("eventTime"),
        item.get("firstTimestamp") or item.get("deprecatedFirstTimestamp"),
        (item.get("metadata") or {}).get("creationTimestamp"),
    )
    return ClusterEvent(
        type=str(item.get("type") or ""),
        reason=str(item.get("reason") or ""),
        message=" ".join(str(item.get("message") or item.get("note") or "").split()),
        seen=next((_comparable(time) for time in times if time), ""),
    )


def in_order(events: Iterable[ClusterEvent]) -> list[ClusterEvent]:
    """Events, the last one at the end."""
    return sorted(events, key=lambda event: event.seen)


def _comparable(time: object) -> str:
    # Whole seconds and microseconds would not sort as text.
    text = str(time).removesuffix("Z")
    seconds, _, fraction = text.partition(".")
    return f"{seconds}.{fraction:0<6}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs of why things wait.

    Attributes:
        events: By kind and name of the object that they are about.
        claims: PersistentVolumeClaims by name; None for one that does not exist.
        time: When they were last read.
    """

    events: Mapping[tuple[str, str], Sequence[ClusterEvent]] = field(default_factory=dict)
    claims: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    time: datetime = datetime(1970, 1, 1, tzinfo=UTC)

    def about(self, kind: str, name: str) -> Sequence[ClusterEvent]:
        """Events about an object."""
        return self.events.get((kind, name), ())


NO_SIGNS = Signs()
