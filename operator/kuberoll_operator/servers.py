"""State of the server pods of a job's environments, and of its services. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.pods import PodProblem, diagnose, pod_creation_problem, pods_of, redact
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.render.servers import served


class ServerState(NamedTuple):
    """State of one environment's server pods, or of one service's.

    Attributes:
        owner: The environment or service, in words.
        ready, desired: Numbers of pods.
        problem: Why one of them is not ready; None if nothing is known.
    """

    owner: str
    ready: int
    desired: int
    problem: PodProblem | None

    @property
    def text(self) -> str:
        """The state in words."""
        count = f"{self.owner}: {self.ready} of {self.desired} servers are ready"
        return redact(count if self.problem is None else f"{count}: {self.problem.message}")


def server_states(job: RolloutJob, observed: Observed) -> list[ServerState]:
    """States of all environments with server pods, in the order of the job."""
    return [
        _state(
            observed,
            f"environment {spec.name}",
            names.environment(job.metadata.name, number),
            names.ENVIRONMENT,
            {names.ENVIRONMENT_LABEL: spec.name},
        )
        for number, spec in served(job)
    ]


def service_states(job: RolloutJob, observed: Observed) -> list[ServerState]:
    """States of all services, in the order of the job."""
    return [
        _state(
            observed,
            f"service {service.name}",
            names.service(job.metadata.name, number),
            names.SERVICE,
            {names.SERVICE_LABEL: service.name},
        )
        for number, service in enumerate(job.spec.services)
    ]


def deployments(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to the Deployments of server pods, also of environments that the job no longer has."""
    return _numbered(observed, names.environment(job.metadata.name, 0).removesuffix("0"))


def service_deployments(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to the Deployments of services, also of those that the job no longer has."""
    return _numbered(observed, names.service(job.metadata.name, 0).removesuffix("0"))


def _numbered(observed: Observed, prefix: str) -> list[Ref]:
    return [
        Ref("apps/v1", kind, name)
        for kind, name in sorted(observed.children)
        if kind == "Deployment" and name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    ]


def first_problem(states: Sequence[ServerState]) -> ServerState | None:
    """The first whose server pods have a problem."""
    return next((state for state in states if state.ready < state.desired and state.problem is not None), None)


def unready(states: Sequence[ServerState]) -> ServerState | None:
    """The first without a server that is ready; None if all have one."""
    return next((state for state in states if not state.ready), None)


def _state(observed: Observed, owner: str, deployment: str, component: str, labels: dict[str, str]) -> ServerState:
    """State of the pods of a Deployment, whose container is named after its component."""
    live = observed.get("Deployment", deployment)
    mine = [pod for pod in pods_of(observed.pods, component) if _has_labels(pod, labels)]
    desired = int((live or {}).get("spec", {}).get("replicas", 1))
    status = {} if live is None else live.get("status", {})
    # Numbers of an older generation may count pods that are being deleted.
    current = live is not None and status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    ready = min(desired, int(status.get("readyReplicas", 0))) if current else 0
    found = diagnose(mine, component) or (None if live is None else pod_creation_problem(live))
    return ServerState(owner, ready, desired, found)


def _has_labels(pod: Object, labels: dict[str, str]) -> bool:
    return labels.items() <= (pod.get("metadata", {}).get("labels") or {}).items()
