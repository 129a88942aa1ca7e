"""Generation in a Deployment of ours, every pod one replica."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from kuberoll_api.conditions import Reason
from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_operator import autoscaling, names
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.backends.pods import (
    first_problem,
    of_component,
    pod_creation_problem,
    refusal,
    shard_of,
    still_there,
)
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.placement import misplacement
from kuberoll_operator.render.generation import MUTABLE, build_generation_deployment, build_generation_services
from kuberoll_operator.render.objects import annotated, keep_shape
from kuberoll_operator.render.subject import Subject
from kuberoll_operator.render.workload import PodSet


class Native:
    """Deployment and Services; needs nothing else in the cluster."""

    name = "Native"

    def problem(self, job: RolloutJob) -> str | None:
        return misplacement(job.spec.generation, one_each=True)

    def endpoint(self, job: RolloutJob, namespace: str) -> str:
        return names.generation_url(job.metadata.name, namespace)

    def fixtures(self, subject: Subject) -> Sequence[Object]:
        return build_generation_services(subject)

    def engines(self, subject: Subject, observed: Observed, now: datetime) -> Sequence[Object]:
        live = observed.get("Deployment", names.generation(subject.name))
        spec = subject.job.spec.generation
        if spec.autoscaling is None:
            return [keep_shape(build_generation_deployment(subject, replicas=spec.replicas or 1), live, MUTABLE)]
        current = _asked_for(live) or autoscaling.lowest(spec.autoscaling)
        intent = autoscaling.read_intent(live) if live else None
        decided = autoscaling.decide(spec.autoscaling, load_of(observed), current, intent, now)
        deployment = keep_shape(build_generation_deployment(subject, replicas=decided.replicas), live, MUTABLE)
        text = autoscaling.written(decided.intent) if decided.intent else None
        return [annotated(deployment, {names.AUTOSCALING: text})]

    def pod_sets(self, subject: Subject) -> Sequence[PodSet]:
        deployment = build_generation_deployment(subject, replicas=_most(subject.job))
        return [PodSet(names.GENERATION, _most(subject.job), deployment["spec"]["template"])]

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:  # noqa: ARG002
        return []

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        return [Ref("apps/v1", "Deployment", names.generation(job.metadata.name))]

    def state(self, job: RolloutJob, observed: Observed) -> GenerationState:
        spec = job.spec.generation
        deployment = observed.get("Deployment", names.generation(job.metadata.name))
        desired = spec.replicas or 1
        if spec.autoscaling is not None:
            desired = _asked_for(deployment) or autoscaling.lowest(spec.autoscaling)
        pods = of_component(observed.pods, names.GENERATION)
        status = deployment.get("status", {}) if deployment else {}
        # Of an older generation the numbers may be those of pods that are on their way out.
        current = deployment is not None and status.get("observedGeneration", 0) >= deployment["metadata"].get(
            "generation", 0
        )
        ready = min(desired, int(status.get("readyReplicas", 0))) if current else 0
        found = first_problem(pods, "generation") or (pod_creation_problem(deployment) if deployment else None)
        return GenerationState(
            ready=ready,
            desired=desired,
            reason=found.reason if found else Reason.STARTING,
            message=found.message if found else "",
            repeats=found is not None and found.repeats,
            refused=refusal(pods, "generation"),
            gone=deployment is None and not still_there(pods),
            note=autoscaling.described(spec.autoscaling, load_of(observed)) if spec.autoscaling else "",
        )


def _most(job: RolloutJob) -> int:
    """Replicas that there may be at once."""
    spec = job.spec.generation
    return spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas or 1


def load_of(observed: Observed) -> autoscaling.Load:
    """What the workers ask of the policy now."""
    told = [observed.progress.get(shard) for shard in _shards_that_run(observed)]
    return autoscaling.Load(sum(item.generating for item in told if item), None not in told)


def _shards_that_run(observed: Observed) -> set[int]:
    running = [
        pod
        for pod in of_component(observed.pods, names.WORKERS)
        if pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    return {shard for pod in running if (shard := shard_of(pod)) is not None}


def _asked_for(deployment: Object | None) -> int | None:
    return None if deployment is None else (deployment.get("spec") or {}).get("replicas")
