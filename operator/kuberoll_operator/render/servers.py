"""Environments whose servers the operator starts: which ones they are, their addresses and their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kuberoll_api import contract
from kuberoll_api.model.environments import Environment, EnvironmentSandboxes, EnvironmentServers
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import digest


def served(job: RolloutJob) -> Iterator[tuple[int, Environment]]:
    """The environments whose servers the operator starts, with their numbers."""
    for number, spec in enumerate(job.spec.environments):
        if spec.isolation == "Remote" and not servers_of(spec).located:
            yield number, spec


def deployed(job: RolloutJob) -> Iterator[tuple[int, Environment]]:
    """Those of them whose servers are pods of the job."""
    return ((number, spec) for number, spec in served(job) if servers_of(spec).sandbox is None)


def claimed(job: RolloutJob) -> Iterator[tuple[int, Environment, EnvironmentSandboxes]]:
    """Those of them whose servers are claimed sandboxes, with what they are claimed from."""
    for number, spec in served(job):
        if (sandbox := servers_of(spec).sandbox) is not None:
            yield number, spec, sandbox


def claim_names(job: RolloutJob, number: int, spec: Environment) -> list[str]:
    """Names of the claims of an environment whose servers are claimed sandboxes."""
    return [names.claim(job.metadata.name, number, index) for index in range(servers_of(spec).replicas)]


def servers_of(spec: Environment) -> EnvironmentServers:
    """The options of an environment's servers."""
    return spec.remote or EnvironmentServers()


def build_environment_secret(context: RenderContext) -> list[Object]:
    """Secret <job>-env-tokens-<digest>, with a key for each environment with server pods; none without one."""
    tokens = _tokens(context)
    if not tokens:
        return []
    child = context.child("v1", "Secret", _secret(context), names.TOKENS)
    return [{**child, "immutable": True, "type": "Opaque", "stringData": tokens}]


def environment_token_variables(context: RenderContext) -> list[dict[str, Any]]:
    """Variables of worker pods with the tokens of all server pods."""
    return [
        server_token_variable(context, contract.environment_token_variable(number), number)
        for number, _ in served(context.job)
    ]


def located(context: RenderContext, spec: dict[str, Any]) -> dict[str, Any]:
    """A job's spec, as its pods get it, with the addresses of the server pods."""
    environments = [dict(item) for item in spec["environments"]]
    for number, _ in served(context.job):
        environments[number]["remote"] = {
            "url": names.environment_url(context.name, number, context.namespace),
            "apiKeyVariable": contract.environment_token_variable(number),
        }
        # To workers these servers are elsewhere, and have their access to the policy.
        if (access := environments[number].get("access", {})).get("policy"):
            environments[number]["access"] = {**access, "policy": False}
    return {**spec, "environments": environments}


def _tokens(context: RenderContext) -> dict[str, str]:
    return {str(number): context.environment_tokens[spec.name] for number, spec in served(context.job)}


def _secret(context: RenderContext) -> str:
    return names.environment_tokens(context.name, digest(_tokens(context)))


def server_token_variable(context: RenderContext, name: str, number: int) -> dict[str, Any]:
    """Variable of a container with the token of one environment's servers."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(context), "key": str(number)}}}
