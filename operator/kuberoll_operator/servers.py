"""State of the servers of a job's environments, of its own pods or of claimed sandboxes, and of its services. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from kuberoll_api.conditions import Reason
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.pods import (
    PodProblem,
    diagnose,
    first_problem,
    pod_creation_problem,
    pods_of,
    redact,
)
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.kube.resources import SANDBOX_CLAIMS
from kuberoll_operator.model import Object, Observed, Ref, condition, is_true, status_of
from kuberoll_operator.render.servers import claim_names, claimed, deployed, served
from kuberoll_operator.settings import Settings

_NOT_SERVED: Final = (
    f"the cluster does not serve {SANDBOX_CLAIMS.api_version} {SANDBOX_CLAIMS.plural}; install agent-sandbox with its "
    "extensions, 0.5 or later, or remove remote.sandbox"
)
# Conditions of a SandboxClaim; its Ready is that of the Sandbox.
_READY: Final = "Ready"
_FINISHED: Final = "Finished"
_ENDED: Final = frozenset({"ClaimExpired", "SandboxExpired"})
_ON_ITS_WAY: Final = frozenset(
    {"AdoptionConflict", "DependenciesNotReady", "SandboxCreatePending", "SandboxMissing", "SandboxNotReady"}
)
_LEAST_AGE: Final = timedelta(minutes=1)


class ServerState(NamedTuple):
    """State of one environment's servers, or of one service's.

    Attributes:
        owner: The environment or service, in words.
        ready, desired: Numbers of servers.
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


def server_states(job: RolloutJob, observed: Observed, settings: Settings) -> list[ServerState]:
    """States of all environments whose servers the operator starts, in the order of the job."""
    found = dict((*_deployed_states(job, observed), *_claimed_states(job, observed, settings)))
    return [found[number] for number, _ in served(job)]


def server_refs(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to the Deployments and claims of servers, also of environments that the job no longer has."""
    return [*_numbered(observed, names.environment(job.metadata.name, 0).removesuffix("0")), *claim_refs(observed)]


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


def service_deployments(job: RolloutJob, observed: Observed) -> list[Ref]:
    """References to the Deployments of services, also of those that the job no longer has."""
    return _numbered(observed, names.service(job.metadata.name, 0).removesuffix("0"))


def claim_refs(observed: Observed) -> list[Ref]:
    """References to the claims of sandboxes."""
    kind = SANDBOX_CLAIMS.kind
    return [Ref(SANDBOX_CLAIMS.api_version, kind, name) for found, name in sorted(observed.children) if found == kind]


def outdated_claims(job: RolloutJob, observed: Observed, now: datetime) -> list[Ref]:
    """Claims to delete of a job that goes on: those that it no longer has, and those whose sandbox has ended.

    Another is claimed in place of one that has ended, but not in its first minute: a template whose pods end at once
    would empty its pool.
    """
    wanted = {name for number, spec, _ in claimed(job) for name in claim_names(job, number, spec)}
    return [
        item
        for item in claim_refs(observed)
        if item.name not in wanted or _is_used_up(observed.children[item.kind, item.name], now)
    ]


def _numbered(observed: Observed, prefix: str) -> list[Ref]:
    return [
        Ref("apps/v1", kind, name)
        for kind, name in sorted(observed.children)
        if kind == "Deployment" and name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    ]


def first_unready(states: Sequence[ServerState]) -> ServerState | None:
    """The first whose servers have a problem."""
    return next((state for state in states if state.ready < state.desired and state.problem is not None), None)


def unready(states: Sequence[ServerState]) -> ServerState | None:
    """The first without a server that is ready; None if all have one."""
    return next((state for state in states if not state.ready), None)


def _deployed_states(job: RolloutJob, observed: Observed) -> Iterator[tuple[int, ServerState]]:
    for number, spec in deployed(job):
        labels = {names.ENVIRONMENT_LABEL: spec.name}
        name = names.environment(job.metadata.name, number)
        yield number, _state(observed, f"environment {spec.name}", name, names.ENVIRONMENT, labels)


def _claimed_states(job: RolloutJob, observed: Observed, settings: Settings) -> Iterator[tuple[int, ServerState]]:
    for number, spec, _ in claimed(job):
        owner, wanted = f"environment {spec.name}", claim_names(job, number, spec)
        if settings.agent_sandbox is False:
            yield number, ServerState(owner, 0, len(wanted), PodProblem(Reason.SANDBOX, _NOT_SERVED))
            continue
        live = [item for name in wanted if (item := observed.get(SANDBOX_CLAIMS.kind, name)) is not None]
        waiting = [item for item in live if not is_true(status_of(item), _READY)]
        problem = _claim_problem(waiting[0]) if waiting else None
        yield number, ServerState(owner, len(live) - len(waiting), len(wanted), problem)


def _claim_problem(claim: Object) -> PodProblem:
    """Why a claim has no sandbox that is ready, in the words of agent-sandbox's controller."""
    status = status_of(claim)
    found = condition(status, _READY)
    why = found.get("reason", "")
    text = f"{why}: {found.get('message', '')}"
    if not found:
        text = "agent-sandbox has not answered; its controller needs --extensions"
    sandbox = (status.get("sandbox") or {}).get("name")
    of = f" (sandbox {sandbox})" if sandbox else ""
    reason = Reason.STARTING if not found or why in _ON_ITS_WAY else Reason.SANDBOX
    return PodProblem(reason, redact(f"SandboxClaim {claim['metadata']['name']}{of}: {text}"))


def _is_used_up(claim: Object, now: datetime) -> bool:
    status = status_of(claim)
    ended = is_true(status, _FINISHED) or condition(status, _READY).get("reason") in _ENDED
    born = parse_time(claim["metadata"].get("creationTimestamp"))
    return ended and born is not None and now - born >= _LEAST_AGE


def _state(observed: Observed, owner: str, deployment: str, component: str, labels: dict[str, str]) -> ServerState:
    """State of the pods of a Deployment, whose container is named after its component."""
    live = observed.get("Deployment", deployment)
    mine = [pod for pod in pods_of(observed.pods, component) if _has_labels(pod, labels)]
    desired = int((live or {}).get("spec", {}).get("replicas", 1))
    status = {} if live is None else live.get("status", {})
    # Numbers of an older generation may count pods that are being deleted.
    current = live is not None and status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    ready = min(desired, int(status.get("readyReplicas", 0))) if current else 0
    creation = None if live is None else pod_creation_problem(live)
    found = first_problem((diagnose(mine, component, observed.signs), creation))
    return ServerState(owner, ready, desired, found)


def _has_labels(pod: Object, labels: dict[str, str]) -> bool:
    return labels.items() <= (pod.get("metadata", {}).get("labels") or {}).items()
