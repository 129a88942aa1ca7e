"""Where a job is on its way, and what is to be written and removed there: pure, and the same for the same facts.

What must be known after what it was read from has been removed is in the status first: a failure is recorded in one
reconcile and cleaned up after in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

from kuberoll_api import conditions, contract
from kuberoll_api.conditions import Reason
from kuberoll_api.contract import FinishMessage
from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_operator import names, queueing, render
from kuberoll_operator.backends import BACKENDS, Backend, GenerationState, backend_of, runs_in_job
from kuberoll_operator.backends.pods import (
    Ended,
    ended,
    how_it_ended,
    is_disrupted,
    of_component,
    shard_of,
    still_there,
    told,
)
from kuberoll_operator.messages import finish_message, worker_message
from kuberoll_operator.model import Object, Observed, Plan, Ref, StatusPatch, condition, is_true
from kuberoll_operator.queueing import Quota
from kuberoll_operator.render import Subject
from kuberoll_operator.render.check import MUTABLE as MUTABLE_CHECK
from kuberoll_operator.render.finish import MUTABLE as MUTABLE_FINISH
from kuberoll_operator.render.objects import has_other_shape, keep_shape, ref
from kuberoll_operator.render.output import OutputRefused, output_of
from kuberoll_operator.render.workers import MUTABLE as MUTABLE_WORKERS
from kuberoll_operator.settings import Settings

FATAL_WRITE_ERRORS: Final = frozenset({Reason.INVALID_TEMPLATE})
_SHARDS_NAMED: Final = 20


class Stage(Enum):
    """Where a job is on its way."""

    UNMANAGED = "somebody else's, or about to be deleted"
    OVER = "Complete or Failed"
    FAILING = "a cause is found, and what holds resources is removed"
    CLEARING = "all is done, and the last GPUs are on their way back"
    SUSPENDED = "stopped by the user"
    QUEUED = "without quota: it is waited for, or given back"
    CHECKING = "what workers need is looked at, before any engine is asked for"
    FINISHING = "all shards are done, and are being aggregated"
    RUNNING = "workers may run"
    STARTING = "generation is awaited"


STOPPED: Final = frozenset({Stage.SUSPENDED, Stage.QUEUED})
"""Nothing is to run, and the job goes on later."""


class Cause(NamedTuple):
    """Why something is as it is: a reason of `conditions.Reason`, and words for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The workers' Job.

    Attributes:
        count: Parts of the dataset.
        exists: Whether the Job is there, and to stay.
        begun: Whether it may run pods.
        succeeded: Shards that are done.
        failed: Shards that are given up.
        active: Pods under way.
        done: Whether nothing is left for the policy to do.
        ended: Last ends of worker pods, by shard.
        problem: Why the job fails.
    """

    count: int
    exists: bool = False
    begun: bool = False
    succeeded: int = 0
    failed: Sequence[int] = ()
    active: int = 0
    done: bool = False
    ended: Mapping[int, Ended]
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The check Job.

    Attributes:
        done: Whether engines may be asked for.
        planned: Trajectories that the job comes to; None: not known from here.
        problem: Why the job fails.
    """

    done: bool
    planned: int | None = None
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The finish Job.

    Attributes:
        message: Its pod's termination message; None: there is none yet.
        done: Whether all is aggregated.
        problem: Why the job fails.
    """

    message: FinishMessage | None = None
    done: bool = False
    problem: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts that plan and status share.

    Attributes:
        backend: Name of the generation backend.
        ready: Whether generation is ready; it becomes so when all replicas are, and stays so while one is.
        failure: The first cause for which the job fails or has failed.
        taken: Why a child cannot be written: something else has its name.
        quota: Its part of a queue's quota.
        settled: Whether no pod of it holds anything any more.
    """

    stage: Stage
    backend: str
    endpoint: str
    generation: GenerationState
    ready: bool
    shards: Shards
    check: Check
    finish: Finish
    failure: Cause | None
    taken: Cause | None
    quota: Quota
    settled: bool


def plan(job: RolloutJob, raw: Object, observed: Observed, settings: Settings, now: datetime) -> Plan:
    """What is to be written and removed now.

    `apply` always holds everything that is wanted at this stage, each with its digest: what is there already need not
    be written again.

    Args:
        job: The validated object.
        raw: The live object: its metadata and status.
    """
    here = situation(job, raw, observed, settings, now)
    if here.stage is Stage.UNMANAGED:
        return Plan()
    if here.stage is Stage.OVER:
        return Plan(delete_job=_outlived(job, status_of(raw), now), patch=_quota_news(job, raw, observed, here, now))
    if here.stage is Stage.FAILING:
        # Not before it is written down: what tells the cause is about to go.
        if not is_true(status_of(raw), conditions.FAILURE_TARGET):
            return Plan()
        stopped, unstoppable = _stopped(job, raw, observed, settings, here)
        return Plan(
            apply=tuple(render.seal(child) for child in stopped),
            delete=_deletable([*_engine_refs(job), *unstoppable], job, raw, observed),
        )
    engines = _engine_refs(job)
    if here.stage is Stage.CLEARING:
        return Plan(delete=_deletable(engines, job, raw, observed))
    apply: list[Object] = []
    # What is in flight in a worker that drains needs its engine to the end, or counts as failed.
    draining = here.stage in STOPPED and still_there(of_component(observed.pods, names.WORKERS))
    delete: list[Ref] = [] if draining or here.stage in {Stage.STARTING, Stage.RUNNING} else list(engines)
    if here.stage is not Stage.CHECKING and (
        here.stage in STOPPED or is_true(status_of(raw), conditions.WORKERS_CHECKED)
    ):
        # A job that is resumed may have another spec, and is looked at again.
        delete.append(Ref("batch/v1", "Job", names.check(job.metadata.name)))
    if spec_problem(job, here.backend, settings) is None:
        wanted, outdated = _wanted(job, raw, observed, settings, here, now)
        delete += outdated
        apply = [] if here.taken else [render.seal(child) for child in wanted]
    if _quota_is_of_no_use(here):
        delete.append(_workload_ref(job))
    return Plan(
        apply=tuple(apply),
        patch=_quota_news(job, raw, observed, here, now),
        delete=_deletable(delete, job, raw, observed),
    )


def situation(job: RolloutJob, raw: Object, observed: Observed, settings: Settings, now: datetime) -> Situation:
    """The facts about a job."""
    status = status_of(raw)
    name = backend_of(job, status, kuberay=settings.kuberay)
    backend = BACKENDS.get(name)
    generation = backend.state(job, observed) if backend else GenerationState(ready=0, desired=0, gone=True)
    shards = _shards(job, raw, observed)
    check = _check(job, raw, observed, name, generation=generation, shards=shards)
    end = _finish(job, raw, observed)
    ready = _is_ready(generation, status)
    quota = queueing.quota_of(job, _workload(job, raw, observed), observed.quota, settings)
    failure = _failure(
        job,
        raw,
        observed,
        name,
        settings,
        now,
        generation=generation,
        ready=ready,
        shards=shards,
        check=check,
        finish=end,
        quota=quota,
    )
    return Situation(
        stage=_stage(job, raw, ready=ready, shards=shards, check=check, finish=end, failure=failure, quota=quota),
        backend=name,
        endpoint=backend.hosting(job, raw["metadata"]["namespace"], settings).endpoint if backend else "",
        generation=generation,
        ready=ready,
        shards=shards,
        check=check,
        finish=end,
        failure=failure,
        taken=_taken(job, raw, observed, backend),
        quota=quota,
        settled=generation.gone and not still_there(observed.pods),
    )


def spec_problem(job: RolloutJob, backend: str, settings: Settings) -> str | None:
    """Why a job that is valid as such cannot be run in a cluster, with the field and how to mend it."""
    try:
        output_of(job.spec.output.uri)
    except OutputRefused as error:
        return str(error)
    return BACKENDS[backend].problem(job, settings)


def subject_of(job: RolloutJob, raw: Object, settings: Settings, here: Situation) -> Subject:
    """What children are rendered from."""
    return Subject(
        job=job,
        namespace=raw["metadata"]["namespace"],
        uid=raw["metadata"]["uid"],
        settings=settings,
        hosting=BACKENDS[here.backend].hosting(job, raw["metadata"]["namespace"], settings),
        shards=here.shards.count,
        assignments=here.quota.assignments,
        tokens={scope: settings.token_of(raw["metadata"]["uid"], scope) for scope in contract.SCOPES},
    )


def status_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of an object that may have none."""
    return raw.get("status") or {}


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


def _outlived(job: RolloutJob, status: Mapping[str, Any], now: datetime) -> bool:
    end = end_of_life(job, status)
    return end is not None and now >= end


def _stage(
    job: RolloutJob,
    raw: Object,
    *,
    ready: bool,
    shards: Shards,
    check: Check,
    finish: Finish,
    failure: Cause | None,
    quota: Quota,
) -> Stage:
    status = status_of(raw)
    if job.spec.managed_by not in {None, names.MANAGED_BY} or raw["metadata"].get("deletionTimestamp"):
        return Stage.UNMANAGED
    if is_true(status, conditions.COMPLETE) or is_true(status, conditions.FAILED):
        return Stage.OVER
    if failure is not None:
        return Stage.FAILING
    if finish.done:
        return Stage.CLEARING
    if job.spec.suspend:
        return Stage.SUSPENDED
    if not quota.granted:
        return Stage.QUEUED
    if shards.done:
        return Stage.FINISHING
    if not check.done:
        return Stage.CHECKING
    return Stage.RUNNING if ready or shards.begun else Stage.STARTING


def _is_ready(state: GenerationState, status: Mapping[str, Any]) -> bool:
    if state.reason == Reason.EXTERNAL or (state.settled and 0 < state.desired <= state.ready):
        return True
    return state.ready > 0 and is_true(status, conditions.GENERATION_READY)


def _failure(
    job: RolloutJob,
    raw: Object,
    observed: Observed,
    backend: str,
    settings: Settings,
    now: datetime,
    *,
    generation: GenerationState,
    ready: bool,
    shards: Shards,
    check: Check,
    finish: Finish,
    quota: Quota,
) -> Cause | None:
    """The first cause for which the job fails; once it is recorded there is no other."""
    status = status_of(raw)
    if is_true(status, conditions.FAILURE_TARGET):
        found = condition(status, conditions.FAILURE_TARGET)
        return Cause(found.get("reason", ""), found.get("message", ""))
    if is_true(status, conditions.SUCCESS_CRITERIA_MET):
        return None
    for cause in (shards.problem, check.problem, finish.problem):
        if cause is not None:
            return cause
    if job.spec.suspend or finish.done:
        # A suspended job can still be mended: its spec may be edited.
        return None
    if (problem := spec_problem(job, backend, settings)) is not None:
        return Cause(Reason.INVALID_SPEC, problem)
    for (kind, name), error in sorted(observed.errors.items()):
        if error.reason in FATAL_WRITE_ERRORS:
            return Cause(error.reason, told(f"{kind} {name}: {error.message}"))
    if not quota.granted:
        # Its engines are not asked for, or are on their way out.
        return None
    if not shards.done and generation.refused is not None:
        return Cause(Reason.REFUSED, told(f"generation: {generation.refused}"))
    deadline = active_deadline(job, status)
    if deadline is not None and now >= deadline:
        return Cause(
            Reason.ACTIVE_DEADLINE, f"not done within activeDeadlineSeconds ({job.spec.active_deadline_seconds})"
        )
    return None if shards.done else _not_started(job, status, generation, now, ready=ready, check=check)


def _not_started(
    job: RolloutJob,
    status: Mapping[str, Any],
    generation: GenerationState,
    now: datetime,
    *,
    ready: bool,
    check: Check,
) -> Cause | None:
    """Which part has not started within the time that each has."""
    parts = [
        (conditions.WORKERS_CHECKED, not check.done, "what workers need was not there", ""),
        (conditions.GENERATION_READY, check.done and not ready, "generation was not ready", generation.message),
        (conditions.WORKERS_READY, ready, "no worker ran while generation was ready", ""),
    ]
    deadlines = startup_deadlines(job, status)
    for part, awaited, text, message in parts:
        if awaited and part in deadlines and now >= deadlines[part]:
            # Before a program has any, the last words are those of the scheduler or the kubelet.
            last = message or condition(status, part).get("message", "") or "no cause was given"
            seconds = job.spec.startup_deadline_seconds
            return Cause(Reason.STARTUP_DEADLINE, told(f"{text} within startupDeadlineSeconds ({seconds}): {last}"))
    return None


def _wanted(
    job: RolloutJob, raw: Object, observed: Observed, settings: Settings, here: Situation, now: datetime
) -> tuple[list[Object], list[Ref]]:
    """The children that are wanted, in the order in which they are written, and those that are outdated."""
    backend = BACKENDS[here.backend]
    subject = subject_of(job, raw, settings, here)
    children = [
        # Before everything that refers to it.
        *render.build_token_secrets(subject),
        render.build_config(subject),
        *render.build_network_policies(subject),
        *backend.fixtures(subject),
        render.build_workers_service(subject),
    ]
    outdated: list[Ref] = []
    if here.stage in {Stage.STARTING, Stage.RUNNING}:
        children += backend.engines(subject, observed, now)
        outdated += backend.outdated(job, observed)
    if here.stage is Stage.CHECKING:
        live = observed.get("Job", names.check(subject.name))
        children += [] if is_dying(live) else [keep_shape(render.build_check_job(subject), live, MUTABLE_CHECK)]
    if not here.shards.done:
        live = observed.get("Job", names.workers(subject.name))
        wanted = render.build_workers_job(subject, suspend=here.stage is not Stage.RUNNING)
        # Two pods of one shard would write to the same place: never a new Job while an old one's pods are there.
        settled = not still_there(of_component(observed.pods, names.WORKERS))
        if live is None:
            children += [wanted] if here.stage is Stage.RUNNING and settled else []
        elif (
            # Without its quota it is not known on which nodes the pods are to be.
            here.quota.granted
            and live["spec"].get("suspend")
            and has_other_shape(wanted, live)
            and is_ours(live, job, raw)
        ):
            outdated += [ref(wanted)] if settled and not is_dying(live) else []
        elif not is_dying(live):
            children.append(keep_shape(wanted, live, MUTABLE_WORKERS))
    end = observed.get("Job", names.finish(subject.name))
    if here.shards.done and (here.stage is Stage.FINISHING or end is not None):
        wanted = render.build_finish_job(subject, suspend=here.stage is not Stage.FINISHING)
        children += [] if is_dying(end) else [keep_shape(wanted, end, MUTABLE_FINISH)]
    if here.stage is Stage.QUEUED and here.quota.makeable and here.quota.queue is not None:
        children.append(
            render.build_workload(
                subject,
                backend.pod_sets(subject),
                queue=here.quota.queue,
                priority=_priority(job, observed),
            )
        )
    return children, outdated


def _priority(job: RolloutJob, observed: Observed) -> render.Priority | None:
    name, value = queueing.priority_class_of(job), observed.quota.priority
    return None if name is None or value is None else render.Priority(name, value)


def _workload_ref(job: RolloutJob) -> Ref:
    return Ref("kueue.x-k8s.io/v1beta2", "Workload", names.workload(job.metadata.name))


def _workload(job: RolloutJob, raw: Object, observed: Observed) -> Object | None:
    """The job's own Workload."""
    live = observed.get("Workload", names.workload(job.metadata.name))
    return None if live is None or not is_ours(live, job, raw) else live


def _quota_is_of_no_use(here: Situation) -> bool:
    """Whether the Workload is to go: quota is held as long as a pod is there."""
    if here.stage is Stage.SUSPENDED or here.quota.outdated:
        return here.settled
    return here.quota.queue is None


def _quota_news(
    job: RolloutJob, raw: Object, observed: Observed, here: Situation, now: datetime
) -> tuple[StatusPatch, ...]:
    """What Kueue is to be told of the job."""
    live, status = _workload(job, raw, observed), status_of(raw)
    if live is None or is_dying(live):
        return ()
    patch: Mapping[str, Any] | None = None
    if here.stage is Stage.OVER:
        succeeded = is_true(status, conditions.COMPLETE)
        words = condition(status, conditions.COMPLETE if succeeded else conditions.FAILED).get("message", "")
        patch = queueing.finished(live, succeeded=succeeded, message=str(words), now=now)
    elif here.stage is Stage.QUEUED and here.settled:
        patch = queueing.given_back(live, now)
    elif here.stage in {Stage.STARTING, Stage.RUNNING, Stage.FINISHING}:
        done = here.stage is Stage.FINISHING
        running = here.stage is Stage.RUNNING and is_true(status, conditions.WORKERS_READY)
        patch = queueing.progressed(live, ready=done or running, unneeded=_unneeded(live, here), now=now)
    version = str(live["metadata"].get("resourceVersion", ""))
    return () if patch is None else (StatusPatch(_workload_ref(job), version, patch),)


def _unneeded(live: Object, here: Situation) -> dict[str, int]:
    """Pods whose quota may go to others: when all shards are done, all but the one that aggregates."""
    if here.stage is not Stage.FINISHING or not here.generation.gone:
        return {}
    counts = {item["name"]: int(item.get("count", 1)) for item in live.get("spec", {}).get("podSets") or ()}
    return {name: count - (name == names.WORKERS) for name, count in counts.items()}


def is_dying(live: Mapping[str, Any] | None) -> bool:
    """Whether an object is being deleted."""
    return live is not None and bool(live["metadata"].get("deletionTimestamp"))


def is_ours(live: Mapping[str, Any], job: RolloutJob, raw: Object) -> bool:
    """Whether an object is a child of this very job."""
    metadata = live["metadata"]
    labelled = (metadata.get("labels") or {}).get(names.JOB_LABEL) == job.metadata.name
    owners = metadata.get("ownerReferences") or ()
    return labelled and any(owner.get("uid") == raw["metadata"]["uid"] for owner in owners)


def child_refs(job: RolloutJob, backend: Backend | None) -> list[Ref]:
    """All children that a job may have."""
    name = job.metadata.name
    refs = [
        Ref("v1", "ConfigMap", names.config(name)),
        Ref("networking.k8s.io/v1", "NetworkPolicy", names.workers(name)),
        Ref("v1", "Service", names.workers(name)),
        Ref("batch/v1", "Job", names.check(name)),
        Ref("batch/v1", "Job", names.workers(name)),
        Ref("batch/v1", "Job", names.finish(name)),
        _workload_ref(job),
    ]
    if backend is not None and backend.in_job:
        refs += [
            Ref("networking.k8s.io/v1", "NetworkPolicy", names.generation(name)),
            Ref("v1", "Service", names.generation(name)),
            Ref("v1", "Service", names.generation_pods(name)),
            *backend.engine_refs(job),
        ]
    return refs


def _taken(job: RolloutJob, raw: Object, observed: Observed, backend: Backend | None) -> Cause | None:
    for kind, name in sorted((item.kind, item.name) for item in child_refs(job, backend)):
        live = observed.get(kind, name)
        if live is None or is_ours(live, job, raw):
            continue
        owners = [owner for owner in live["metadata"].get("ownerReferences") or () if owner.get("kind") == "RolloutJob"]
        if any(owner.get("name") == job.metadata.name for owner in owners):
            message = f"{kind} {name} is of a RolloutJob of this name that was deleted; waiting for its removal"
        else:
            message = f"{kind} {name} is there and not of this job; delete it, or give the job another name"
        return Cause(Reason.NAME_TAKEN, message)
    return None


def _engine_refs(job: RolloutJob) -> list[Ref]:
    # Of every backend: a suspended job may have been given another.
    return [item for backend in BACKENDS.values() for item in backend.engine_refs(job)]


def _stopped(
    job: RolloutJob, raw: Object, observed: Observed, settings: Settings, here: Situation
) -> tuple[list[Object], list[Ref]]:
    """The Jobs of a failing job, suspended: their ended pods stay, and their logs.

    Returns:
        Those that still run pods, as they are to be; and those that cannot be rendered any more, to remove.
    """
    under_way = [
        name
        for part in (names.check, names.workers, names.finish)
        if (live := observed.get("Job", name := part(job.metadata.name))) is not None
        and is_ours(live, job, raw)
        and not is_dying(live)
        and not is_at_rest(live)
    ]
    if not under_way or spec_problem(job, here.backend, settings) is not None:
        return [], [Ref("batch/v1", "Job", name) for name in under_way]
    subject = subject_of(job, raw, settings, here)
    wanted = [
        (render.build_check_job(subject, suspend=True), MUTABLE_CHECK),
        (render.build_workers_job(subject, suspend=True), MUTABLE_WORKERS),
        (render.build_finish_job(subject, suspend=True), MUTABLE_FINISH),
    ]
    return [
        keep_shape(item, observed.get("Job", item["metadata"]["name"]), mutable)
        for item, mutable in wanted
        if item["metadata"]["name"] in under_way
    ], []


def is_at_rest(live: Mapping[str, Any]) -> bool:
    """Whether a Job makes no pods any more: it has ended, or is suspended."""
    ended_already = any(is_true(live.get("status") or {}, kind) for kind in ("Complete", "Failed"))
    return ended_already or bool((live.get("spec") or {}).get("suspend"))


def _deletable(refs: Sequence[Ref], job: RolloutJob, raw: Object, observed: Observed) -> tuple[Ref, ...]:
    """Those that are there, are ours and are not going already."""
    found = []
    for item in dict.fromkeys(refs):
        live = observed.get(item.kind, item.name)
        if live is not None and is_ours(live, job, raw) and not is_dying(live):
            found.append(item)
    return tuple(found)


def _shards(job: RolloutJob, raw: Object, observed: Observed) -> Shards:
    status = status_of(raw)
    live = observed.get("Job", names.workers(job.metadata.name))
    if live is not None and (is_dying(live) or not is_ours(live, job, raw)):
        live = None
    spec = job.spec.workers
    recorded = status.get("workers") or {}
    count = recorded.get("shards") or spec.shards or max(1, spec.replicas)
    # What was done stays done, whatever becomes of the Job.
    done_before = condition(status, conditions.WORKERS_READY).get("reason") == Reason.SHARDS_DONE
    ends = _ends(observed)
    if live is None:
        return Shards(
            count=count, succeeded=recorded.get("succeeded", 0) if done_before else 0, done=done_before, ended=ends
        )
    found = live.get("status") or {}
    count = int(live["spec"].get("completions") or count)
    failed = indexes(str(found.get("failedIndexes") or ""))
    succeeded = int(found.get("succeeded") or 0)
    problem, ended_well = _verdict(live, failed, spec.max_failed_shards, ends, succeeded, count)
    return Shards(
        count=count,
        exists=True,
        begun=not live["spec"].get("suspend", False),
        succeeded=succeeded,
        failed=failed,
        active=int(found.get("active") or 0),
        done=done_before or ended_well,
        ended=ends,
        problem=None if done_before else problem,
    )


def _verdict(
    live: Object, failed: Sequence[int], budget: int, ends: Mapping[int, Ended], succeeded: int, count: int
) -> tuple[Cause | None, bool]:
    """Why the workers' Job failed, and whether all its shards are done or forgiven."""
    status = live.get("status") or {}
    if is_true(status, "Complete") or is_true(status, "SuccessCriteriaMet") or succeeded >= count:
        return None, True
    verdict = next((condition(status, kind) for kind in ("FailureTarget", "Failed") if is_true(status, kind)), None)
    if verdict is None:
        return None, False
    reason, words = verdict.get("reason", ""), str(verdict.get("message", ""))
    if reason == "PodFailurePolicy":
        refused = _first(ends, lambda end: end.exit_code == contract.EXIT_REFUSED)
        return Cause(Reason.REFUSED, refused or told(words)), False
    if reason == "FailedIndexes" and 0 < len(failed) <= budget:
        return None, True
    guilty = {shard: end for shard, end in ends.items() if shard in failed} or ends
    first = _first(guilty, lambda end: end.exit_code not in {0, contract.EXIT_DRAINED}) or told(words)
    if not failed:
        return Cause(Reason.FAILED_SHARDS, told(f"the workers' Job failed ({reason}): {first}")), False
    listed = ", ".join(map(str, failed[:_SHARDS_NAMED])) + (", ..." if len(failed) > _SHARDS_NAMED else "")
    text = (
        f"{len(failed)} of {count} shards failed ({listed}), more than workers.maxFailedShards ({budget}) allows; "
        f"the first: {first}"
    )
    return Cause(Reason.FAILED_SHARDS, told(text)), False


def _first(ends: Mapping[int, Ended], wanted: Callable[[Ended], bool]) -> str | None:
    """The cause of the shard that failed first."""
    found = sorted((end.finished, shard) for shard, end in ends.items() if wanted(end))
    if not found:
        return None
    shard = found[0][1]
    return told(f"shard {shard}: {how_it_ended(ends[shard])}")


def _ends(observed: Observed) -> dict[int, Ended]:
    """The last end of a worker's container, by shard; one that was disrupted or drained where there is no other."""
    found: dict[int, tuple[tuple[bool, str, str], Ended]] = {}
    for pod in of_component(observed.pods, names.WORKERS):
        shard, end = shard_of(pod), ended(pod, "worker")
        if shard is None or end is None:
            continue
        rank = (not is_disrupted(pod) and end.exit_code != contract.EXIT_DRAINED, end.finished, end.pod)
        if shard not in found or rank > found[shard][0]:
            found[shard] = rank, end
    return {shard: end for shard, (_, end) in sorted(found.items())}


def _check(
    job: RolloutJob, raw: Object, observed: Observed, backend: str, *, generation: GenerationState, shards: Shards
) -> Check:
    status = status_of(raw)
    recorded = condition(status, conditions.WORKERS_CHECKED)
    # Nothing of ours waits for workers where the engine is somebody else's; a job that an older operator began was
    # never looked at, and goes on.
    needless = not runs_in_job(backend) or (not recorded and (shards.exists or not generation.gone))
    if needless or shards.done or recorded.get("status") == "True":
        return Check(done=True)
    live = observed.get("Job", names.check(job.metadata.name))
    if live is None or is_dying(live) or not is_ours(live, job, raw):
        return Check(done=False)
    ends = sorted(
        (end for pod in of_component(observed.pods, names.CHECK) if (end := ended(pod, "worker")) is not None),
        key=lambda end: end.finished,
    )
    found = live.get("status") or {}
    if is_true(found, "Complete"):
        last = next((end for end in reversed(ends) if end.exit_code == 0), None)
        message = worker_message(last)
        return Check(done=True, planned=None if message is None else message.planned)
    verdict = next((condition(found, kind) for kind in ("FailureTarget", "Failed") if is_true(found, kind)), None)
    if verdict is None:
        return Check(done=False)
    bad = [end for end in ends if end.exit_code not in {0, contract.EXIT_DRAINED}]
    refused = verdict.get("reason") == "PodFailurePolicy"
    text = how_it_ended(bad[-1]) if bad else str(verdict.get("message", ""))
    return Check(done=False, problem=Cause(Reason.REFUSED if refused else Reason.CHECK_FAILED, told(text)))


def _finish(job: RolloutJob, raw: Object, observed: Observed) -> Finish:
    recorded = is_true(status_of(raw), conditions.SUCCESS_CRITERIA_MET)
    live = observed.get("Job", names.finish(job.metadata.name))
    if live is None or not is_ours(live, job, raw):
        return Finish(done=recorded)
    pods = of_component(observed.pods, names.FINISH)
    ends = sorted((end for pod in pods if (end := ended(pod, "finish")) is not None), key=lambda end: end.finished)
    status = live.get("status") or {}
    if is_true(status, "Failed") or is_true(status, "FailureTarget"):
        bad = [how_it_ended(end) for end in ends if end.exit_code != 0]
        words = condition(status, "Failed").get("message") or condition(status, "FailureTarget").get("message", "")
        text = told(f"aggregation failed: {bad[-1] if bad else words}")
        return Finish(problem=None if recorded else Cause(Reason.FINISH_FAILED, text), done=recorded)
    if not is_true(status, "Complete"):
        return Finish(done=recorded)
    message = finish_message(next((end for end in reversed(ends) if end.exit_code == 0), None))
    problem = None if recorded or message is None else _budget_problem(job, message)
    return Finish(message=message, done=problem is None, problem=problem)


def _budget_problem(job: RolloutJob, message: FinishMessage) -> Cause | None:
    budget = job.spec.rollout.max_failed_fraction
    if message.failed <= budget * message.planned:
        return None
    cause = f"; the most frequent cause: {message.cause}" if message.cause else ""
    text = (
        f"{message.failed} of {message.planned} trajectories failed, more than rollout.maxFailedFraction ({budget:g}) "
        f"allows{cause}"
    )
    return Cause(Reason.FAILURE_BUDGET, told(text))


def indexes(text: str) -> list[int]:
    """Kubernetes' "1,3-5" as numbers."""
    return list(_indexes(text))


def _indexes(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
