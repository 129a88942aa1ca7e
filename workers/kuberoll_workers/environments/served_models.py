"""Addresses of served models for environments: environment variables, which only those have that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kuberoll_workers.environments.registry import UnusableEnvironment

POLICY_URL: Final = "KUBEROLL_POLICY_URL"
POLICY_TOKEN: Final = "KUBEROLL_POLICY_TOKEN"
POLICY_VARIABLES: Final = (POLICY_URL, POLICY_TOKEN)
"""Address of the policy's OpenAI-compatible API, with its `/v1`, and a token that can only generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model behind an HTTP endpoint.

    Attributes:
        url: Base URL of its OpenAI-compatible API, such as `http://host:8000/v1`.
        token: Bearer token; None: none. It is not shown.
    """

    url: str
    token: str | None = field(default=None, repr=False)


def api_url(url: str) -> str:
    """The base URL of an endpoint's OpenAI-compatible API, from a URL with or without `/v1`."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


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


@contextmanager
def policy_variables(policy: ServedModel | None) -> Iterator[None]:
    """Set the variables of `policy_endpoint` in this process until the block is left; None: leave them as they are."""
    if policy is None:
        yield
        return
    before = {name: os.environ.get(name) for name in POLICY_VARIABLES}
    os.environ[POLICY_URL] = api_url(policy.url)
    os.environ[POLICY_TOKEN] = policy.token or ""
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
