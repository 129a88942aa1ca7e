"""Protocol of the generation backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from kuberoll_api.conditions import Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.hosting import Hosting
from kuberoll_operator.render.workload import PodSet
from kuberoll_operator.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationState:
    """State of generation.

    Attributes:
        ready: Number of replicas that answer.
        desired: Number of replicas that are wanted; 0 if unknown.
        reason: Reason of condition GenerationReady while not all replicas answer; one of `conditions.Reason`.
        message: The root cause, redacted, in the pods' own words if they have any.
        repeats: True if the message only says that the kubelet backs off; an earlier one of the same reason is more
            useful.
        refused: Message of an engine that can never start; retries are useless.
        released:True if nothing of it holds a GPU any more.
        stable: True if generation may become ready now; during a change, answering replicas only keep it ready.
        note: Explanation of the number of replicas, for people.
    """

    ready: int
    desired: int
    reason: str = Reason.STARTING
    message: str = ""
    repeats: bool = False
    refused: str | None = None
    released: bool = False
    stable: bool = True
    note: str = ""


class Backend(Protocol):
    """A way to run the policy."""

    @property
    def name(self) -> str:
        """Name in `spec.generation.backend`."""

    @property
    def in_job(self) -> bool:
        """True if the policy runs in pods of the job."""

    @property
    def weights_from(self) -> Literal["Pods", "Serve"] | None:
        """Source of the served weights' versions: each replica's pod, or Serve at the endpoint; None: unknown."""

    def problem(self, job: RolloutJob, settings: Settings) -> str | None:
        """Reason why this backend cannot run the job, with the field and the remedy; None if it can."""

    def hosting(self, job: RolloutJob, namespace: str, settings: Settings) -> Hosting:
        """Hosting of the job's policy."""

    def fixtures(self, context: RenderContext) -> Sequence[Object]:
        """Children that hold no GPUs and exist as long as the job: Services."""

    def engines(self, context: RenderContext, observed: Observed, now: datetime) -> Sequence[Object]:
        """Children that hold GPUs, as they should be now."""

    def pod_sets(self, context: RenderContext) -> Sequence[PodSet]:
        """Pod sets of the engines, with the maximum number of pods: the quota that they need."""

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:
        """Engines that can never work again; they are deleted, and recreated when they are gone."""

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        """References to all objects that `engines` may return."""

    def state(self, job: RolloutJob, observed: Observed, *, paid_for: int | None = None) -> GenerationState:
        """Observed state of generation.

        Args:
            paid_for: Engine pods that the job's quota is for; None for as many as are wanted.
        """
