"""What to read to learn why a job waits: only what statuses, which are watched, do not say. Pure.

Events are many, and kept for an hour; a watch of them would cost a large cluster more than all that the operator does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from kuberoll_operator import names
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.model import Object, Observed, condition, indexes, is_true, status_of
from kuberoll_operator.signs import Subject
from kuberoll_operator.waiting.causes import awaits_start, claims_of, is_unready, is_unscheduled, was_ended

GRACE_SECONDS: Final = 10.0
"""Seconds in which an ordinary start needs no explanation."""

_OF_CLAIMS: Final = "persistentvolumeclaim"


class Question(NamedTuple):
    """Something to read about.

    Attributes:
        subject: What events are asked about; a PersistentVolumeClaim is read itself, too.
        since: When it began to wait.
        patient: True if its status already has a cause, to which events can only add.
    """

    subject: Subject
    since: datetime
    patient: bool = False


def questions(observed: Observed, now: datetime) -> list[Question]:
    """What to read about a job's objects: of the pods of a component about the first that waits."""
    found: dict[Subject, Question] = {}
    for question in _questions(observed, now):
        found.setdefault(question.subject, question)
    return list(found.values())


def _questions(observed: Observed, now: datetime) -> Iterator[Question]:
    # Several environments and services have one component.
    groups: dict[tuple[str, ...], list[Object]] = {}
    for pod in sorted(observed.pods, key=lambda item: str(item["metadata"].get("name"))):
        labels = pod["metadata"].get("labels") or {}
        keys = (names.COMPONENT_LABEL, names.ENVIRONMENT_LABEL, names.SERVICE_LABEL)
        if not pod["metadata"].get("deletionTimestamp"):
            groups.setdefault(tuple(str(labels.get(key, "")) for key in keys), []).append(pod)
    for pods in groups.values():
        waiting = next((pod for pod in pods if awaits_start(pod)), None)
        if waiting is not None:
            yield Question(_subject(waiting), _scheduled(waiting, now))
        unready = next((pod for pod in pods if is_unready(pod)), None)
        if unready is not None:
            yield Question(_subject(unready), _since(unready, "Ready", now), True)
        ended = next((pod for pod in pods if was_ended(pod)), None)
        if ended is not None:
            yield Question(_subject(ended), _since(ended, "Ready", now), True)
        unscheduled = next((pod for pod in pods if is_unscheduled(pod)), None)
        if unscheduled is not None:
            scheduled = condition(status_of(unscheduled), "PodScheduled")
            yield Question(_subject(unscheduled), _scheduled(unscheduled, now), bool(scheduled))
            if not scheduled or _OF_CLAIMS in str(scheduled.get("message") or "").lower():
                since = _scheduled(unscheduled, now)
                yield from (Question(Subject("PersistentVolumeClaim", name), since) for name in claims_of(unscheduled))
    no_engine = not any(component == names.GENERATION for component, *_ in groups)
    for (kind, _), item in sorted(observed.children.items()):
        if kind == "Job" and _lacks_pods(item):
            yield Question(_subject(item), _born(item, now))
        elif kind == "LeaderWorkerSet" and no_engine:
            yield Question(Subject("StatefulSet", item["metadata"]["name"]), _born(item, now))
        elif kind == "RayService" and no_engine and (cluster := ray_cluster_of(item)):
            yield Question(Subject("RayCluster", cluster), _born(item, now))


def _subject(item: Object) -> Subject:
    metadata = item["metadata"]
    kind = str(item.get("kind") or "Pod")
    return Subject(kind, str(metadata.get("name", "")), str(metadata.get("uid") or ""))


def _scheduled(pod: Object, now: datetime) -> datetime:
    return _since(pod, "PodScheduled", now)


def _since(pod: Object, kind: str, now: datetime) -> datetime:
    return parse_time(condition(status_of(pod), kind).get("lastTransitionTime")) or _born(pod, now)


def _born(item: Mapping[str, Any], now: datetime) -> datetime:
    return parse_time(item["metadata"].get("creationTimestamp")) or now


def _lacks_pods(job: Mapping[str, Any]) -> bool:
    """True if a Job that may run pods has fewer than it wants."""
    spec, status = job.get("spec") or {}, status_of(job)
    if spec.get("suspend") or any(is_true(status, kind) for kind in ("Complete", "Failed", "FailureTarget")):
        return False
    done = int(status.get("succeeded") or 0) + len(indexes(str(status.get("failedIndexes") or "")))
    wanted = min(int(spec.get("parallelism", 1)), int(spec.get("completions") or 1) - done)
    return int(status.get("active") or 0) < wanted


def ray_cluster_of(service: Mapping[str, Any]) -> str:
    """Name of the RayCluster that a RayService starts or has; empty if it has none yet."""
    status = status_of(service)
    parts = (status.get("pendingServiceStatus") or {}, status.get("activeServiceStatus") or {})
    return next((str(part["rayClusterName"]) for part in parts if part.get("rayClusterName")), "")
