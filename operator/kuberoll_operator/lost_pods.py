"""Replacement of pods whose node is lost: a Job makes no second pod of an index before the first one has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from kuberoll_operator import names
from kuberoll_operator.backends.pods import is_disrupted, is_lost, pods_of
from kuberoll_operator.deadlines import format_time, parse_time
from kuberoll_operator.model import Object, Ref, StatusPatch

_OF_JOBS: Final = (names.CHECK, names.WORKERS, names.FINISH)
_LATE: Final = timedelta(seconds=30)
"""Time after the end of its grace period in which a pod's end must have been heard of."""


def end_lost_pods(pods: Sequence[Object], now: datetime) -> tuple[StatusPatch, ...]:
    """Patches that end those pods of Jobs that were deleted, and whose kubelet does not say that they have ended.

    That is so at once if their node does not answer, otherwise after their grace period. Kubernetes' own collector
    writes the same when somebody says that the node is out of service, or deletes it (pkg/controller/podgc, Kubernetes
    1.36). Here it need not be known whether a container still runs: a volume's shard is written by who holds its lock,
    for which the next pod waits, and in an object store each pod has files of its own.
    """
    return tuple(
        StatusPatch(Ref("v1", "Pod", pod["metadata"]["name"]), pod["metadata"]["resourceVersion"], _end(pod, now))
        for pod, time in _deleted_pods(pods)
        if now >= time
    )


def next_loss(pods: Sequence[Object], now: datetime) -> float | None:
    """Seconds until a pod counts as lost if nothing is heard of it; None if none is being deleted."""
    return min(((time - now).total_seconds() for _, time in _deleted_pods(pods) if time > now), default=None)


def _deleted_pods(pods: Sequence[Object]) -> Iterator[tuple[Object, datetime]]:
    """Pods of Jobs that are being deleted, each with the time at which it counts as lost."""
    for component in _OF_JOBS:
        for pod in pods_of(pods, component):
            # The end of its grace period.
            end = parse_time(pod["metadata"].get("deletionTimestamp"))
            if end is not None and pod["status"].get("phase") not in {"Succeeded", "Failed"}:
                yield pod, datetime.min.replace(tzinfo=end.tzinfo) if is_lost(pod) else end + _LATE


def _end(pod: Object, now: datetime) -> dict[str, Any]:
    ended: dict[str, Any] = {"phase": "Failed", "reason": "NodeLost"}
    if is_disrupted(pod):
        return ended
    # Without it the Job would count a failure of the shard.
    told = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "NodeLost",
        "message": "deleted, and its node does not say that it has ended",
        "lastTransitionTime": format_time(now),
    }
    others = [item for item in pod["status"].get("conditions") or () if item.get("type") != told["type"]]
    return {**ended, "conditions": [*others, told]}
