"""Backend External: a policy that runs outside the job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from kuberoll_api.conditions import Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.hosting import Hosting
from kuberoll_operator.render.workload import PodSet
from kuberoll_operator.settings import Settings


class External:
    """Renders nothing and waits for nothing: workers wait for an endpoint that does not answer yet."""

    name = "External"
    in_job = False
    weights_from = None

    def problem(self, job: RolloutJob, settings: Settings) -> str | None:  # noqa: ARG002
        if job.spec.generation.external is None:
            return "spec.generation.external: missing; backend External needs external.url, the endpoint to use"
        return None

    def hosting(self, job: RolloutJob, namespace: str, settings: Settings) -> Hosting:  # noqa: ARG002
        external = job.spec.generation.external
        if external is None:
            return Hosting(endpoint="", in_job=False)
        replicas = [url.rstrip("/") for url in (external.url, *external.urls)]
        return Hosting(endpoint=replicas[0], in_job=False, discovery="Static", replicas=replicas)

    def fixtures(self, context: RenderContext) -> Sequence[Object]:  # noqa: ARG002
        return []

    def engines(self, context: RenderContext, observed: Observed, now: datetime) -> Sequence[Object]:  # noqa: ARG002
        return []

    def pod_sets(self, context: RenderContext) -> Sequence[PodSet]:  # noqa: ARG002
        return []

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:  # noqa: ARG002
        return []

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:  # noqa: ARG002
        return []

    def state(
        self,
        job: RolloutJob,
        observed: Observed,  # noqa: ARG002
        *,
        paid_for: int | None = None,  # noqa: ARG002
    ) -> GenerationState:
        external = job.spec.generation.external
        others = f" and {len(external.urls)} more" if external and external.urls else ""
        message = f"{external.url.rstrip('/') if external else ''}{others}: managed externally"
        return GenerationState(ready=0, desired=0, reason=Reason.EXTERNAL, message=message, released=True)
