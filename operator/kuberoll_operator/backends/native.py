"""Generation in a Deployment of ours, every pod one replica."""

from __future__ import annotations

from collections.abc import Sequence

from kuberoll_api.conditions import Reason
from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.backends.pods import first_problem, of_component, pod_creation_problem, refusal, still_there
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.render.generation import MUTABLE, build_generation_deployment, build_generation_services
from kuberoll_operator.render.objects import keep_shape
from kuberoll_operator.render.subject import Subject


class Native:
    """Deployment and Services; needs nothing else in the cluster."""

    name = "Native"

    def problem(self, job: RolloutJob) -> str | None:
        if job.spec.generation.autoscaling is not None:
            return (
                "spec.generation.autoscaling: backend Native has a fixed number of replicas; set "
                "spec.generation.replicas in its place"
            )
        return None

    def endpoint(self, job: RolloutJob, namespace: str) -> str:
        return f"http://{names.generation(job.metadata.name)}.{namespace}.svc:{names.GENERATION_PORT}"

    def fixtures(self, subject: Subject) -> Sequence[Object]:
        return build_generation_services(subject)

    def engines(self, subject: Subject, observed: Observed) -> Sequence[Object]:
        deployment = build_generation_deployment(subject)
        return [keep_shape(deployment, observed.get("Deployment", names.generation(subject.name)), MUTABLE)]

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        return [Ref("apps/v1", "Deployment", names.generation(job.metadata.name))]

    def state(self, job: RolloutJob, observed: Observed) -> GenerationState:
        desired = job.spec.generation.replicas or 1
        deployment = observed.get("Deployment", names.generation(job.metadata.name))
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
        )
