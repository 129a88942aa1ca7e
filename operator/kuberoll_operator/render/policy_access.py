"""Access to the policy for server pods of environments: its address, a token of their own, and who has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.policy_access import POLICY_TOKEN, POLICY_URL, POLICY_VARIABLES, api_url
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest
from kuberoll_operator.render.servers import deployed, servers_of

_URL_KEY: Final = "url"
_TOKEN_KEY: Final = "token"


def policy_users(job: RolloutJob) -> Iterator[tuple[int, Environment]]:
    """The environments whose server pods get access to the policy, with their numbers."""
    return ((number, spec) for number, spec in deployed(job) if spec.uses_policy)


def build_policy_access(context: RenderContext) -> list[Object]:
    """Secret <job>-env-policy-<digest> with the policy's address, and the token of server pods if it is ours.

    None without an environment whose server pods use the policy.
    """
    if not any(True for _ in policy_users(context.job)):
        return []
    child = context.child("v1", "Secret", _secret(context), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": _content(context)}]


def policy_access_names(spec: Environment) -> tuple[str, ...]:
    """Names of the variables that the environment's own processes get from its server's pod."""
    return POLICY_VARIABLES if spec.uses_policy else ()


def policy_access_variables(context: RenderContext, spec: Environment) -> list[dict[str, Any]]:
    """Variables of an environment's server pods; none without access.

    The key of an external policy is the one that the job gives to these pods: the workers' is not theirs.
    """
    if not spec.uses_policy:
        return []
    found = [_from_secret(context, POLICY_URL, _URL_KEY)]
    if context.hosting.in_job:
        found.append(_from_secret(context, POLICY_TOKEN, _TOKEN_KEY))
    elif (key := _external_key(context.job)) is not None:
        found += [{**item, "name": POLICY_TOKEN} for item in servers_of(spec).env if item["name"] == key]
    return found


def servers_token_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variable of generation pods with the token of server pods; none without an environment that has it."""
    if not context.hosting.in_job or not any(True for _ in policy_users(context.job)):
        return []
    return [_from_secret(context, contract.SERVERS_TOKEN_VARIABLE, _TOKEN_KEY)]


def policy_access_problem(job: RolloutJob) -> str | None:
    """Reason why server pods would lack the key of an external policy, with the field; None if they have it."""
    if (key := _external_key(job)) is None:
        return None
    for number, spec in policy_users(job):
        if not any(item["name"] == key for item in servers_of(spec).env):
            return (
                f"spec.environments[{number}].remote.env: environment {spec.name} uses the policy, whose API key is in "
                f"the variable {key} (generation.external.apiKeyVariable) of the workers, which servers do not get; "
                f"set {key} here too, from a Secret, or use isolation Process or Inline"
            )
    return None


def _external_key(job: RolloutJob) -> str | None:
    external = job.spec.generation.external
    return None if external is None else external.api_key_variable


def _content(context: RenderContext) -> dict[str, str]:
    address = {_URL_KEY: api_url(context.hosting.endpoint)}
    return {**address, _TOKEN_KEY: context.servers_token} if context.hosting.in_job else address


def _secret(context: RenderContext) -> str:
    return names.policy_access(context.name, digest(_content(context)))


def _from_secret(context: RenderContext, name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(context), "key": key}}}
