"""The Secret with the policy's tokens, and the environment variables that pods get from it."""

from __future__ import annotations

from typing import Any

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest


def build_token_secrets(subject: RenderContext) -> list[Object]:
    """Secret <job>-tokens-<digest>, with a key for each scope; none for an external policy.

    It never changes and its name contains a digest of its content, so the operator needs no permission to read it.
    """
    if not subject.hosting.in_job:
        return []
    child = subject.child("v1", "Secret", token_secret(subject), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": dict(subject.tokens)}]


def token_secret(subject: RenderContext) -> str:
    """Name of the Secret."""
    return names.tokens(subject.name, digest(dict(subject.tokens)))


def token_variables(subject: RenderContext, *scopes: contract.Scope) -> list[dict[str, Any]]:
    """Environment variables of a container with the tokens of these scopes."""
    if not subject.hosting.in_job:
        return []
    secret = token_secret(subject)
    return [
        {"name": contract.token_variable(scope), "valueFrom": {"secretKeyRef": {"name": secret, "key": scope}}}
        for scope in scopes
    ]
