"""The policy behind a job's endpoints: clients of all replicas, which requests are routed to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Literal

from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.external import ExternalClient
from kuberoll_workers.policy.routing.discovery import Discovery, DnsDiscovery, EndpointDiscovery, StaticDiscovery
from kuberoll_workers.policy.routing.replica import ReplicaClient
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.telemetry import RoutingMetrics


def external_client(
    external: External,
    url: str,
    *,
    limit: int,
    token: str | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
    window: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ExternalClient:
    """Create the client of an externally managed endpoint.

    Args:
        token: Used if the job names no variable with an API key.
        tokenizer, window: As in `ExternalClient`.
        environment: Environment variables, with the API key.

    Raises:
        ValueError: The variable of the API key is not set.
    """
    variable = external.api_key_variable
    key = token if variable is None else environment.get(variable)
    if variable is not None and not key:
        raise ValueError(
            f"spec.generation.external.apiKeyVariable: {variable} is not set in this worker's environment: set it with "
            "spec.workers.env"
        )
    return ExternalClient(
        url,
        api=external.api,
        model=external.model,
        api_key=key,
        limit=limit,
        tokenizer=tokenizer,
        window=window,
    )


@asynccontextmanager
async def open_endpoints(
    job: RolloutJob,
    *,
    endpoint: str | None,
    token: str | None,
    discovery: Literal["Endpoint", "DNS", "Static"],
    replicas: Sequence[str],
    replicas_host: str | None,
    window: int,
    tokenizer: HuggingFaceTokenizer,
    metrics: RoutingMetrics,
    commit: str | None = None,
) -> AsyncIterator[RoutedPolicy]:
    """Open the policy over all replicas; the arguments are those of a worker's configuration.

    Args:
        window: The engine's context window, tokens.
        commit: The model's at the hub; replicas of another one are not used. None: unknown.

    Raises:
        ValueError: The address for this kind of discovery is missing, or the API key is not set.
    """
    limit, external = job.spec.rollout.concurrency, job.spec.generation.external
    # Samples of a batch wait for one another, so none of them may wait for room until another one ends.
    share = 0.0 if job.spec.rollout.scheduling == "Lockstep" else 1 / max(1, job.spec.workers.replicas)

    def connect(url: str) -> AbstractAsyncContextManager[ReplicaClient]:
        if external is None:
            return ServeClient(url, limit=limit, token=token, commit=commit)
        return external_client(external, url, limit=limit, token=token, tokenizer=tokenizer, window=window)

    async with AsyncExitStack() as stack:
        source: Discovery
        if external is not None:
            source = StaticDiscovery(replicas or [external.url, *external.urls])
            # Report a missing key before waiting for the endpoint.
            connect(external.url)
        elif discovery == "DNS":
            source = DnsDiscovery(replicas_host or "")
        elif discovery == "Static" and replicas:
            source = StaticDiscovery(replicas)
        elif endpoint is None:
            raise ValueError("the worker's configuration has neither an endpoint nor a simulated engine")
        elif discovery == "Static":
            source = StaticDiscovery([endpoint])
        else:
            asking = await stack.enter_async_context(ServeClient(endpoint, limit=1, token=token))
            source = EndpointDiscovery(asking, endpoint)
        yield await stack.enter_async_context(
            RoutedPolicy(source, connect, sticky=job.spec.generation.routing == "Session", share=share, metrics=metrics)
        )
