"""The policy behind a job's endpoints: clients of all replicas, which requests are routed to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Literal, Protocol

from kuberoll_api import plugins
from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import EngineInfo
from kuberoll_workers.policy.routing.discovery import Discovery, DnsDiscovery, EndpointDiscovery, StaticDiscovery
from kuberoll_workers.policy.routing.replica import ReplicaClient
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.telemetry import RoutingMetrics


class ExternalPolicy(ReplicaClient, Protocol):
    """The client of an endpoint that KubeRoll does not start."""

    async def wait_ready(
        self, seconds: float, *, interval: float = 0.25, trouble: Callable[[str], None] | None = None
    ) -> EngineInfo:
        """Wait until the endpoint can generate.

        Args:
            trouble: Called with the reason while it cannot.

        Raises:
            PolicyUnavailable: It was not ready in time; the message has the last reason.
            PolicyRefused: Waiting would not help: see `info`.
        """
        ...


def external_client(
    external: External,
    url: str,
    *,
    limit: int,
    token: str | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
    window: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> AbstractAsyncContextManager[ExternalPolicy]:
    """Create the client of an externally managed endpoint, an `ExternalClient`.

    Args:
        token: Used if the job names no variable with an API key.
        tokenizer, window: As in `ExternalClient`.
        environment: Environment variables, with the API key.

    Raises:
        ValueError: The variable of the API key is not set.
        MissingPlugin: No installed package has the client.
    """
    variable = external.api_key_variable
    key = token if variable is None else environment.get(variable)
    if variable is not None and not key:
        raise ValueError(
            f"spec.generation.external.apiKeyVariable: {variable} is not set in this worker's environment: set it with "
            "spec.workers.env"
        )
    made: AbstractAsyncContextManager[ExternalPolicy] = plugins.load(plugins.POLICIES, "External")(
        url,
        api=external.api,
        model=external.model,
        api_key=key,
        limit=limit,
        tokenizer=tokenizer,
        window=window,
    )
    return made


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
