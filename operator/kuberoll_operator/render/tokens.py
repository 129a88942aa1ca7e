"""The Secret of the policy's tokens, and how pods get them."""

from __future__ import annotations

from typing import Any

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest


def build_token_secrets(subject: RenderContext) -> list[Object]:
    """Secret <job>-tokens-<digest>, with a key for each scope; none for a policy that is somebody else's.

    It never changes, and its name says what is in it, so that the operator need not be allowed to read it.
    """
    if not subject.hosting.in_job:
        return []
    child = subject.child("v1", "Secret", token_secret(subject), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": dict(subject.tokens)}]


def token_secret(subject: RenderContext) -> str:
    """The name of the Secret."""
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
