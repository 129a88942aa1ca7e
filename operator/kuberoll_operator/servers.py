"""State of the server pods of a job's environments. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.pods import PodProblem, diagnose, pod_creation_problem, pods_of, redact
from kuberoll_operator.model import Object, Observed, Ref
from kuberoll_operator.render.servers import served


class ServerState(NamedTuple):
    """State of one environment's server pods.

    Attributes:
        environment: Name of the environment.
        ready, desired: Numbers of pods.
        problem: Why one of them is not ready; None if nothing is known.
    """

    environment: str
    ready: int
    desired: int
    problem: PodProblem | None

    @property
    def text(self) -> str:
        """The state in words."""
        count = f"environment {self.environment}: {self.ready} of {self.desired} servers are ready"
        return redact(count if self.problem is None else f"{count}: {self.problem.message}")


def server_states(job: RolloutJob, observed: Observed) -> list[ServerState]:
    """States of all environments with server pods, in the order of the job."""
    return list(_states(job, observed))


def deployments(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to the Deployments of server pods, also of environments that the job no longer has."""
    prefix = names.environment(job.metadata.name, 0).removesuffix("0")
    return [
        Ref("apps/v1", kind, name)
        for kind, name in sorted(observed.children)
        if kind == "Deployment" and name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    ]


def first_problem(states: Sequence[ServerState]) -> ServerState | None:
    """The first environment whose server pods have a problem."""
    return next((state for state in states if state.ready < state.desired and state.problem is not None), None)


def unready(states: Sequence[ServerState]) -> ServerState | None:
    """The first environment without a server that is ready; None if all have one."""
    return next((state for state in states if not state.ready), None)


def _states(job: RolloutJob, observed: Observed) -> Iterator[ServerState]:
    pods = pods_of(observed.pods, names.ENVIRONMENT)
    for number, spec in served(job):
        live = observed.get("Deployment", names.environment(job.metadata.name, number))
        mine = [pod for pod in pods if _environment_of(pod) == spec.name]
        desired = int((live or {}).get("spec", {}).get("replicas", 1))
        status = {} if live is None else live.get("status", {})
        # Numbers of an older generation may count pods that are being deleted.
        current = live is not None and status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        ready = min(desired, int(status.get("readyReplicas", 0))) if current else 0
        found = diagnose(mine, "environment") or (None if live is None else pod_creation_problem(live))
        yield ServerState(spec.name, ready, desired, found)


def _environment_of(pod: Object) -> str | None:
    found = (pod.get("metadata", {}).get("labels") or {}).get(names.ENVIRONMENT_LABEL)
    return None if found is None else str(found)
