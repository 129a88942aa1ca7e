"""The Secret with the policy's tokens, and the environment variables that pods get from it."""

from __future__ import annotations

from typing import Any

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest


def build_token_secrets(context: RenderContext) -> list[Object]:
    """Secret <job>-tokens-<digest>, with a key for each scope; none for an external policy.

    It never changes and its name contains a digest of its content, so the operator needs no permission to read it.
    """
    if not context.hosting.in_job:
        return []
    child = context.child("v1", "Secret", token_secret(context), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": dict(context.tokens)}]


def token_secret(context: RenderContext) -> str:
    """Name of the Secret."""
    return names.tokens(context.name, digest(dict(context.tokens)))


def token_variables(context: RenderContext, *scopes: contract.Scope) -> list[dict[str, Any]]:
    """Environment variables of a container with the tokens of these scopes."""
    if not context.hosting.in_job:
        return []
    secret = token_secret(context)
    return [
        {"name": contract.token_variable(scope), "valueFrom": {"secretKeyRef": {"name": secret, "key": scope}}}
        for scope in scopes
    ]
