"""The status of a job: what it is doing and why, as one whole that is written only when it says something new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kuberoll_api import conditions, contract
from kuberoll_api.conditions import CONDITION_TYPES, Reason
from kuberoll_api.contract import FinishMessage, PodProgress, WorkerMessage
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.types import MAX_COUNT
from kuberoll_api.status import number_text, ratio_text
from kuberoll_operator import names
from kuberoll_operator.backends import runs_in_job
from kuberoll_operator.backends.pods import (
    MESSAGE_CHARACTERS,
    Problem,
    any_active,
    diagnose,
    how_it_ended,
    last_exit,
    pods_of,
    redact,
    shard_of,
)
from kuberoll_operator.deadlines import active_deadline, end_of_life, parse_time, startup_deadlines
from kuberoll_operator.facts import STOPPED, Cause, Facts, Stage, is_at_rest, is_ours
from kuberoll_operator.messages import worker_message
from kuberoll_operator.model import Observed, condition, is_true, status_of

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

_UNDER_WAY: Final = frozenset({Stage.STARTING, Stage.RUNNING})

# The pace is a mean over so much of the past, in seconds.
_PACE_SECONDS: Final = 900.0

_LARGEST: Final = 1e300

# What the model's own weights are called.
_OWN_VERSION: Final = "0"

_Verdict = tuple[bool, str, str]


def compute_status(facts: Facts) -> Json:
    """The whole status of a job.

    It is the old one, unchanged, where nothing new is to be said, or only numbers and words that can wait: they are
    written at most every `settings.progress_seconds`.

    Args:
        facts: As they are after this reconcile has written: with what could not be written.
    """
    job, raw, settings, now = facts.job, facts.raw, facts.settings, facts.now
    old = dict(status_of(raw))
    if facts.stage is Stage.UNMANAGED:
        return old
    generation = raw["metadata"].get("generation", 0)
    if facts.stage is Stage.OVER:
        return {**old, "observedGeneration": generation}
    time = format_time(now)
    found = _conditions(facts)
    start = None if facts.stage in STOPPED and "startTime" not in old else _start_time(facts, old, time)
    over = found.get(conditions.COMPLETE, (False,))[0] or found.get(conditions.FAILED, (False,))[0]
    new: Json = {
        "observedGeneration": generation,
        "phase": _phase(facts, found),
        **({"startTime": start} if start else {}),
        **({"completionTime": time} if over else {}),
        "conditions": _merged(old, found, time, generation),
        "generation": _generation(old, facts),
        "workers": _workers(old, facts),
        "progress": _progress(old, facts),
    }
    if (results := _results(job, facts.finish.message) or old.get("results")) is not None:
        new["results"] = results
    new["summary"] = _summary(new)
    if _without_time(new) == _without_time(old):
        return old
    if _pressing(new) == _pressing(old) and (soon := _next_write(old, settings.progress_seconds)) and now < soon:
        return old
    new["progress"]["lastUpdated"] = time
    return new


def next_deadline(job: RolloutJob, status: Mapping[str, Any], now: datetime, *, interval: float = 15.0) -> float | None:
    """Seconds until something is due by time alone; None: nothing is.

    Args:
        status: As `compute_status` gave it.
        interval: Seconds between two writes of progress.
    """
    if is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED):
        due = [end_of_life(job, status)]
    elif is_true(status, conditions.FAILURE_TARGET):
        due = []
    else:
        written = _next_write(status, interval)
        # Whatever was kept back is written by then; more to say comes with an event, or from the pods that are asked.
        due = [] if written is None or written <= now else [written]
        if not is_true(status, conditions.SUCCESS_CRITERIA_MET):
            due += [active_deadline(job, status), *startup_deadlines(job, status).values()]
    seconds = [(time - now).total_seconds() for time in due if time is not None]
    return max(0.0, min(seconds)) if seconds else None


def format_time(time: datetime) -> str:
    """A Kubernetes timestamp, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _phase(facts: Facts, found: Mapping[str, _Verdict]) -> str:
    observed = facts.observed
    if conditions.COMPLETE in found:
        return "Succeeded"
    if facts.stage in {Stage.CHECKING, Stage.STARTING} and (facts.taken or observed.errors):
        return "Pending"
    return _PHASES[facts.stage]


def _start_time(facts: Facts, old: Json, time: str) -> str:
    """Set when the job first runs, and anew when it is resumed or admitted again, as batch/v1 does."""
    before = condition(old, conditions.SUSPENDED)
    goes_on = {Reason.JOB_RESUMED, Reason.ADMITTED}
    resumed = bool(before) and before.get("reason") not in goes_on and facts.stage not in STOPPED
    return time if resumed or "startTime" not in old else str(old["startTime"])


def _conditions(facts: Facts) -> dict[str, _Verdict]:
    """The conditions that are known now, by type."""
    job, raw, observed = facts.job, facts.raw, facts.observed
    old = status_of(raw)
    found: dict[str, _Verdict] = {}
    suspended = condition(old, conditions.SUSPENDED)
    if facts.stage is Stage.SUSPENDED:
        found[conditions.SUSPENDED] = _suspended(observed, settled=facts.settled)
    elif facts.stage is Stage.QUEUED:
        error = _error(observed, job, names.workload)
        words = redact(f"{facts.quota.message}; {error.message}" if error else facts.quota.message)
        found[conditions.SUSPENDED] = (facts.settled, Reason.QUEUED if facts.settled else Reason.EVICTED, words)
    elif suspended and facts.stage is not Stage.FAILING:
        admitted = facts.quota.queue is not None
        reason = Reason.ADMITTED if admitted else Reason.JOB_RESUMED
        found[conditions.SUSPENDED] = (False, reason, facts.quota.message)
    if (checked := _workers_checked(old, facts)) is not None:
        found[conditions.WORKERS_CHECKED] = checked
    found[conditions.GENERATION_READY] = _generation_ready(old, facts)
    found[conditions.WORKERS_READY] = _workers_ready(old, facts)
    if (weights := _weights_served(old, facts)) is not None:
        found[conditions.WEIGHTS_SERVED] = weights
    if facts.stage is Stage.FINISHING:
        found[conditions.SUCCESS_CRITERIA_MET] = _finishing(facts)
    if facts.stage is Stage.CLEARING:
        before = condition(old, conditions.SUCCESS_CRITERIA_MET)
        text = before.get("message", "") if before.get("status") == "True" else _outcome(facts)
        found[conditions.SUCCESS_CRITERIA_MET] = (True, Reason.TRAJECTORIES_DONE, text)
        if facts.settled:
            found[conditions.COMPLETE] = (True, Reason.TRAJECTORIES_DONE, text)
    if facts.stage is Stage.FAILING and facts.failure is not None:
        found[conditions.FAILURE_TARGET] = (True, facts.failure.reason, facts.failure.message)
        jobs = [observed.get("Job", part(job.metadata.name)) for part in (names.check, names.workers, names.finish)]
        stopped = all(live is None or not is_ours(live, job, raw) or is_at_rest(live) for live in jobs)
        # Only what was recorded before is being cleaned up: what this reconcile has written is not observed yet.
        if facts.settled and stopped and is_true(old, conditions.FAILURE_TARGET):
            found[conditions.FAILED] = (True, facts.failure.reason, facts.failure.message)
    return found


def _suspended(observed: Observed, *, settled: bool) -> _Verdict:
    """Whether a job that is to be suspended is: what was in flight is finished first."""
    if settled:
        return True, Reason.JOB_SUSPENDED, "no engine and no worker runs; everything finished is kept"
    workers = sum(any_active([pod]) for pod in pods_of(observed.pods, names.WORKERS))
    waits = f"{workers} workers finish what is in flight" if workers else "the engines are ending"
    return False, Reason.SUSPENDING, waits


def _workers_checked(old: Mapping[str, Any], facts: Facts) -> _Verdict | None:
    """Whether workers will find what they need; None where nobody looks."""
    job, observed = facts.job, facts.observed
    before = condition(old, conditions.WORKERS_CHECKED)
    if facts.stage is Stage.SUSPENDED:
        return (False, Reason.JOB_SUSPENDED, "looked at again when the job is resumed") if before else None
    if facts.stage is Stage.QUEUED:
        return (before["status"] == "True", before["reason"], before.get("message", "")) if before else None
    if facts.stage is Stage.CHECKING:
        blocked = facts.taken or _error(observed, job, names.config, names.check)
        living = [pod for pod in pods_of(observed.pods, names.CHECK) if any_active([pod])]
        problem = diagnose(living, "worker")
        if blocked is not None:
            return False, blocked.reason, blocked.message
        if problem is not None:
            return False, *_kept(problem, before)
        return False, Reason.CHECKING, "a pod looks at what workers need; engines start after that"
    if facts.stage is Stage.FAILING:
        if facts.check.problem is not None:
            return False, facts.check.problem.reason, facts.check.problem.message
        return (before["status"] == "True", before["reason"], before.get("message", "")) if before else None
    if before.get("status") == "True" or (not before and facts.check.planned is None):
        # Of a job that nobody looked at, nothing is said.
        return (True, before["reason"], before.get("message", "")) if before else None
    count = (
        "" if facts.check.planned is None else f": {facts.check.planned} trajectories in {facts.shards.count} shards"
    )
    return True, Reason.CHECKED, f"workers have what they need{count}"


def _generation_ready(old: Mapping[str, Any], facts: Facts) -> _Verdict:
    job, observed = facts.job, facts.observed
    state, before = facts.generation, condition(old, conditions.GENERATION_READY)
    if facts.stage is Stage.FAILING:
        return _stopped(before, facts, gone=not facts.ready)
    if state.reason == Reason.EXTERNAL:
        return True, Reason.EXTERNAL, state.message
    if facts.stage not in {Stage.CHECKING, *_UNDER_WAY}:
        stopped = {Stage.SUSPENDED: "suspended", Stage.QUEUED: "it has no quota"}
        why = stopped.get(facts.stage, "all shards are done")
        return False, Reason.RELEASED, f"the engines are released: {why}"
    blocked = facts.taken or _error(
        observed, job, names.config, names.generation, names.generation_pods, names.ray_service
    )
    if facts.stage is Stage.CHECKING and blocked is None:
        return False, Reason.WAITING_FOR_CHECK, "engines start when workers have what they need"
    count = f"{state.ready} of {state.desired} replicas are ready"
    cause = Cause(state.reason, state.message)
    if state.repeats and before.get("reason") == state.reason:
        cause = cause._replace(message=str(before.get("message", "")))
    if facts.ready:
        less = state.ready < state.desired or not state.settled
        words = (blocked.message if blocked else "") or (cause.message if less else "")
        return True, Reason.READY, redact("; ".join(part for part in (count, state.note, words) if part))
    if blocked:
        return False, blocked.reason, blocked.message
    return False, cause.reason, cause.message or count


def _weights_served(old: Mapping[str, Any], facts: Facts) -> _Verdict | None:
    """Whether all replicas have the weights that are wanted; None where nothing is to be said of it."""
    job, observed = facts.job, facts.observed
    wanted = job.spec.weights
    if facts.stage is Stage.FAILING or (wanted is None and not condition(old, conditions.WEIGHTS_SERVED)):
        return None
    if facts.stage not in _UNDER_WAY:
        return False, Reason.RELEASED, "the engines are released"
    version = _OWN_VERSION if wanted is None else wanted.version
    if _served(old, facts) == version:
        return True, Reason.WEIGHTS_CURRENT, f"all replicas serve version {version}"
    having = sum(item.version == version for item in observed.served.values())
    problem = next((item.problem for _, item in sorted(observed.served.items()) if item.problem), None)
    text = f"{having} of {facts.generation.desired} replicas serve version {version}"
    return False, Reason.WEIGHTS_LOADING, redact(f"{text}; {problem}" if problem else text)


def _served(old: Mapping[str, Any], facts: Facts) -> str | None:
    """The version that all replicas serve, as far as they are heard; None where they differ or none is known."""
    observed = facts.observed
    if facts.stage not in _UNDER_WAY:
        return None
    before = (old.get("generation") or {}).get("policyVersion")
    if not observed.served:
        return None if before is None else str(before)
    found = {item.version for item in observed.served.values()}
    version = found.pop()
    if found or version is None:
        return None
    # A replica that is new is heard of later, and has begun with what was wanted.
    heard = len(observed.served) >= max(1, facts.generation.ready) or version == before
    return version if heard else None


def _workers_ready(old: Mapping[str, Any], facts: Facts) -> _Verdict:
    job, observed = facts.job, facts.observed
    shards, before = facts.shards, condition(old, conditions.WORKERS_READY)
    count = f"{shards.succeeded} of {shards.count} shards are done"
    if shards.done:
        failed = f", {len(shards.failed)} failed" if shards.failed else ""
        return False, Reason.SHARDS_DONE, f"{count}{failed}"
    if facts.stage is Stage.FAILING:
        return _stopped(before, facts, gone=not shards.exists or not shards.active)
    if facts.stage is Stage.SUSPENDED:
        return False, Reason.JOB_SUSPENDED, count
    if facts.stage is Stage.QUEUED:
        return False, Reason.QUEUED, count
    parts = (names.config, names.workers) if facts.ready else (names.workers,)
    blocked = facts.taken or _error(observed, job, *parts)
    if blocked and not shards.active:
        return False, blocked.reason, blocked.message
    if not shards.begun:
        text = "its workers start next" if facts.ready else "workers start when generation is ready"
        return False, Reason.WAITING_FOR_GENERATION, text
    living = [pod for pod in pods_of(observed.pods, names.WORKERS) if any_active([pod])]
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in living)
    bad = [
        (end.finished, shard) for shard, end in shards.ended.items() if end.exit_code not in {0, contract.EXIT_DRAINED}
    ]
    last = f"; shard {max(bad)[1]} was retried after: {how_it_ended(shards.ended[max(bad)[1]])}" if bad else ""
    text = redact(f"{running} workers run, {count}{last}")
    problem = diagnose(living, "worker")
    if running or (before.get("status") == "True" and problem is None):
        return True, Reason.RUNNING, text
    if problem is not None:
        return False, *_kept(problem, before)
    if job.spec.workers.replicas == 0:
        return False, Reason.STARTING, f"workers.replicas is 0, {count}"
    return False, Reason.CRASHING if bad else Reason.STARTING, text


def _finishing(facts: Facts) -> _Verdict:
    job, observed = facts.job, facts.observed
    problem = diagnose(pods_of(observed.pods, names.FINISH), "finish")
    found = facts.taken or _error(observed, job, names.config, names.finish) or problem
    return (False, found.reason, found.message) if found else (False, Reason.SHARDS_DONE, "the shards are aggregated")


def _stopped(before: Mapping[str, Any], facts: Facts, *, gone: bool) -> _Verdict:
    """A part of a job that fails: what kept it from being ready goes on to be told."""
    reason = facts.failure.reason if facts.failure else ""
    if not before:
        return False, reason, "not started: the job failed"
    if before["status"] == "True" and gone:
        return False, reason, "stopped: the job failed"
    return before["status"] == "True", before["reason"], before.get("message", "")


def _kept(problem: Problem, before: Mapping[str, Any]) -> tuple[str, str]:
    """Of a problem that is told again in fewer words, the earlier ones."""
    if problem.repeats and before.get("reason") == problem.reason:
        return problem.reason, str(before.get("message", ""))
    return problem.reason, problem.message


def _outcome(facts: Facts) -> str:
    message = facts.finish.message
    if message is None:
        return "all shards are done"
    return f"{message.trajectories} trajectories are stored, {message.failed} failed"


def _error(observed: Observed, job: RolloutJob, *parts: Any) -> Cause | None:
    """The first thing of these names that could not be written, or the Secret without which no pod starts."""
    wanted = {part(job.metadata.name) for part in parts}
    for (kind, name), error in sorted(observed.errors.items()):
        if name in wanted or kind == "Secret":
            # The name of the tokens' Secret is no secret.
            return Cause(error.reason, f"{kind} {name}: {redact(error.message, MESSAGE_CHARACTERS - len(name) - 32)}")
    return None


def _merged(old: Json, found: Mapping[str, _Verdict], time: str, generation: int) -> list[Json]:
    """The conditions, in the order of `CONDITION_TYPES`; none that was there goes, and only a change moves its time."""
    known = {item["type"]: item for item in old.get("conditions") or ()}
    for kind, (status, reason, message) in found.items():
        before = known.get(kind, {})
        text = "True" if status else "False"
        known[kind] = {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": message,
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == text else time,
            "observedGeneration": generation,
        }
    ours = [known.pop(kind) for kind in CONDITION_TYPES if kind in known]
    return [*ours, *(known[kind] for kind in sorted(known))]


def _generation(old: Json, facts: Facts) -> Json:
    state, version = facts.generation, _served(old, facts)
    wanted = state.desired if facts.stage in _UNDER_WAY else 0
    kept = {} if version is None else {"policyVersion": version}
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
    # Until the Job is made, how many there are may still be edited.
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
    """The main numbers, as the finish pod has them."""
    if message is None:
        return None
    listed = [
        {"name": name, "trajectories": result.trajectories, "failed": result.failed, **_mean(result.mean_reward)}
        for name in sorted(environment.name for environment in job.spec.environments)
        if (result := message.environments.get(name)) is not None
    ]
    return {
        "trajectories": message.trajectories,
        "failed": message.failed,
        "dropped": message.dropped,
        **_mean(message.mean_reward),
        "environments": listed,
    }


def _mean(reward: float | None) -> Json:
    return {} if reward is None or abs(reward) > _LARGEST else {"meanReward": round(reward, 6)}


def _summary(status: Json) -> Json:
    """The columns of `kubectl get`."""
    generation, workers, progress = status["generation"], status["workers"], status["progress"]
    results = status.get("results") or progress
    replicas = ratio_text(generation["readyReplicas"], generation["desiredReplicas"])
    return {
        "generation": replicas if runs_in_job(generation["backend"]) else "-",
        "workers": ratio_text(workers["ready"], workers["desired"]),
        "progress": ratio_text(progress["completed"], progress["trajectories"]),
        "meanReward": number_text(results.get("meanReward")),
        "reason": _telling(status)[:64],
    }


def _telling(status: Json) -> str:
    """The reason of the condition that says most: of the end, else of what is awaited."""
    for kind in (conditions.COMPLETE, conditions.FAILED, conditions.FAILURE_TARGET, conditions.SUSPENDED):
        if is_true(status, kind):
            return str(condition(status, kind)["reason"])
    last = condition(status, conditions.SUCCESS_CRITERIA_MET)
    if last:
        return str(last["reason"])
    if condition(status, conditions.WORKERS_CHECKED).get("status") == "False":
        return str(condition(status, conditions.WORKERS_CHECKED)["reason"])
    ready = is_true(status, conditions.GENERATION_READY)
    return str(condition(status, conditions.WORKERS_READY if ready else conditions.GENERATION_READY)["reason"])


@dataclass(frozen=True, slots=True)
class _Tally:
    """Counts of one shard."""

    completed: int
    failed: int
    dropped: int
    turns: int
    tokens: int
    reward: float
    planned: int

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.dropped


def _progress(old: Json, facts: Facts) -> Json:
    observed, now = facts.observed, facts.now
    before: Json = {
        key: value
        for key, value in (old.get("progress") or _new_progress()).items()
        if key != "estimatedSecondsRemaining"
    }
    if facts.finish.message is not None:
        found = _settled(before, facts.finish.message)
    else:
        if facts.check.planned is not None:
            before["trajectories"] = facts.check.planned
        # What the check counted is exact.
        known = facts.check.planned is not None or is_true(old, conditions.WORKERS_CHECKED)
        found = _counted(before, _tallies(observed), before["trajectories"] if known else None, facts.shards.count)
    if facts.stage is Stage.RUNNING:
        ready = condition(old, conditions.WORKERS_READY)
        since = parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None
        remaining = _remaining(old.get("progress") or {}, found, since, now)
        found |= {} if remaining is None else {"estimatedSecondsRemaining": remaining}
    return found


def _new_progress() -> Json:
    counts = ("trajectories", "completed", "failed", "dropped", "turns", "generatedTokens", "percentage")
    return dict.fromkeys(counts, 0)


def _counted(before: Json, tallies: list[_Tally], planned: int | None, shards: int) -> Json:
    """The sum of what is known of shards; what was told before, where a pod that is not heard makes it less.

    Args:
        planned: Trajectories that the job comes to; None: not known, and estimated.
    """
    completed, failed = sum(tally.completed for tally in tallies), sum(tally.failed for tally in tallies)
    if not tallies or completed + failed < before["completed"] + before["failed"]:
        return dict(before)
    if planned is None:
        # Shards that have not begun are taken to be as large as the others.
        planned = round(sum(tally.planned for tally in tallies) / len(tallies) * shards)
    reward = sum(tally.reward for tally in tallies)
    return {
        **before,
        "trajectories": planned,
        "completed": completed,
        "failed": failed,
        "dropped": sum(tally.dropped for tally in tallies),
        "turns": sum(tally.turns for tally in tallies),
        "generatedTokens": sum(tally.tokens for tally in tallies),
        "percentage": _percentage(sum(tally.ended for tally in tallies), planned),
        **(_mean(reward / completed) if completed else {}),
    }


def _settled(before: Json, message: FinishMessage) -> Json:
    """What the finish pod counted in the stored trajectories is the truth."""
    ended = message.trajectories + message.failed + message.dropped
    return {
        **_less(before, ("meanReward",)),
        "trajectories": message.planned,
        "completed": message.trajectories,
        "failed": message.failed,
        "dropped": message.dropped,
        "percentage": _percentage(ended, message.planned) if message.planned else 100,
        **_mean(message.mean_reward),
    }


def _tallies(observed: Observed) -> list[_Tally]:
    """Per shard the most that is known: of the pod that runs, or of the messages of those that have ended."""
    known: dict[int, list[_Tally]] = {}
    for shard, live in observed.progress.items():
        known[shard] = [_tally(live)]
    for pod in pods_of([*observed.pods, *observed.departed], names.WORKERS):
        message, index = worker_message(last_exit(pod, "worker")), shard_of(pod)
        # A pod that ended before it knew its shard has counted nothing.
        if index is None or message is None or message.shard is None:
            continue
        known.setdefault(index, []).append(_tally(message, dropped=message.dropped))
    return [max(known[shard], key=lambda tally: (tally.ended, tally.turns, tally.tokens)) for shard in sorted(known)]


def _tally(counts: PodProgress | WorkerMessage, dropped: int = 0) -> _Tally:
    return _Tally(
        completed=counts.trajectories,
        failed=counts.failed,
        dropped=dropped,
        turns=counts.turns,
        tokens=counts.generated_tokens,
        reward=counts.reward_sum,
        planned=counts.planned,
    )


def _remaining(before: Mapping[str, Any], found: Json, running_since: datetime | None, now: datetime) -> int | None:
    """Seconds until everything planned has ended, at the mean pace since workers run, of a quarter of an hour at most.

    What is averaged is the pace, which the old estimate tells, and not the estimate: the first trajectories, which come
    late, would make that long for the rest of the run.
    """
    earlier, since = before.get("estimatedSecondsRemaining"), parse_time(before.get("lastUpdated"))
    if all(before.get(key) == value for key, value in found.items()):
        # It is not written again by time alone.
        return None if earlier is None else int(earlier)
    seconds = (now - since).total_seconds() if since else 0.0
    if seconds <= 0 or running_since is None:
        return None if earlier is None else int(earlier)
    ran = max(seconds, (now - running_since).total_seconds())
    weight = seconds / min(ran, max(seconds, _PACE_SECONDS))
    pace = 0.0 if earlier is None else _left(before) / max(0.5, earlier)
    gained = sum(found[key] - before.get(key, 0) for key in ("completed", "failed"))
    pace += weight * (gained / seconds - pace)
    return min(round(_left(found) / pace), MAX_COUNT) if pace > 0 else None


def _left(progress: Mapping[str, Any]) -> int:
    planned, completed, failed = (progress.get(key) or 0 for key in ("trajectories", "completed", "failed"))
    return max(0, planned - completed - failed)


def _percentage(ended: int, planned: int) -> int:
    return min(100, 100 * ended // planned) if planned > 0 else 0


def _next_write(status: Mapping[str, Any], interval: float) -> datetime | None:
    last = parse_time((status.get("progress") or {}).get("lastUpdated"))
    return None if last is None else last + timedelta(seconds=interval)


def _without_time(status: Mapping[str, Any]) -> Json:
    return {**status, "progress": _less(status.get("progress") or {}, ("lastUpdated",))}


def _pressing(status: Mapping[str, Any]) -> Json:
    """What is written at once: everything but numbers that count up, and words under a reason that stays."""
    return {
        **_less(status, ("progress", "summary")),
        "conditions": [_less(item, ("message",)) for item in status.get("conditions") or ()],
        "generation": _less(status.get("generation") or {}, ("readyReplicas",)),
        "workers": _less(status.get("workers") or {}, ("active", "ready", "succeeded", "failed")),
        "begun": _begun(status.get("progress") or {}),
    }


def _begun(progress: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether it is known how many trajectories there will be, and whether one has ended."""
    return bool(progress.get("trajectories")), bool(progress.get("completed") or progress.get("failed"))


def _less(mapping: Mapping[str, Any], keys: Iterable[str]) -> Json:
    left_out = set(keys)
    return {key: value for key, value in mapping.items() if key not in left_out}
