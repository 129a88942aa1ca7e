"""The status of a job, computed as a whole and written only when it has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_api.contract import FinishMessage
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.status import number_text, ratio_text
from kuberoll_operator import names
from kuberoll_operator.backends import runs_in_job
from kuberoll_operator.backends.pods import (
    pods_of,
)
from kuberoll_operator.deadlines import (
    active_deadline,
    end_of_life,
    format_time,
    idle_deadline,
    parse_time,
    startup_deadlines,
)
from kuberoll_operator.facts import STOPPED, UNDER_WAY, Facts, Stage
from kuberoll_operator.main_condition import main_condition
from kuberoll_operator.model import condition, is_true, status_of
from kuberoll_operator.status.conditions import Verdict, conditions_of, merge_conditions, served_version
from kuberoll_operator.status.counts import mean_reward, progress_of

Json = dict[str, Any]

_PHASES: Final[Mapping[Stage, str]] = {
    Stage.CHECKING: "Starting",
    Stage.STARTING: "Starting",
    Stage.RUNNING: "Running",
    Stage.SUSPENDED: "Suspended",
    Stage.QUEUED: "Queued",
    Stage.FINISHING: "Finishing",
    Stage.CLEARING: "Finishing",
    Stage.FAILING: "Failed",
}


def compute_status(facts: Facts) -> Json:
    """The complete status of a job.

    It is the old one, unchanged, if nothing has changed. Numbers and messages are updated at most every
    `settings.progress_seconds`.

    Args:
        facts: The facts after the writes of this reconcile, including the failed ones.
    """
    job, raw, settings, now = facts.job, facts.raw, facts.settings, facts.now
    old = dict(status_of(raw))
    if facts.stage is Stage.UNMANAGED:
        return old
    generation = raw["metadata"].get("generation", 0)
    if facts.stage is Stage.OVER:
        return {**old, "observedGeneration": generation}
    time = format_time(now)
    found = conditions_of(facts)
    start = None if facts.stage in STOPPED and "startTime" not in old else _start_time(facts, old, time)
    over = found.get(conditions.COMPLETE, (False,))[0] or found.get(conditions.FAILED, (False,))[0]
    new: Json = {
        "observedGeneration": generation,
        "phase": _phase(facts, found),
        **({"startTime": start} if start else {}),
        **({"completionTime": time} if over else {}),
        "conditions": merge_conditions(old, found, time, generation),
        "generation": _generation(old, facts),
        "workers": _workers(old, facts),
        "progress": progress_of(old, facts),
        **({"output": {"uri": uri}} if (uri := job.spec.output.uri) is not None else {}),
    }
    if (results := _results(job, facts.finish.message) or old.get("results")) is not None:
        new["results"] = results
    new["summary"] = _summary(new)
    if _without_time(new) == _without_time(old):
        return old
    if _urgent_part(new) == _urgent_part(old) and (soon := _next_write(old, settings.progress_seconds)) and now < soon:
        return old
    new["progress"]["lastUpdated"] = time
    return new


def next_deadline(
    job: RolloutJob, status: Mapping[str, Any], now: datetime, *, interval: float = 15.0, idle: float = 600.0
) -> float | None:
    """Seconds until something is due by time alone; None if nothing is.

    Args:
        status: The status from `compute_status`.
        interval: Seconds between two writes of progress.
        idle: Seconds without a worker after which engines are given back.
    """
    if is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED):
        due = [end_of_life(job, status)]
    elif is_true(status, conditions.FAILURE_TARGET):
        due = []
    else:
        written = _next_write(status, interval)
        # Delayed numbers are written by then; anything new comes with an event or from polling.
        due = [] if written is None or written <= now else [written]
        if not is_true(status, conditions.SUCCESS_CRITERIA_MET):
            due += [active_deadline(job, status, stored=stored) for stored in (False, True)]
            due += startup_deadlines(job, status).values()
            due.append(idle_deadline(job, status, idle))
            # One that has passed without failing the job does not apply to it anymore.
            due = [time for time in due if time is not None and time > now]
    seconds = [(time - now).total_seconds() for time in due if time is not None]
    return max(0.0, min(seconds)) if seconds else None


def _phase(facts: Facts, found: Mapping[str, Verdict]) -> str:
    observed = facts.observed
    if conditions.COMPLETE in found:
        return "Succeeded"
    if facts.stage in {Stage.CHECKING, Stage.STARTING} and (facts.name_conflict or observed.errors):
        return "Pending"
    return _PHASES[facts.stage]


def _start_time(facts: Facts, old: Json, time: str) -> str:
    """Start time: set when the job first runs, and again when it is resumed or readmitted, as batch/v1 does."""
    before = condition(old, conditions.SUSPENDED)
    goes_on = {Reason.JOB_RESUMED, Reason.ADMITTED}
    resumed = bool(before) and before.get("reason") not in goes_on and facts.stage not in STOPPED
    return time if resumed or "startTime" not in old else str(old["startTime"])


def _generation(old: Json, facts: Facts) -> Json:
    state, version = facts.generation, served_version(old, facts)
    wanted = state.desired if facts.stage in UNDER_WAY else 0
    kept = {} if version is None else {"policyVersion": version}
    if facts.check.commit is not None:
        kept["modelCommit"] = facts.check.commit
    counts = {"readyReplicas": state.ready, "desiredReplicas": wanted}
    return {"backend": facts.backend, "endpoint": facts.hosting.endpoint, **counts, **kept}


def _workers(old: Json, facts: Facts) -> Json:
    job, observed = facts.job, facts.observed
    shards, before = facts.shards, old.get("workers") or {}
    running = [
        pod
        for pod in pods_of(observed.pods, names.WORKERS)
        if pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    there = shards.exists
    # The number of shards can be edited until the Job is created.
    settled = there or shards.done or facts.stage is Stage.RUNNING or "shards" in before
    return {
        "desired": min(job.spec.workers.replicas, shards.count),
        "active": shards.active,
        "ready": len(running),
        "succeeded": shards.succeeded if there else max(shards.succeeded, before.get("succeeded", 0)),
        "failed": len(shards.failed) if there else before.get("failed", 0),
        **({"shards": shards.count} if settled else {}),
        "selector": names.selector_text(job.metadata.name, names.WORKERS),
    }


def _results(job: RolloutJob, message: FinishMessage | None) -> Json | None:
    """Main results, as the finish pod reports them."""
    if message is None:
        return None
    listed = [
        {"name": name, "trajectories": result.trajectories, "failed": result.failed, **mean_reward(result.mean_reward)}
        for name in sorted(environment.name for environment in job.spec.environments)
        if (result := message.environments.get(name)) is not None
    ]
    return {
        "trajectories": message.trajectories,
        "failed": message.failed,
        "dropped": message.dropped,
        **mean_reward(message.mean_reward),
        "environments": listed,
    }


def _summary(status: Json) -> Json:
    """Columns of `kubectl get`."""
    generation, workers, progress = status["generation"], status["workers"], status["progress"]
    results = status.get("results") or progress
    replicas = ratio_text(generation["readyReplicas"], generation["desiredReplicas"])
    return {
        "generation": replicas if runs_in_job(generation["backend"]) else "-",
        "workers": ratio_text(workers["ready"], workers["desired"]),
        "progress": ratio_text(progress["completed"], progress["trajectories"]),
        "meanReward": number_text(results.get("meanReward")),
        "reason": str(main_condition(status)["reason"])[:64],
    }


def _next_write(status: Mapping[str, Any], interval: float) -> datetime | None:
    last = parse_time((status.get("progress") or {}).get("lastUpdated"))
    return None if last is None else last + timedelta(seconds=interval)


def _without_time(status: Mapping[str, Any]) -> Json:
    return {**status, "progress": _omit(status.get("progress") or {}, ("lastUpdated",))}


def _urgent_part(status: Mapping[str, Any]) -> Json:
    """The part of the status that is written at once: everything but counters, and messages whose reason stays."""
    return {
        **_omit(status, ("progress", "summary")),
        "conditions": [_omit(item, ("message",)) for item in status.get("conditions") or ()],
        "generation": _omit(status.get("generation") or {}, ("readyReplicas",)),
        "workers": _omit(status.get("workers") or {}, ("active", "ready", "succeeded", "failed")),
        "begun": _start_flags(status.get("progress") or {}),
    }


def _start_flags(progress: Mapping[str, Any]) -> tuple[bool, bool]:
    """Two flags: the number of trajectories is known, and the first one has ended."""
    return bool(progress.get("trajectories")), bool(progress.get("completed") or progress.get("failed"))


def _omit(mapping: Mapping[str, Any], keys: Iterable[str]) -> Json:
    left_out = set(keys)
    return {key: value for key, value in mapping.items() if key not in left_out}
