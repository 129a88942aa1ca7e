"""Backend Native: a Deployment with one replica per pod, or a LeaderWorkerSet for replicas that span pods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from kuberoll_api.conditions import Reason
from kuberoll_api.contract import GENERATION_PORT, fewest_replicas
from kuberoll_api.model.generation import Autoscaling
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends import autoscaling
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.backends.pods import (
    diagnose,
    first_problem,
    holds_any,
    is_leader,
    owner_problem,
    pod_creation_problem,
    pods_of,
    refusal,
    shard_of,
)
from kuberoll_operator.model import Object, Observed, Ref, is_true, status_of
from kuberoll_operator.placement import PlacementError, place, placement_problem
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.generation import (
    GROUPS_MUTABLE,
    MUTABLE,
    build_generation_budget,
    build_generation_deployment,
    build_generation_groups,
    build_generation_services,
)
from kuberoll_operator.render.hosting import Hosting
from kuberoll_operator.render.objects import annotated, keep_shape
from kuberoll_operator.render.workload import PodSet
from kuberoll_operator.settings import Settings


class Native:
    """Deployment and Services without further dependencies; replicas that span pods need LeaderWorkerSet."""

    name = "Native"
    in_job = True
    weights_from: Final = "Pods"

    def problem(self, job: RolloutJob, settings: Settings) -> str | None:
        return placement_problem(
            job.spec.generation, one_per_pod=True, may_span=settings.leader_worker_set is not False
        )

    def hosting(self, job: RolloutJob, namespace: str, settings: Settings) -> Hosting:  # noqa: ARG002
        name = job.metadata.name
        return Hosting(
            endpoint=names.generation_url(name, namespace),
            discovery="DNS",
            replicas_host=f"{names.generation_pods(name)}.{namespace}.svc:{GENERATION_PORT}",
        )

    def fixtures(self, context: RenderContext) -> Sequence[Object]:
        return build_generation_services(context, leaders=_size(context.job) > 1)

    def engines(self, context: RenderContext, observed: Observed, now: datetime) -> Sequence[Object]:
        live = _live(context.job, observed)
        assignment = context.assignments.get(names.GENERATION)
        scale = _scale(context.job, None if assignment is None else assignment.count)
        budget = [build_generation_budget(context)] if _most(context.job) > 1 else []
        if isinstance(scale, int):
            return [*budget, _build(context, scale, live)]
        current = _asked_for(live) or fewest_replicas(scale)
        intent = autoscaling.read_intent(live) if live else None
        decided = autoscaling.decide(scale, load_of(observed), current, intent, now)
        text = autoscaling.intent_annotation(decided.intent) if decided.intent else None
        return [*budget, annotated(_build(context, decided.replicas, live), {names.AUTOSCALING: text})]

    def pod_sets(self, context: RenderContext) -> Sequence[PodSet]:
        most = _most(context.job)
        # The pods of a group differ in their probes only.
        template = build_generation_deployment(context, replicas=most)["spec"]["template"]
        return [PodSet(names.GENERATION, most * _size(context.job), template)]

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:  # noqa: ARG002
        # A budget of one replica, after others went, means nothing.
        return [] if _most(job) > 1 else [_budget_ref(job)]

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        return [*_owner_refs(job), _budget_ref(job)]

    def state(self, job: RolloutJob, observed: Observed, *, paid_for: int | None = None) -> GenerationState:
        live = _live(job, observed)
        scale = _scale(job, paid_for)
        desired = scale if isinstance(scale, int) else _asked_for(live) or fewest_replicas(scale)
        load = "" if isinstance(scale, int) else autoscaling.describe(scale, load_of(observed))
        pods = pods_of(observed.pods, names.GENERATION)
        status = live.get("status", {}) if live else {}
        # Numbers of an older generation may count pods that are being deleted; then pods say themselves who answers.
        current = live is not None and status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        ready = int(status.get("readyReplicas", 0)) if current else sum(map(_answers, pods if live else ()))
        found = first_problem(
            (
                diagnose(pods, "generation", observed.signs),
                pod_creation_problem(live) if live else None,
                owner_problem(observed.signs, "StatefulSet", names.leader_worker_set(job.metadata.name)),
            )
        )
        return GenerationState(
            ready=min(desired, ready),
            desired=desired,
            reason=found.reason if found else Reason.STARTING,
            message=found.message if found else "",
            repeats=found is not None and found.repeats,
            refused=refusal(pods, "generation"),
            released=not any(observed.get(item.kind, item.name) for item in _owner_refs(job)) and not holds_any(pods),
            stable=current,
            note="; ".join(filter(None, (load, _unpaid(job, scale)))),
        )


def _answers(pod: Object) -> bool:
    """True if a pod answers for its replica, and is not to end."""
    return is_leader(pod) and is_true(status_of(pod), "Ready") and not pod["metadata"].get("deletionTimestamp")


def _owner_refs(job: RolloutJob) -> Sequence[Ref]:
    """References to what owns the pods."""
    name = job.metadata.name
    return [
        Ref("apps/v1", "Deployment", names.generation(name)),
        Ref("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", names.leader_worker_set(name)),
    ]


def _budget_ref(job: RolloutJob) -> Ref:
    return Ref("policy/v1", "PodDisruptionBudget", names.generation(job.metadata.name))


def _size(job: RolloutJob) -> int:
    """Number of pods of a replica."""
    try:
        return place(job.spec.generation, one_per_pod=True, may_span=True).pods_per_replica
    except PlacementError:
        return 1


def _live(job: RolloutJob, observed: Observed) -> Object | None:
    """The live Deployment or LeaderWorkerSet; None if it does not exist."""
    name = job.metadata.name
    if _size(job) > 1:
        return observed.get("LeaderWorkerSet", names.leader_worker_set(name))
    return observed.get("Deployment", names.generation(name))


def _build(context: RenderContext, replicas: int, live: Object | None) -> Object:
    """The Deployment or LeaderWorkerSet as it should be; a live one keeps its shape."""
    if (size := _size(context.job)) > 1:
        return keep_shape(build_generation_groups(context, replicas=replicas, size=size), live, GROUPS_MUTABLE)
    return keep_shape(build_generation_deployment(context, replicas=replicas), live, MUTABLE)


def _most(job: RolloutJob) -> int:
    """Maximum number of replicas at the same time."""
    return _highest(_scale(job, None))


def _highest(scale: int | Autoscaling) -> int:
    return scale if isinstance(scale, int) else scale.max_replicas


def _scale(job: RolloutJob, paid_for: int | None) -> int | Autoscaling:
    """Number of replicas, or what it follows; within a quota of this many pods."""
    spec = job.spec.generation
    most = None if paid_for is None else max(1, paid_for // _size(job))
    if spec.autoscaling is None:
        wanted = spec.replicas or 1
        return wanted if most is None else min(wanted, most)
    if most is None or spec.autoscaling.max_replicas <= most:
        return spec.autoscaling
    least = min(spec.autoscaling.min_replicas, most)
    return spec.autoscaling.model_copy(update={"min_replicas": least, "max_replicas": most})


def _unpaid(job: RolloutJob, scale: int | Autoscaling) -> str:
    """What a job that wants more replicas than its quota is for waits for; empty if it does not."""
    wanted, most = _most(job), _highest(scale)
    if wanted <= most:
        return ""
    return (
        f"{wanted} are wanted and the admitted quota is for {most}: the others wait for the next admission (suspend "
        "and resume the job)"
    )


def load_of(observed: Observed) -> autoscaling.Load:
    """Load that the workers put on the policy now."""
    told = [observed.progress.get(shard) for shard in _shards_that_run(observed)]
    return autoscaling.Load(sum(item.generating for item in told if item), None not in told)


def _shards_that_run(observed: Observed) -> set[int]:
    running = [
        pod
        for pod in pods_of(observed.pods, names.WORKERS)
        if pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    return {shard for pod in running if (shard := shard_of(pod)) is not None}


def _asked_for(deployment: Object | None) -> int | None:
    return None if deployment is None else (deployment.get("spec") or {}).get("replicas")
