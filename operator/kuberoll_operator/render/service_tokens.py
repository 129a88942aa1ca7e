"""API keys of services, further served models, and the variables by which environments find them."""

from __future__ import annotations

from typing import Any

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest


def build_service_secret(context: RenderContext) -> list[Object]:
    """Secret <job>-service-tokens-<digest>, with a key for each service; none without one."""
    tokens = _tokens(context)
    if not tokens:
        return []
    child = context.child("v1", "Secret", _secret(context), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": tokens}]


def service_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variables of worker pods with the addresses and the keys of all services."""
    found: list[dict[str, Any]] = []
    for number, service in enumerate(context.job.spec.services):
        url = names.service_url(context.name, number, context.namespace)
        found.append({"name": contract.service_url_variable(service.name), "value": url})
        found.append(key_variable(context, contract.service_token_variable(service.name), number))
    return found


def key_variable(context: RenderContext, name: str, number: int) -> dict[str, Any]:
    """Variable of a container with the key of one service."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(context), "key": str(number)}}}


def _tokens(context: RenderContext) -> dict[str, str]:
    return {
        str(number): context.service_tokens[service.name] for number, service in enumerate(context.job.spec.services)
    }


def _secret(context: RenderContext) -> str:
    return names.service_tokens(context.name, digest(_tokens(context)))
