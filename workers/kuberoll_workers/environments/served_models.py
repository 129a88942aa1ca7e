"""Addresses of served models for environments: environment variables, which only those have that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kuberoll_api.contract import service_token_variable, service_url_variable
from kuberoll_api.policy_access import POLICY_TOKEN, POLICY_URL, api_url
from kuberoll_workers.environments.registry import UnusableEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model behind an HTTP endpoint.

    Attributes:
        url: Base URL of its OpenAI-compatible API, such as `http://host:8000/v1`.
        token: Bearer token; None: none. It is not shown.
    """

    url: str
    token: str | None = field(default=None, repr=False)


def policy_endpoint(environment: Mapping[str, str] | None = None) -> ServedModel:
    """The policy's own endpoint. Ask for it when it is used: constructors also run before there is an engine.

    Args:
        environment: Environment variables; None: those of this process.

    Raises:
        UnusableEnvironment: The environment has no access to it.
    """
    variables = os.environ if environment is None else environment
    if not (url := variables.get(POLICY_URL)):
        raise UnusableEnvironment(
            f"{POLICY_URL} is not set: give the environment access to the policy (access: {{policy: true}}), and use "
            "it in step, not in the constructor, which also runs where there is no policy; outside a job, set the "
            f"variable to the endpoint's URL, and {POLICY_TOKEN} to its token"
        )
    return ServedModel(url=api_url(url), token=variables.get(POLICY_TOKEN) or None)


def service_endpoint(name: str, environment: Mapping[str, str] | None = None) -> ServedModel:
    """The endpoint of a service of the job. Ask for it when it is used: constructors also run before there is one.

    Args:
        name: Its name in `spec.services`.
        environment: Environment variables; None: those of this process.

    Raises:
        UnusableEnvironment: The environment has no access to it.
    """
    variables = os.environ if environment is None else environment
    if not (url := variables.get(service_url_variable(name))):
        raise UnusableEnvironment(
            f"{service_url_variable(name)} is not set: give the environment access to the service (access: {{services: "
            f"[{name}]}}), and use it in step, not in the constructor, which also runs where there is none; outside a "
            f"job, set the variable to the URL of a server, and {service_token_variable(name)} to its key"
        )
    return ServedModel(url=api_url(url), token=variables.get(service_token_variable(name)) or None)


def service_variables(names: Iterable[str]) -> list[str]:
    """Names of the variables by which `service_endpoint` finds these services."""
    return [variable(name) for name in names for variable in (service_url_variable, service_token_variable)]


@contextmanager
def endpoint_variables(policy: ServedModel | None, services: Mapping[str, ServedModel]) -> Iterator[None]:
    """Set the variables of `policy_endpoint` and `service_endpoint` in this process until the block is left.

    Args:
        policy: None: leave its variables as they are.
        services: By name; the variables of others are left as they are.
    """
    given = {} if policy is None else {POLICY_URL: api_url(policy.url), POLICY_TOKEN: policy.token or ""}
    for name, service in services.items():
        given |= {service_url_variable(name): api_url(service.url), service_token_variable(name): service.token or ""}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
