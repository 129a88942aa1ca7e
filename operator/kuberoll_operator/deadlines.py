"""Deadlines of a job: the moments at which time alone changes what is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.model import condition, is_true

_WITHOUT_ENGINES: Final = frozenset(
    {Reason.JOB_SUSPENDED, Reason.QUEUED, Reason.SHARDS_DONE, Reason.WAITING_FOR_GENERATION}
)
# Of generation that is not ready, and does not start either.
_NOT_STARTING: Final = frozenset({Reason.RELEASED, Reason.NOT_ANSWERING})


def parse_time(text: Any) -> datetime | None:
    """A Kubernetes timestamp as a datetime with a time zone; None if it cannot be parsed."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def format_time(time: datetime) -> str:
    """A Kubernetes timestamp, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def active_deadline(job: RolloutJob, status: Mapping[str, Any], *, stored: bool) -> datetime | None:
    """Moment at which `activeDeadlineSeconds` ends; None if there is none. Suspension resets the clock.

    Args:
        stored: All shards are done. Their aggregation, which asks for no GPU, has `startupDeadlineSeconds` more: a job
            whose trajectories are all there does not fail in the seconds before its end.
    """
    start = parse_time(status.get("startTime"))
    seconds = job.spec.active_deadline_seconds
    if seconds is None or start is None or job.spec.suspend or is_true(status, conditions.SUSPENDED):
        return None
    return start + timedelta(seconds=seconds + (job.spec.startup_deadline_seconds if stored else 0))


def startup_deadlines(job: RolloutJob, status: Mapping[str, Any]) -> dict[str, datetime]:
    """Startup deadlines that are running now, by the condition that must become True before them.

    First the workers' check must succeed, then generation become ready, then a worker run. Each step has
    `startupDeadlineSeconds` from the end of the one before it; resuming a job resets them.
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
    elif generation.get("status") == "False" and generation.get("reason") not in _NOT_STARTING:
        since[conditions.GENERATION_READY] = [
            generation["lastTransitionTime"],
            checked.get("lastTransitionTime"),
            start,
            # Engines that were given back start again with the first worker that runs.
            *([workers.get("lastTransitionTime")] if workers.get("status") == "True" else []),
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
    """True if no worker has run since generation became ready; never for an external policy: waiting costs no GPUs.

    With services it does.
    """
    if job.spec.workers.replicas == 0:
        return False
    if generation.get("reason") == Reason.EXTERNAL and not job.spec.services:
        return False
    times = [parse_time(item.get("lastTransitionTime")) for item in (workers, generation)]
    return workers.get("status") == "False" and None not in times and times[0] <= times[1]  # type: ignore[operator]


def idle_deadline(job: RolloutJob, status: Mapping[str, Any], seconds: float) -> datetime | None:
    """Moment at which engines are given back because no worker runs any more; None while one does, or none ever did.

    Args:
        seconds: The operator's `idle_engines_seconds`.
    """
    workers, generation = (condition(status, kind) for kind in (conditions.WORKERS_READY, conditions.GENERATION_READY))
    if workers.get("status") != "False" or workers.get("reason") in _WITHOUT_ENGINES:
        return None
    # Before the first worker runs, the startup deadline counts.
    if generation.get("status") == "True" and _never_ran(job, generation, workers):
        return None
    since = parse_time(workers.get("lastTransitionTime"))
    return None if since is None else since + timedelta(seconds=seconds)


def end_of_life(job: RolloutJob, status: Mapping[str, Any]) -> datetime | None:
    """Moment at which a finished job is to be deleted; None if it is not finished, or is kept."""
    seconds = job.spec.ttl_seconds_after_finished
    for kind in (conditions.COMPLETE, conditions.FAILED):
        if seconds is not None and is_true(status, kind):
            ended_at = parse_time(condition(status, kind).get("lastTransitionTime"))
            return None if ended_at is None else ended_at + timedelta(seconds=seconds)
    return None
