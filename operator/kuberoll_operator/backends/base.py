"""What a generation backend is to the rest of the operator."""

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
    """How generation is.

    Attributes:
        ready: Replicas that answer.
        desired: Replicas that are wanted; 0: not known here.
        reason: Of the condition GenerationReady while not all of them answer; one of `conditions.Reason`.
        message: The real cause, redacted; of the pods' own words where they have any.
        repeats: Whether the message only says that the kubelet waits before it tries again, so that an earlier one
            of the same reason tells more.
        refused: The engine said that it will not start, however often it is tried.
        gone: Nothing of it holds a GPU any more.
        settled: Whether generation may be called ready for the first time; replicas that answer while something
            changes keep it ready, no more.
        note: About its number of replicas, for people.
    """

    ready: int
    desired: int
    reason: str = Reason.STARTING
    message: str = ""
    repeats: bool = False
    refused: str | None = None
    gone: bool = False
    settled: bool = True
    note: str = ""


class Backend(Protocol):
    """One way to run the policy."""

    @property
    def name(self) -> str:
        """As in `spec.generation.backend`."""

    @property
    def in_job(self) -> bool:
        """Whether the policy runs in pods of the job."""

    @property
    def weights_from(self) -> Literal["Pods", "Serve"] | None:
        """Who says which weights are served: each replica's pod, or Serve at the endpoint; None: nobody."""

    def problem(self, job: RolloutJob, settings: Settings) -> str | None:
        """Why this backend cannot run the job, with the field and how to mend it."""

    def hosting(self, job: RolloutJob, namespace: str, settings: Settings) -> Hosting:
        """How the policy is run, found and entered."""

    def fixtures(self, subject: RenderContext) -> Sequence[Object]:
        """Children that cost nothing and are there as long as the job: Services."""

    def engines(self, subject: RenderContext, observed: Observed, now: datetime) -> Sequence[Object]:
        """Children that hold GPUs."""

    def pod_sets(self, subject: RenderContext) -> Sequence[PodSet]:
        """The pods of the engines, as many as there may be at once: what they need quota for."""

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:
        """Those of them that will never work again, and are made anew when they are gone."""

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        """The same, to remove them."""

    def state(self, job: RolloutJob, observed: Observed) -> GenerationState:
        """How generation is."""
