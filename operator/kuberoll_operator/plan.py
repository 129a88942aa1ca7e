"""Plan of one reconcile: what to write and delete for a job. Pure: equal facts give equal plans.

A failure is recorded in the status in one reconcile, and cleaned up in the next: the cleanup deletes the objects that
the cause was read from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_api import conditions, contract
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.output_claims import is_of_one_node
from kuberoll_api.sandboxes import TOKEN_SCOPE
from kuberoll_operator import names, queueing, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.backends.pods import (
    any_active,
    pods_of,
)
from kuberoll_operator.deadlines import end_of_life
from kuberoll_operator.facts import (
    STOPPED,
    Facts,
    Stage,
    is_at_rest,
    is_dying,
    is_ours,
    sandboxes_with_network_ref,
    spec_problem,
    workload_of,
    workload_ref,
)
from kuberoll_operator.lost_pods import end_lost_pods
from kuberoll_operator.model import Object, Observed, Plan, Ref, StatusPatch, condition, is_true, status_of
from kuberoll_operator.render import RenderContext
from kuberoll_operator.render.check import MUTABLE as MUTABLE_CHECK
from kuberoll_operator.render.environments import MUTABLE as MUTABLE_SERVERS
from kuberoll_operator.render.environments import pod_set
from kuberoll_operator.render.finish import MUTABLE as MUTABLE_FINISH
from kuberoll_operator.render.generation import MUTABLE as MUTABLE_SERVICES
from kuberoll_operator.render.objects import has_other_shape, keep_shape, ref
from kuberoll_operator.render.servers import served
from kuberoll_operator.render.workers import MUTABLE as MUTABLE_WORKERS
from kuberoll_operator.servers import outdated_claims, server_refs, service_deployments, unready


def plan(facts: Facts) -> Plan:
    """Decide which objects to write and delete now.

    `apply` always holds all objects that are wanted at this stage, each with its digest, so that unchanged ones need
    not be written again.
    """
    job, raw, observed = facts.job, facts.raw, facts.observed
    if facts.stage is Stage.UNMANAGED:
        return Plan()
    if facts.stage is Stage.OVER:
        return Plan(delete_job=_ttl_has_passed(facts), patch=_workload_patches(facts))
    if facts.stage is Stage.FAILING:
        # The cause must be recorded first: the objects that show it are about to be deleted.
        if not is_true(status_of(raw), conditions.FAILURE_TARGET):
            return Plan()
        stopped, unstoppable = _suspended_jobs(facts)
        return Plan(
            apply=tuple(render.seal(child) for child in stopped),
            patch=_lost_pods(facts),
            delete=_deletable([*_engine_refs(job, observed), *server_refs(job, observed), *unstoppable], facts),
        )
    engines = _engine_refs(job, observed)
    if facts.stage is Stage.CLEARING:
        return Plan(delete=_deletable([*engines, *server_refs(job, observed)], facts))
    apply: list[Object] = []
    # Trajectories in flight in a draining worker need their engine until they end, or they fail.
    draining = facts.stage in STOPPED and any_active(pods_of(observed.pods, names.WORKERS))
    delete: list[Ref] = [] if draining or facts.wants_engines else list(engines)
    if facts.stage in STOPPED and not draining:
        delete += server_refs(job, observed)
    if facts.stage is not Stage.CHECKING and (
        facts.stage in STOPPED or is_true(status_of(raw), conditions.WORKERS_CHECKED)
    ):
        # A resumed job may have another spec, and is checked again.
        delete.append(Ref("batch/v1", "Job", names.check(job.metadata.name)))
    if spec_problem(job, facts.backend, facts.settings) is None:
        wanted, outdated = _desired_children(facts)
        delete += outdated
        apply = [] if facts.name_conflict else [render.seal(child) for child in wanted]
    if _workload_is_unneeded(facts):
        delete.append(workload_ref(job))
    return Plan(
        apply=tuple(apply),
        patch=(*_workload_patches(facts), *_lost_pods(facts)),
        delete=_deletable(delete, facts),
    )


def render_context(facts: Facts) -> RenderContext:
    """The context that children are rendered from."""
    raw, settings = facts.raw, facts.settings
    job = _with_commit(facts.job, facts.check.commit)
    return RenderContext(
        job=job,
        namespace=raw["metadata"]["namespace"],
        uid=raw["metadata"]["uid"],
        settings=settings,
        hosting=facts.hosting,
        shards=facts.shards.count,
        assignments=facts.quota.assignments,
        together=job.spec.workers.replicas > 1 and is_of_one_node(facts.observed.output_claim),
        tokens={scope: settings.token_of(raw["metadata"]["uid"], scope) for scope in contract.SCOPES},
        environment_tokens={
            spec.name: settings.token_of(raw["metadata"]["uid"], f"environment/{spec.name}") for _, spec in served(job)
        },
        service_tokens={
            service.name: settings.token_of(raw["metadata"]["uid"], f"service/{service.name}")
            for service in job.spec.services
        },
        servers_token=settings.token_of(raw["metadata"]["uid"], "generate/servers"),
        access_tokens={
            entry.name: settings.token_of(raw["metadata"]["uid"], f"access/{entry.name}")
            for entry in job.spec.generation.access
        },
        sandboxes_token=settings.token_of(raw["metadata"]["uid"], TOKEN_SCOPE),
    )


def _with_commit(job: RolloutJob, commit: str | None) -> RolloutJob:
    """A job whose replicas load one commit of the model, whenever they start."""
    if commit is None:
        return job
    model = job.spec.generation.model.model_copy(update={"revision": commit})
    generation = job.spec.generation.model_copy(update={"model": model})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"generation": generation})})


def _lost_pods(facts: Facts) -> tuple[StatusPatch, ...]:
    return end_lost_pods(facts.observed.pods, facts.now) if facts.settings.replace_lost_workers else ()


def _ttl_has_passed(facts: Facts) -> bool:
    end = end_of_life(facts.job, status_of(facts.raw))
    return end is not None and facts.now >= end


def _desired_children(facts: Facts) -> tuple[list[Object], list[Ref]]:
    """The children that are wanted, in the order in which they are written, and those that are outdated."""
    job, raw, observed, now = facts.job, facts.raw, facts.observed, facts.now
    backend = BACKENDS[facts.backend]
    context = render_context(facts)
    children = [
        # First: others refer to it.
        *render.build_token_secrets(context),
        *render.build_environment_secret(context),
        *render.build_service_secret(context),
        *render.build_policy_access(context),
        *render.build_access_secrets(context),
        *render.build_sandbox_secret(context),
        render.build_config(context),
        *render.build_environment_fixtures(context),
        *render.build_service_fixtures(context),
        *render.build_network_policies(context),
        *backend.fixtures(context),
        render.build_workers_service(context),
    ]
    # Before it was suspended, the job may have allowed its sandboxes more.
    outdated = [] if render.any_network(job) else [sandboxes_with_network_ref(job)]
    if facts.stage not in STOPPED:
        children += [
            keep_shape(wanted, observed.get("Deployment", wanted["metadata"]["name"]), MUTABLE_SERVERS)
            for wanted in render.build_environment_deployments(context)
        ]
        gone = outdated_claims(job, observed, now)
        outdated += gone
        if facts.settings.agent_sandbox is not False:
            children += [
                keep_shape(wanted, live, ())
                for wanted in render.build_sandbox_claims(context)
                if ref(wanted) not in gone and not is_dying(live := observed.get(wanted["kind"], ref(wanted).name))
            ]
    if facts.wants_engines:
        children += backend.engines(context, observed, now)
        outdated += backend.outdated(job, observed)
        children += [
            keep_shape(wanted, observed.get("Deployment", wanted["metadata"]["name"]), MUTABLE_SERVICES)
            for wanted in render.build_service_deployments(context)
        ]
    if facts.stage is Stage.CHECKING:
        live = observed.get("Job", names.check(context.name))
        # The check creates the environments, so it needs their servers.
        waiting = live is None and unready(facts.servers) is not None
        if not is_dying(live) and not waiting:
            children.append(keep_shape(render.build_check_job(context), live, MUTABLE_CHECK))
    if not facts.shards.done:
        live = observed.get("Job", names.workers(context.name))
        wanted = render.build_workers_job(context, suspend=facts.stage is not Stage.RUNNING)
        # Two pods of one shard would write to the same files: no new Job while pods of an old one exist.
        settled = not any_active(pods_of(observed.pods, names.WORKERS))
        if live is None:
            served_now = unready(facts.servers) is None
            children += [wanted] if facts.stage is Stage.RUNNING and settled and served_now else []
        elif (
            # Without quota it is not known on which nodes the pods will run.
            facts.quota.granted
            and live["spec"].get("suspend")
            and has_other_shape(wanted, live)
            and is_ours(live, job, raw)
        ):
            outdated += [ref(wanted)] if settled and not is_dying(live) else []
        elif not is_dying(live):
            children.append(keep_shape(wanted, live, MUTABLE_WORKERS))
    end = observed.get("Job", names.finish(context.name))
    if facts.shards.done and (facts.stage is Stage.FINISHING or end is not None):
        wanted = render.build_finish_job(context, suspend=facts.stage is not Stage.FINISHING)
        children += [] if is_dying(end) else [keep_shape(wanted, end, MUTABLE_FINISH)]
    if facts.stage is Stage.QUEUED and facts.quota.writable and facts.quota.queue is not None:
        children.append(
            render.build_workload(
                context,
                [
                    *backend.pod_sets(context),
                    *render.service_pod_sets(context),
                    *render.environment_pod_sets(context),
                    *render.sandbox_pod_sets(context),
                ],
                queue=facts.quota.queue,
                priority=_priority(job, observed),
            )
        )
    return children, outdated


def _priority(job: RolloutJob, observed: Observed) -> render.Priority | None:
    name, value = queueing.priority_class_of(job), observed.quota.priority
    return None if name is None or value is None else render.Priority(name, value)


def _workload_is_unneeded(facts: Facts) -> bool:
    """True if the Workload is to be deleted. Quota is held as long as a pod exists."""
    if facts.stage is Stage.SUSPENDED or facts.quota.outdated:
        return facts.released
    return facts.quota.queue is None


def _workload_patches(facts: Facts) -> tuple[StatusPatch, ...]:
    """The next patch of the status of the job's Workload, for Kueue."""
    job, raw, observed, now = facts.job, facts.raw, facts.observed, facts.now
    live, status = workload_of(job, raw, observed), status_of(raw)
    if live is None or is_dying(live):
        return ()
    patch: Mapping[str, Any] | None = None
    if facts.stage is Stage.OVER:
        succeeded = is_true(status, conditions.COMPLETE)
        words = condition(status, conditions.COMPLETE if succeeded else conditions.FAILED).get("message", "")
        patch = queueing.finished_patch(live, succeeded=succeeded, message=str(words), now=now)
    elif facts.stage is Stage.QUEUED and facts.released:
        patch = queueing.release_patch(live, now)
    elif facts.stage in {Stage.STARTING, Stage.RUNNING, Stage.FINISHING}:
        done = facts.stage is Stage.FINISHING
        running = facts.stage is Stage.RUNNING and is_true(status, conditions.WORKERS_READY)
        patch = queueing.progress_patch(live, ready=done or running, unneeded=_reclaimable_pods(live, facts), now=now)
    version = str(live["metadata"].get("resourceVersion", ""))
    return () if patch is None else (StatusPatch(workload_ref(job), version, patch),)


def _reclaimable_pods(live: Object, facts: Facts) -> dict[str, int]:
    """Pods whose quota is no longer needed: once all shards are done, all but the one that aggregates, and servers."""
    services = [*service_deployments(facts.job, facts.observed), *pods_of(facts.observed.pods, names.SERVICE)]
    if facts.stage is not Stage.FINISHING or not facts.generation.released or services:
        return {}
    counts = {item["name"]: int(item.get("count", 1)) for item in live.get("spec", {}).get("podSets") or ()}
    kept = {names.WORKERS: 1, **{pod_set(number): counts.get(pod_set(number), 0) for number, _ in served(facts.job)}}
    return {name: count - kept.get(name, 0) for name, count in counts.items()}


def _engine_refs(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to all that may hold GPUs: engines, and services."""
    # Of all backends: a suspended job may have been switched to another.
    engines = [item for backend in BACKENDS.values() for item in backend.engine_refs(job)]
    return [*engines, *service_deployments(job, observed)]


def _suspended_jobs(facts: Facts) -> tuple[list[Object], list[Ref]]:
    """The Jobs of a failing job, suspended: this keeps their ended pods and the logs.

    Returns:
        The Jobs that still run pods, as suspended objects; and references to those that can no longer be rendered, to
        delete.
    """
    job, raw, observed, settings = facts.job, facts.raw, facts.observed, facts.settings
    under_way = [
        name
        for part in (names.check, names.workers, names.finish)
        if (live := observed.get("Job", name := part(job.metadata.name))) is not None
        and is_ours(live, job, raw)
        and not is_dying(live)
        and not is_at_rest(live)
    ]
    if not under_way or spec_problem(job, facts.backend, settings) is not None:
        return [], [Ref("batch/v1", "Job", name) for name in under_way]
    context = render_context(facts)
    wanted = [
        (render.build_check_job(context, suspend=True), MUTABLE_CHECK),
        (render.build_workers_job(context, suspend=True), MUTABLE_WORKERS),
        (render.build_finish_job(context, suspend=True), MUTABLE_FINISH),
    ]
    return [
        keep_shape(item, observed.get("Job", item["metadata"]["name"]), mutable)
        for item, mutable in wanted
        if item["metadata"]["name"] in under_way
    ], []


def _deletable(refs: Sequence[Ref], facts: Facts) -> tuple[Ref, ...]:
    """References to those that exist, are ours and are not being deleted already."""
    job, raw, observed = facts.job, facts.raw, facts.observed
    found = []
    for item in dict.fromkeys(refs):
        live = observed.get(item.kind, item.name)
        if live is not None and is_ours(live, job, raw) and not is_dying(live):
            found.append(item)
    return tuple(found)
