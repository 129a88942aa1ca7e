"""What is to be written and removed for a job: pure, and the same for the same facts.

What must be known after what it was read from has been removed is in the status first: a failure is recorded in one
reconcile and cleaned up after in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kuberoll_api import conditions, contract
from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_operator import names, queueing, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.backends.pods import (
    of_component,
    still_there,
)
from kuberoll_operator.deadlines import end_of_life
from kuberoll_operator.facts import (
    STOPPED,
    Situation,
    Stage,
    is_at_rest,
    is_dying,
    is_ours,
    situation,
    spec_problem,
    workload_of,
    workload_ref,
)
from kuberoll_operator.model import Object, Observed, Plan, Ref, StatusPatch, condition, is_true, status_of
from kuberoll_operator.render import Subject
from kuberoll_operator.render.check import MUTABLE as MUTABLE_CHECK
from kuberoll_operator.render.finish import MUTABLE as MUTABLE_FINISH
from kuberoll_operator.render.objects import has_other_shape, keep_shape, ref
from kuberoll_operator.render.workers import MUTABLE as MUTABLE_WORKERS
from kuberoll_operator.settings import Settings


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
        delete.append(workload_ref(job))
    return Plan(
        apply=tuple(apply),
        patch=_quota_news(job, raw, observed, here, now),
        delete=_deletable(delete, job, raw, observed),
    )


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


def _outlived(job: RolloutJob, status: Mapping[str, Any], now: datetime) -> bool:
    end = end_of_life(job, status)
    return end is not None and now >= end


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


def _quota_is_of_no_use(here: Situation) -> bool:
    """Whether the Workload is to go: quota is held as long as a pod is there."""
    if here.stage is Stage.SUSPENDED or here.quota.outdated:
        return here.settled
    return here.quota.queue is None


def _quota_news(
    job: RolloutJob, raw: Object, observed: Observed, here: Situation, now: datetime
) -> tuple[StatusPatch, ...]:
    """What Kueue is to be told of the job."""
    live, status = workload_of(job, raw, observed), status_of(raw)
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
    return () if patch is None else (StatusPatch(workload_ref(job), version, patch),)


def _unneeded(live: Object, here: Situation) -> dict[str, int]:
    """Pods whose quota may go to others: when all shards are done, all but the one that aggregates."""
    if here.stage is not Stage.FINISHING or not here.generation.gone:
        return {}
    counts = {item["name"]: int(item.get("count", 1)) for item in live.get("spec", {}).get("podSets") or ()}
    return {name: count - (name == names.WORKERS) for name, count in counts.items()}


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


def _deletable(refs: Sequence[Ref], job: RolloutJob, raw: Object, observed: Observed) -> tuple[Ref, ...]:
    """Those that are there, are ours and are not going already."""
    found = []
    for item in dict.fromkeys(refs):
        live = observed.get(item.kind, item.name)
        if live is not None and is_ours(live, job, raw) and not is_dying(live):
            found.append(item)
    return tuple(found)
