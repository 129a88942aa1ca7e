"""What a job's workers need to have sandboxes, of which the broker makes the pods."""

from __future__ import annotations

from typing import Any

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.sandbox_images import unpullable
from kuberoll_api.sandboxes import (
    BROKER_VARIABLE,
    DRIVER_VARIABLE,
    PLACEMENT_VARIABLE,
    PODS,
    TOKEN_SCOPE,
    TOKEN_VARIABLE,
    Placement,
    Placements,
)
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest
from kuberoll_operator.render.sandbox_pods import sandbox_pods, sandboxed
from kuberoll_operator.settings import Settings


def any_network(job: RolloutJob) -> bool:
    """True if some of its sandboxes may reach everything."""
    return any(sandbox.network is not None and sandbox.network.mode == "All" for _, sandbox in sandboxed(job))


def sandbox_problem(job: RolloutJob, settings: Settings) -> str | None:
    """Reason why a job's sandboxes cannot be pods of this cluster, with the field and the remedy; None if they can."""
    for number, sandbox in sandboxed(job):
        place = f"spec.environments[{number}].sandbox"
        if settings.sandbox_broker is None:
            return (
                f"{place}: this installation makes no pods for sandboxes; set sandboxes.enabled: true in the values of "
                "its chart, or play the job on one machine with `kuberoll run`"
            )
        for field, problem in unpullable(sandbox):
            return f"{place}.{field}: {problem}"
    return None


def build_sandbox_secret(context: RenderContext) -> list[Object]:
    """Secret <job>-sandbox-token-<digest>, with the workers' token at the broker; none without sandboxes."""
    if not any(True for _ in sandboxed(context.job)):
        return []
    child = context.child("v1", "Secret", _secret(context), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": _tokens(context)}]


def sandbox_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variables of worker pods by which they have sandboxes; none without any."""
    if not any(True for _ in sandboxed(context.job)):
        return []
    token = {"secretKeyRef": {"name": _secret(context), "key": TOKEN_SCOPE}}
    return [
        {"name": DRIVER_VARIABLE, "value": PODS},
        {
            "name": BROKER_VARIABLE,
            "value": f"{context.settings.sandbox_broker}/v1/jobs/{context.namespace}/{context.name}",
        },
        {"name": TOKEN_VARIABLE, "valueFrom": token},
        *_placement(context),
    ]


def _placement(context: RenderContext) -> list[dict[str, Any]]:
    """Variable with the nodes that the sandboxes' quota is on, by their environment; none without a queue."""
    placements: dict[str, Placement] = {}
    for item in sandbox_pods(context) if context.assignments else []:
        granted = context.assignments.get(item.name)
        if granted is not None and (granted.node_selector or granted.tolerations):
            placement = Placement(
                node_selector=dict(granted.node_selector), tolerations=[dict(item) for item in granted.tolerations]
            )
            placements |= dict.fromkeys(item.environments, placement)
    if not placements:
        return []
    return [{"name": PLACEMENT_VARIABLE, "value": Placements(placements).model_dump_json(by_alias=True)}]


def _tokens(context: RenderContext) -> dict[str, str]:
    return {TOKEN_SCOPE: context.sandboxes_token}


def _secret(context: RenderContext) -> str:
    return names.sandbox_token(context.name, digest(_tokens(context)))
