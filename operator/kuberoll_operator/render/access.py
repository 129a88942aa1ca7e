"""Access to the policy for pods outside the job (`generation.access`): their tokens, and their way in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.model.access import PolicyAccess
from kuberoll_api.policy_access import POLICY_TOKEN, POLICY_URL, api_url
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.hosting import tcp
from kuberoll_operator.render.objects import digest

_SAMPLING: Final = "generate"
_READING: Final = "read"


def build_access_secrets(context: RenderContext) -> list[Object]:
    """Secret <job>-tokens-access-<digest> for generation pods, and a Secret <job>-access-<name> for each user's pods.

    None for entries that name a Secret with their token. Users must know a name in advance, so theirs has no digest:
    generation pods read another one, and never the tokens of an earlier job of the same name.
    """
    tokens = _tokens(context)
    if not tokens:
        return []
    own = context.child("v1", "Secret", _secret(context), names.TOKENS)
    url = api_url(context.hosting.endpoint)
    return [
        {**own, "immutable": True, "type": "Opaque", "stringData": tokens},
        *(
            {
                **context.child("v1", "Secret", names.access(context.name, name), names.ACCESS),
                "immutable": True,
                "type": "Opaque",
                "stringData": {POLICY_URL: url, POLICY_TOKEN: token},
            }
            for name, token in tokens.items()
        ),
    ]


def access_token_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variables of generation pods with the tokens of pods outside the job, one for each scope of each."""
    return [
        {
            "name": contract.access_token_variable(scope, entry.name),
            "valueFrom": {"secretKeyRef": _reference(context, entry)},
        }
        for entry in _entries(context)
        for scope in contract.SCOPES
        if scope in entry.scopes
    ]


def direct_token_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variables of worker pods with the tokens of pods outside the job that only read: workers serve them records.

    Environments' code runs in worker pods, so a token that may do more is never there.
    """
    return [
        {
            "name": contract.access_token_variable(_READING, entry.name),
            "valueFrom": {"secretKeyRef": _reference(context, entry)},
        }
        for entry in _entries(context)
        if set(entry.scopes) == {_READING}
    ]


def access_rules(context: RenderContext) -> list[Object]:
    """Ingress of generation pods from pods outside the job.

    All of them reach the endpoint, and those that may sample also the replicas' own ports, as the URLs of sessions do.
    """
    every = policy_ports(context)
    return [
        {"ports": every if _SAMPLING in entry.scopes else every[:1], "from": [_peer(entry)]}
        for entry in _entries(context)
    ]


def policy_ports(context: RenderContext) -> list[Object]:
    """Ports of the policy: first its endpoint's, then those of its replicas if they have others."""
    ports = context.hosting.replica_ports
    return [tcp(contract.GENERATION_PORT), *([] if ports is None else [tcp(*ports)])]


def _entries(context: RenderContext) -> Iterator[PolicyAccess]:
    """The entries by name: their order means nothing, and an API server lets it change."""
    return iter(sorted(context.job.spec.generation.access, key=lambda entry: entry.name))


def _peer(entry: PolicyAccess) -> Object:
    """Peer of a NetworkPolicy. An absent selector is not the same as one that selects everything."""
    selectors = {"podSelector": entry.pod_selector, "namespaceSelector": entry.namespace_selector}
    return {name: selector.as_json() for name, selector in selectors.items() if selector is not None}


def _reference(context: RenderContext, entry: PolicyAccess) -> dict[str, str]:
    if entry.token_secret is not None:
        return {"name": entry.token_secret.name, "key": entry.token_secret.key}
    return {"name": _secret(context), "key": entry.name}


def _tokens(context: RenderContext) -> dict[str, str]:
    return {entry.name: context.access_tokens[entry.name] for entry in _entries(context) if entry.token_secret is None}


def _secret(context: RenderContext) -> str:
    return names.access_tokens(context.name, digest(_tokens(context)))
