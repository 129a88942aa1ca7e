"""Moments at which time alone changes what is done with a job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.model import condition, is_true


def parse_time(text: Any) -> datetime | None:
    """A Kubernetes timestamp; None if it is none."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def active_deadline(job: RolloutJob, status: Mapping[str, Any]) -> datetime | None:
    """When a job that goes on has gone on for too long; one that was stopped begins to count anew."""
    start = parse_time(status.get("startTime"))
    seconds = job.spec.active_deadline_seconds
    if seconds is None or start is None or job.spec.suspend or is_true(status, conditions.SUSPENDED):
        return None
    return start + timedelta(seconds=seconds)


def startup_deadlines(job: RolloutJob, status: Mapping[str, Any]) -> dict[str, datetime]:
    """Until when what is awaited must have come, by the condition that says so.

    What workers need must have been found in order, then generation be ready, then a worker run: each has
    `startupDeadlineSeconds` from when the one before it came, and a resumed job has them anew.
    """
    if job.spec.suspend or is_true(status, conditions.SUSPENDED):
        return {}
    checked, generation, workers = (
        condition(status, kind)
        for kind in (conditions.WORKERS_CHECKED, conditions.GENERATION_READY, conditions.WORKERS_READY)
    )
    start = status.get("startTime")
    since: dict[str, list[Any]] = {}
    if checked.get("status") == "False":
        since[conditions.WORKERS_CHECKED] = [start]
    elif generation.get("status") == "False" and generation.get("reason") != Reason.RELEASED:
        since[conditions.GENERATION_READY] = [
            generation["lastTransitionTime"],
            checked.get("lastTransitionTime"),
            start,
        ]
    elif generation.get("status") == "True" and _never_ran(job, generation, workers):
        since[conditions.WORKERS_READY] = [generation["lastTransitionTime"], start]
    found: dict[str, datetime] = {}
    for part, texts in since.items():
        times = [time for text in texts if (time := parse_time(text)) is not None]
        if times:
            found[part] = max(times) + timedelta(seconds=job.spec.startup_deadline_seconds)
    return found


def _never_ran(job: RolloutJob, generation: Mapping[str, Any], workers: Mapping[str, Any]) -> bool:
    """Whether no worker has run since generation became ready; not where somebody else's endpoint waits for free."""
    if job.spec.workers.replicas == 0 or generation.get("reason") == Reason.EXTERNAL:
        return False
    times = [parse_time(item.get("lastTransitionTime")) for item in (workers, generation)]
    return workers.get("status") == "False" and None not in times and times[0] <= times[1]  # type: ignore[operator]


def end_of_life(job: RolloutJob, status: Mapping[str, Any]) -> datetime | None:
    """When a job that is over is to be deleted."""
    seconds = job.spec.ttl_seconds_after_finished
    for kind in (conditions.COMPLETE, conditions.FAILED):
        if seconds is not None and is_true(status, kind):
            ended_at = parse_time(condition(status, kind).get("lastTransitionTime"))
            return None if ended_at is None else ended_at + timedelta(seconds=seconds)
    return None
