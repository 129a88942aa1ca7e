"""Conditions of a job: their status, reasons and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from kuberoll_api import conditions, contract
from kuberoll_api.conditions import CONDITION_TYPES, Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.pods import (
    MESSAGE_CHARACTERS,
    PodProblem,
    any_active,
    describe_exit,
    describe_lost,
    describe_removed,
    diagnose,
    first_problem,
    is_running,
    owner_problem,
    pods_of,
    redact,
)
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.facts import UNDER_WAY, Cause, Facts, Stage, is_at_rest, is_ours
from kuberoll_operator.model import Key, Object, Observed, condition, is_true, status_of
from kuberoll_operator.render.servers import claim_names, claimed, served
from kuberoll_operator.servers import ServerState, first_unready, unready
from kuberoll_operator.unanswering import Unanswering, unanswering_replicas
from kuberoll_operator.waiting.causes import awaits_start

Json = dict[str, Any]

# Status, reason and message of a condition.
Verdict = tuple[bool, str, str]

# Seconds in which the pod in the place of another one starts, and the workers count as ready.
_NEW_SECONDS: Final = 30

# The version of the model's own weights.
_OWN_VERSION: Final = "0"


def conditions_of(facts: Facts) -> dict[str, Verdict]:
    """Conditions that can be determined now, by type."""
    job, raw, observed = facts.job, facts.raw, facts.observed
    old = status_of(raw)
    found: dict[str, Verdict] = {}
    suspended = condition(old, conditions.SUSPENDED)
    if facts.stage is Stage.SUSPENDED:
        found[conditions.SUSPENDED] = _suspended(observed, settled=facts.released)
    elif facts.stage is Stage.QUEUED:
        error = _error(observed, job, names.workload)
        words = redact(f"{facts.quota.message}; {error.message}" if error else facts.quota.message)
        found[conditions.SUSPENDED] = (facts.released, Reason.QUEUED if facts.released else Reason.EVICTED, words)
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
    found |= _pace(old, facts)
    if facts.stage is Stage.FINISHING:
        found[conditions.SUCCESS_CRITERIA_MET] = _finishing(facts)
    if facts.stage is Stage.CLEARING:
        before = condition(old, conditions.SUCCESS_CRITERIA_MET)
        text = before.get("message", "") if before.get("status") == "True" else _outcome(facts)
        found[conditions.SUCCESS_CRITERIA_MET] = (True, Reason.TRAJECTORIES_DONE, text)
        if facts.released:
            found[conditions.COMPLETE] = (True, Reason.TRAJECTORIES_DONE, text)
    if facts.stage is Stage.FAILING and facts.failure is not None:
        found[conditions.FAILURE_TARGET] = (True, facts.failure.reason, facts.failure.message)
        jobs = [observed.get("Job", part(job.metadata.name)) for part in (names.check, names.workers, names.finish)]
        stopped = all(live is None or not is_ours(live, job, raw) or is_at_rest(live) for live in jobs)
        # The cleanup starts only after the cause was recorded: what this reconcile writes is not observed yet.
        if facts.released and stopped and is_true(old, conditions.FAILURE_TARGET):
            found[conditions.FAILED] = (True, facts.failure.reason, facts.failure.message)
    return found


def _suspended(observed: Observed, *, settled: bool) -> Verdict:
    """Condition Suspended of a job that is to be suspended: workers finish their trajectories in flight first."""
    if settled:
        return True, Reason.JOB_SUSPENDED, "no engine or worker is running; everything finished is kept"
    workers = sum(any_active([pod]) for pod in pods_of(observed.pods, names.WORKERS))
    waits = f"{workers} workers are finishing trajectories in flight" if workers else "the engines are stopping"
    return False, Reason.SUSPENDING, waits


def _workers_checked(old: Mapping[str, Any], facts: Facts) -> Verdict | None:
    """Condition WorkersChecked; None if no check runs."""
    job, observed = facts.job, facts.observed
    before = condition(old, conditions.WORKERS_CHECKED)
    if facts.stage is Stage.SUSPENDED:
        return (False, Reason.JOB_SUSPENDED, "checked again when the job is resumed") if before else None
    if facts.stage is Stage.QUEUED:
        return (before["status"] == "True", before["reason"], before.get("message", "")) if before else None
    if facts.stage is Stage.CHECKING:
        blocked = facts.name_conflict or _error(observed, job, names.config, names.check)
        living = [pod for pod in pods_of(observed.pods, names.CHECK) if any_active([pod])]
        problem = _problem(observed, living, "worker", names.check(job.metadata.name))
        if blocked is not None:
            return False, blocked.reason, blocked.message
        if problem is not None:
            return False, *_stable_message(problem, before)
        if (waiting := _waits_for_servers(facts, before)) is not None:
            return waiting
        return False, Reason.CHECKING, "a pod is checking the workers' inputs; engines start after that"
    if facts.stage is Stage.FAILING:
        if facts.check.problem is not None:
            return False, facts.check.problem.reason, facts.check.problem.message
        return (before["status"] == "True", before["reason"], before.get("message", "")) if before else None
    if before.get("status") == "True" or (not before and facts.check.planned is None):
        # A job without a check does not get the condition.
        return (True, before["reason"], before.get("message", "")) if before else None
    count = (
        "" if facts.check.planned is None else f": {facts.check.planned} trajectories in {facts.shards.count} shards"
    )
    return True, Reason.CHECKED, f"the workers' inputs are in order{count}"


def _waits_for_servers(facts: Facts, before: Mapping[str, Any]) -> Verdict | None:
    """The state of the first environment without a server that is ready; None if all have one."""
    parts = [lambda job, number=number: names.environment(job, number) for number, _ in served(facts.job)]
    claims = [name for number, spec, _ in claimed(facts.job) for name in claim_names(facts.job, number, spec)]
    parts += [lambda _, name=name: name for name in claims]
    return _waits_for(facts, before, parts, facts.servers)


def _waits_for_services(facts: Facts, before: Mapping[str, Any]) -> Verdict | None:
    """The state of the first service without a server that is ready; None if all have one."""
    parts = [lambda job, number=number: names.service(job, number) for number, _ in enumerate(facts.job.spec.services)]
    return _waits_for(facts, before, parts, facts.services)


def _waits_for(
    facts: Facts, before: Mapping[str, Any], parts: Sequence[Any], states: Sequence[ServerState]
) -> Verdict | None:
    if parts and (error := _error(facts.observed, facts.job, *parts)) is not None:
        return False, error.reason, error.message
    state = unready(states)
    if state is None:
        return None
    if state.problem is None:
        return False, Reason.STARTING, state.text
    return False, *_stable_message(state.problem._replace(message=state.text), before)


def _generation_ready(old: Mapping[str, Any], facts: Facts) -> Verdict:
    job, observed = facts.job, facts.observed
    state, before = facts.generation, condition(old, conditions.GENERATION_READY)
    if facts.stage is Stage.FAILING:
        return _stopped(before, facts, gone=not facts.ready)
    silent = unanswering_replicas(observed) if facts.stage is Stage.RUNNING else Unanswering()
    nobody = f"no replica answers the workers since {silent.since}; they wait for one" if silent.all else ""
    if state.reason == Reason.EXTERNAL:
        reason = Reason.NOT_ANSWERING if nobody else Reason.EXTERNAL
        return not nobody, reason, redact("; ".join(filter(None, (state.message, nobody, silent.text))))
    if facts.stage not in {Stage.CHECKING, *UNDER_WAY}:
        stopped = {Stage.SUSPENDED: "suspended", Stage.QUEUED: "it has no quota"}
        why = stopped.get(facts.stage, "all shards are done")
        return False, Reason.RELEASED, f"the engines are released: {why}"
    if facts.idle:
        since = condition(old, conditions.WORKERS_READY).get("lastTransitionTime")
        words = f"the engines are given back: no worker has run since {since}; the first that runs brings them back"
        return False, Reason.RELEASED, words
    if facts.first is not None:
        return False, Reason.WAITING_FOR_TURN, _turn(facts.first, facts)
    blocked = facts.name_conflict or _error(
        observed, job, names.config, names.generation, names.generation_pods, names.ray_service
    )
    if facts.stage is Stage.CHECKING and blocked is None:
        return False, Reason.WAITING_FOR_CHECK, "engines start when the workers' inputs have been checked"
    missing = state.ready < state.desired
    # Of one that another one has replaced there is nothing to tell: it goes when its node is back, or is removed.
    lost = describe_lost(pods_of(observed.pods, names.GENERATION)) if missing else ""
    removed = describe_removed(_with_departed(observed, names.GENERATION)) if missing else ""
    parts = (f"{state.ready} of {state.desired} replicas are ready", lost, removed)
    count = "; ".join(filter(None, parts))
    cause = Cause(state.reason, state.message)
    if facts.ready and nobody:
        return False, Reason.NOT_ANSWERING, redact("; ".join((count, nobody, silent.text)))
    if facts.ready:
        less = state.ready < state.desired or not state.stable
        words = (blocked.message if blocked else "") or (cause.message if less else "")
        return True, Reason.READY, redact("; ".join(filter(None, (count, silent.text, state.note, words))))
    if blocked:
        return False, blocked.reason, blocked.message
    if state.repeats and before.get("reason") == state.reason:
        return False, state.reason, str(before.get("message", ""))
    if cause.message and cause.reason != Reason.STARTING and not removed:
        return False, cause.reason, cause.message
    reason = cause.reason
    if reason == Reason.STARTING:
        # What is under way gives way to what has happened.
        reason = Reason.NODE_LOST if lost else Reason.POD_REMOVED if removed else reason
    return False, reason, redact("; ".join(filter(None, (count, cause.message))))


def _turn(first: Key, facts: Facts) -> str:
    # Who may see a job need not see those of other namespaces.
    ours = first.namespace == facts.raw["metadata"]["namespace"]
    who = f"the older job {first.name}" if ours else "an older job of another namespace"
    words = "has engines and no room for its workers, and goes first"
    return f"the cluster has no room: {who} {words}; this job's engines start when it has, or after some minutes"


def _weights_served(old: Mapping[str, Any], facts: Facts) -> Verdict | None:
    """Condition WeightsServed; None if the job never asked for other weights."""
    job, observed = facts.job, facts.observed
    wanted = job.spec.weights
    if facts.stage is Stage.FAILING or (wanted is None and not condition(old, conditions.WEIGHTS_SERVED)):
        return None
    if facts.stage not in UNDER_WAY:
        return False, Reason.RELEASED, "the engines are released"
    version = _OWN_VERSION if wanted is None else wanted.version
    if served_version(old, facts) == version:
        return True, Reason.WEIGHTS_CURRENT, f"all replicas serve version {version}"
    having = sum(item.version == version for item in observed.served.values())
    problem = next((item.problem for _, item in sorted(observed.served.items()) if item.problem), None)
    text = f"{having} of {facts.generation.desired} replicas serve version {version}"
    return False, Reason.WEIGHTS_LOADING, redact(f"{text}; {problem}" if problem else text)


def _pace(old: Mapping[str, Any], facts: Facts) -> dict[str, Verdict]:
    """Conditions HeldBack and Starved: who of the job and its trainer waits for whom; none of a job without one."""
    if facts.job.spec.rollout.on_policy is None:
        return {}
    reports = sorted(facts.observed.progress.items()) if facts.stage is Stage.RUNNING else []
    # Only if all of them are: a worker that may not begin while others may has had its share.
    held = next((item.held for _, item in reports), "") if all(item.held for _, item in reports) else ""
    starved = next((item.starved for _, item in reports if item.starved), "")
    found: dict[str, Verdict] = {}
    for kind, text, reason, otherwise in (
        (conditions.HELD_BACK, held, Reason.WAITING_FOR_TRAINER, "prompt groups begin as the trainer takes them"),
        (conditions.STARVED, starved, Reason.WAITING_FOR_ROLLOUTS, "the trainer does not wait"),
    ):
        if text:
            found[kind] = (True, reason, redact(text))
        elif reports or condition(old, kind):
            found[kind] = (False, Reason.IN_STEP, otherwise if reports else "the workers do not run")
    return found


def served_version(old: Mapping[str, Any], facts: Facts) -> str | None:
    """Version that all replicas serve, as far as they have reported; None if they differ or none is known."""
    observed = facts.observed
    if facts.stage not in UNDER_WAY:
        return None
    before = (old.get("generation") or {}).get("policyVersion")
    if not observed.served:
        return None if before is None else str(before)
    found = {item.version for item in observed.served.values()}
    version = found.pop()
    if found or version is None:
        return None
    # A new replica reports later, and has started with the wanted weights.
    heard = len(observed.served) >= max(1, facts.generation.ready) or version == before
    return version if heard else None


def _workers_ready(old: Mapping[str, Any], facts: Facts) -> Verdict:
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
    blocked = facts.name_conflict or _error(observed, job, *parts)
    if blocked and not shards.active:
        return False, blocked.reason, blocked.message
    if not shards.started:
        if facts.ready:
            unserved = _waits_for_servers(facts, before) or _waits_for_services(facts, before)
            return unserved or (False, Reason.WAITING_FOR_GENERATION, "the workers start next")
        failing_service = first_unready(facts.services)
        more = "" if failing_service is None else f"; {failing_service.text}"
        text = redact(f"workers start when generation is ready{more}")
        return False, Reason.WAITING_FOR_GENERATION, text
    living = [pod for pod in pods_of(observed.pods, names.WORKERS) if any_active([pod])]
    running = sum(map(is_running, living))
    lost = describe_lost(living)
    bad = [
        (end.finished, shard) for shard, end in shards.exits.items() if end.exit_code not in {0, contract.EXIT_DRAINED}
    ]
    last = f"; shard {max(bad)[1]} was retried after: {describe_exit(shards.exits[max(bad)[1]])}" if bad else ""
    failures = [(shard, item.failure) for shard, item in sorted(observed.progress.items()) if item.failure]
    failing = "; trajectories of shard {} failed: {}".format(*failures[0]) if failures else ""
    outages = [(shard, item.waiting) for shard, item in sorted(observed.progress.items()) if item.waiting]
    waiting = "; shard {} waits for {}".format(*outages[0]) if outages else ""
    without = first_unready([*facts.servers, *facts.services])
    servers = "" if without is None else f"; {without.text}"
    gone = f"; {lost}" if lost else ""
    wanted = min(job.spec.workers.replicas, shards.count - shards.succeeded - len(shards.failed))
    if running < wanted and (removed := describe_removed(_with_departed(observed, names.WORKERS))):
        gone += f"; {removed}"
    problem = _problem(observed, living, "worker", names.workers(job.metadata.name))
    # Those that run do not say what keeps the others from it.
    held = f"; {problem.message}" if problem is not None and running < wanted else ""
    text = redact(f"{running} workers are running, {count}{gone}{held}{last}{failing}{waiting}{servers}")
    if lost and not running:
        return False, Reason.NODE_LOST, text
    on_its_way = shards.active > len(living) or any(_is_new(pod, facts.now) for pod in living)
    unhindered = problem is None or problem.reason == Reason.STARTING
    if running or (before.get("status") == "True" and unhindered and on_its_way):
        return True, Reason.RUNNING, text
    if problem is not None:
        return False, *_stable_message(problem._replace(message=redact(f"{problem.message}{gone}")), before)
    if job.spec.workers.replicas == 0:
        return False, Reason.STARTING, f"workers.replicas is 0, {count}"
    return False, Reason.CRASHING if bad else Reason.STARTING, text


def _is_new(pod: Object, now: datetime) -> bool:
    born = parse_time(pod["metadata"].get("creationTimestamp"))
    return born is not None and (now - born).total_seconds() < _NEW_SECONDS


def _with_departed(observed: Observed, component: str) -> list[Object]:
    """Pods of a component, those that are gone, too."""
    return pods_of([*observed.pods, *observed.departed], component)


def _finishing(facts: Facts) -> Verdict:
    job, observed = facts.job, facts.observed
    problem = _problem(observed, pods_of(observed.pods, names.FINISH), "finish", names.finish(job.metadata.name))
    found = facts.name_conflict or _error(observed, job, names.config, names.finish) or problem
    return (
        (False, found.reason, found.message)
        if found
        else (False, Reason.SHARDS_DONE, "the shards are being aggregated")
    )


def _stopped(before: Mapping[str, Any], facts: Facts, *, gone: bool) -> Verdict:
    """Condition of a part of a failing job; the problem that kept it from being ready stays visible."""
    reason = facts.failure.reason if facts.failure else ""
    if not before:
        return False, reason, "not started: the job failed"
    if before["status"] == "True" and gone:
        return False, reason, "stopped: the job failed"
    return before["status"] == "True", before["reason"], before.get("message", "")


def _problem(observed: Observed, pods: Sequence[Object], container: str, job: str) -> PodProblem | None:
    """The problem that keeps the pods of a Job from being ready; None if there is none."""
    if observed.unmountable and any(awaits_start(pod) for pod in pods):
        # They name the job's own fields.
        return PodProblem(Reason.POD_CONFIG, redact("; ".join(observed.unmountable)))
    return first_problem((diagnose(pods, container, observed.signs), owner_problem(observed.signs, "Job", job)))


def _stable_message(problem: PodProblem, before: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message of a problem; the earlier message if the new one only repeats it."""
    if problem.repeats and before.get("reason") == problem.reason:
        return problem.reason, str(before.get("message", ""))
    return problem.reason, problem.message


def _outcome(facts: Facts) -> str:
    message = facts.finish.message
    if message is None:
        return "all shards are done"
    text = f"{message.trajectories} trajectories are stored, {message.failed} failed"
    return redact(f"{text}; the most frequent cause: {message.failure}" if message.failure else text)


def _error(observed: Observed, job: RolloutJob, *parts: Any) -> Cause | None:
    """The first failed write among these names, or that of the Secret without which no pod starts."""
    wanted = {part(job.metadata.name) for part in parts}
    for (kind, name), error in sorted(observed.errors.items()):
        if name in wanted or kind == "Secret":
            # The name of the tokens' Secret is no secret.
            return Cause(error.reason, f"{kind} {name}: {redact(error.message, MESSAGE_CHARACTERS - len(name) - 32)}")
    return None


def merge_conditions(old: Json, found: Mapping[str, Verdict], time: str, generation: int) -> list[Json]:
    """Conditions in the order of `CONDITION_TYPES`; old ones stay, and the transition time changes with the status."""
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
