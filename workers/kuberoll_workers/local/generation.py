"""Sources of generation for a run on this machine: its own engine host, another one's endpoint, or a simulation."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kuberoll_api.contract import SCOPES, ServeArgs, weights_source
from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.shards import share
from kuberoll_workers.local.preflight import Preflight
from kuberoll_workers.local.processes import Child
from kuberoll_workers.policy.auth import Tokens
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.host_config import START_PHASES, HostConfig, requested_gpus

HOST_PATIENCE_SECONDS = 20.0


class RunFailed(Exception):
    """A part that the run needs has failed; the message names it and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEndpoint:
    """The place where workers generate.

    Attributes:
        url: Base URL; None: each worker simulates the engine itself.
        max_model_len: The context window, tokens.
        token: For generation; None: none is needed.
        metrics_port: Of the engine's metrics; None: unknown.
    """

    url: str | None
    max_model_len: int
    token: str | None = None
    metrics_port: int | None = None


@dataclass(slots=True)
class StartClock:
    """The phase of the start in progress, for the terminal.

    Attributes:
        seconds: Seconds that each finished phase took.
    """

    report: Callable[[str, float], None]
    seconds: dict[str, float]
    name: str = ""
    began: float = 0.0

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self.name, self.began = name, time.perf_counter()

    def finish(self, name: str, seconds: float) -> None:
        """Report the end of a phase."""
        self.seconds[name] = seconds
        self.report(name, seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.perf_counter() - self.began


class EngineHost:
    """The process with the engine of a job, under a Ray of its own."""

    def __init__(self, child: Child, tokens: Tokens) -> None:
        self.child = child
        self.tokens = tokens

    @classmethod
    async def start(
        cls,
        job: RolloutJob,
        preflight: Preflight,
        *,
        scratch: Path,
        log: Path,
        environment: Mapping[str, str],
        port: int = 0,
    ) -> EngineHost:
        """Start the process; it is not ready yet.

        Args:
            scratch: The run's scratch directory.
            environment: Additional environment variables.
            port: Port to serve at; 0: any free one.
        """
        generation = job.spec.generation
        # Other users of this machine must not be able to generate.
        tokens = msgspec.convert({scope: secrets.token_hex(32) for scope in SCOPES}, Tokens)
        config = HostConfig(
            app=serve_args(job, preflight), scratch=str(scratch), routing=generation.routing, port=port, tokens=tokens
        )
        path = write_secret(scratch / "generation.json", msgspec.json.encode(config))
        child = await Child.start(
            "kuberoll_workers.serving.host",
            ["--config", str(path)],
            log=log,
            # Sockets and files that the engine leaves in the temporary directory are removed with the run's.
            environment={**environment, "TMPDIR": str(scratch), **literal_variables(generation.env)},
        )
        return cls(child, tokens)

    async def ready(self, clock: StartClock) -> PolicyEndpoint:
        """Wait until it can generate.

        Raises:
            RunFailed: It has failed or ended.
        """
        child = self.child
        waiting = iter(START_PHASES)
        clock.begin(next(waiting))
        async for event in child.reports():
            if event["event"] == "phase":
                clock.finish(event["name"], event["seconds"])
                clock.begin(next(waiting, event["name"]))
            elif event["event"] == "ready":
                return PolicyEndpoint(
                    url=event["url"],
                    max_model_len=event["info"]["max_model_len"],
                    token=self.tokens.generate,
                    metrics_port=event["metrics_port"],
                )
            else:
                raise RunFailed(f"generation did not start: {event['message']}\nSee {child.log}")
        code = await child.wait()
        raise RunFailed(f"generation ended before it was ready (exit code {code}); see {child.log}\n{child.log_tail()}")


def serve_args(job: RolloutJob, preflight: Preflight) -> ServeArgs:
    """Arguments of the Serve application on this machine."""
    generation = job.spec.generation
    return ServeArgs.of(
        generation,
        model=preflight.model,
        tokenizer=preflight.tokenizer,
        gpus=requested_gpus(generation),
        weights=weights_source(job.spec.weights),
    )


def simulated_shares(args: ServeArgs, workers: int) -> list[ServeArgs]:
    """Arguments of the engine that each worker simulates: the places of all replicas, divided among the workers."""
    settings = args.simulated or {}
    places = int(settings["maxBatch"]) * args.replicas
    return [
        dataclasses.replace(
            args, simulated={**settings, "maxBatch": max(1, share(places, number, workers))}, replicas=1
        )
        for number in range(workers)
    ]


def simulated_endpoint(args: ServeArgs) -> PolicyEndpoint:
    """The endpoint of an engine that workers simulate.

    Raises:
        RunFailed: The model's configuration cannot be read.
    """
    try:
        return PolicyEndpoint(url=None, max_model_len=Simulated.of(args).info().max_model_len)
    except (OSError, ValueError) as error:
        raise RunFailed(f"spec.generation.model: {type(error).__name__}: {error}") from error


async def external_endpoint(
    external: External,
    *,
    window: int | None,
    deadline: float,
    environment: Mapping[str, str],
    trouble: Callable[[str], None],
) -> PolicyEndpoint:
    """Wait for an externally managed endpoint; others of the job may become ready later.

    Args:
        window: Context window in tokens, for endpoints that do not report it.
        deadline: Maximum time to wait, seconds.
        trouble: Called with the reason while it is not ready.

    Raises:
        RunFailed: It was not ready in time, or cannot be used; the message has the reason.
    """
    # With an HTTP client, which other sources do not need.
    from kuberoll_workers.policy.endpoints import external_client

    try:
        async with external_client(external, external.url, limit=1, window=window, environment=environment) as client:
            info = await client.wait_ready(deadline, trouble=trouble)
    except (PolicyUnavailable, PolicyRefused, ValueError) as error:
        raise RunFailed(f"spec.generation.external.url: {error}") from error
    return PolicyEndpoint(url=external.url, max_model_len=info.max_model_len)


def write_secret(path: Path, data: bytes) -> Path:
    """Write a file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return path


def literal_variables(env: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The environment variables of a container that have literal values; secrets exist only in the cluster."""
    return {str(item["name"]): str(item["value"]) for item in env if "name" in item and "value" in item}
