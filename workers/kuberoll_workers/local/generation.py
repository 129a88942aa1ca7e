"""Sources of generation for a run on this machine: its own engine host, another one's endpoint, or a simulation."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from kuberoll_api.contract import SCOPES, ServeArgs, weights_source
from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.shards import share
from kuberoll_workers.local import engines
from kuberoll_workers.local.engines import ServedEngine
from kuberoll_workers.local.preflight import JobRefused, ModelSource
from kuberoll_workers.local.processes import Child, see_log
from kuberoll_workers.local.reporter import Reporter
from kuberoll_workers.policy.auth import Tokens
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.host_config import START_PHASES, HostConfig, requested_gpus

HOST_PATIENCE_SECONDS = 20.0
REFRESH_SECONDS = 0.25
TOKEN_VARIABLE = "KUBEROLL_TOKEN"
"""Environment variable with the token for an endpoint of another user or machine."""


_Result = TypeVar("_Result")


class RunFailed(Exception):
    """A part that the run needs has failed; the message names it and its log."""


class Engine(Protocol):
    """An engine whose end can be seen from this process."""

    async def ended(self) -> str:
        """Wait until it ends; return the message for the user."""
        ...


class FirstEnd:
    """Several engines as one, which ends when the first of them does."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """
        Args:
            engines: At least one.
        """
        self._engines = engines

    async def ended(self) -> str:
        """Wait until one ends; return its message for the user."""
        ends = [asyncio.ensure_future(engine.ended()) for engine in self._engines]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)


async def while_serving(engine: Engine | None, work: Awaitable[_Result]) -> _Result:
    """Await `work`, which needs the engine; it is cancelled if the engine ends first.

    Args:
        engine: None: nothing is known about its end.

    Raises:
        RunFailed: The engine ended first.
    """
    working = asyncio.ensure_future(work)
    end = asyncio.ensure_future(engine.ended()) if engine is not None else asyncio.get_running_loop().create_future()
    try:
        await asyncio.wait({working, end}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RunFailed(end.result())
        return working.result()
    finally:
        working.cancel()
        end.cancel()
        # Their results have been read or no longer matter.
        await asyncio.gather(working, end, return_exceptions=True)


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


class StartClock:
    """Shows the phase of the start in progress, with its time, on the terminal."""

    def __init__(self, reporter: Reporter, seconds: dict[str, float]) -> None:
        """
        Args:
            seconds: Gets the time of each finished phase.
        """
        self._reporter = reporter
        self._seconds = seconds
        self._name = ""
        self._began = 0.0

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self._name, self._began = name, time.perf_counter()

    def finish(self, name: str, seconds: float) -> None:
        """Report the end of a phase."""
        self._seconds[name] = seconds
        self._reporter.phase(name, seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.perf_counter() - self._began

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Show the time of the phase while the context lasts."""
        ticks = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticks.cancel()

    async def _tick(self) -> None:
        while True:
            if self._name:
                self._reporter.starting(self._name, self.elapsed)
            await asyncio.sleep(REFRESH_SECONDS)


class EngineHost:
    """The process with the engine of a job, under a Ray of its own."""

    def __init__(self, child: Child, tokens: Tokens) -> None:
        self._child = child
        self.tokens = tokens

    @classmethod
    async def start(
        cls,
        job: RolloutJob,
        args: ServeArgs,
        *,
        scratch: Path,
        log: Path,
        environment: Mapping[str, str],
        drains: bool,
        port: int = 0,
    ) -> EngineHost:
        """Start the process; it is not ready yet.

        Args:
            args: See `serve_args`.
            scratch: The run's scratch directory.
            environment: Additional environment variables.
            drains: See `HostConfig`.
            port: Port to serve at; 0: any free one.
        """
        generation = job.spec.generation
        # Other users of this machine must not be able to generate.
        tokens = msgspec.convert({scope: secrets.token_hex(32) for scope in SCOPES}, Tokens)
        config = HostConfig(
            app=args, scratch=str(scratch), routing=generation.routing, port=port, tokens=tokens, drains=drains
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

    async def ready(self, clock: StartClock, *, deadline: float) -> PolicyEndpoint:
        """Wait until it can generate.

        Args:
            deadline: Maximum time to wait, seconds.

        Raises:
            RunFailed: It has failed or ended, or was not ready in time.
        """
        try:
            async with asyncio.timeout(deadline), clock.ticking():
                return await self._ready(clock)
        except TimeoutError as error:
            raise RunFailed(
                f"generation was not ready within spec.startupDeadlineSeconds ({deadline:g} s); see {self._child.log}"
            ) from error

    async def _ready(self, clock: StartClock) -> PolicyEndpoint:
        child = self._child
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
        raise RunFailed(await self.ended("before it was ready"))

    async def ended(self, when: str = "unexpectedly") -> str:
        """Wait until the process ends; return the message for the user."""
        code = await self._child.wait()
        return f"generation ended {when} (exit code {code}); {see_log(self._child.log)}"

    def terminate(self) -> None:
        """Begin to end it."""
        self._child.signal(signal.SIGTERM)

    async def stop(self, patience: float) -> None:
        """End it; kill it after `patience` seconds."""
        await self._child.stop(patience)


def serve_args(job: RolloutJob, source: ModelSource) -> ServeArgs:
    """Arguments of the Serve application on this machine."""
    generation = job.spec.generation
    return ServeArgs.of(
        generation,
        model=source.model,
        tokenizer=source.tokenizer,
        revision=source.revision or generation.model.revision,
        tokenizer_revision=source.tokenizer_revision,
        gpus=requested_gpus(generation),
        weights=weights_source(job.spec.weights),
    )


class KeptEngine:
    """An engine that `kuberoll serve` keeps on this machine."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served

    @property
    def description(self) -> str:
        """Text for the user."""
        return f"{self._served.url} (kuberoll serve, process {self._served.pid})"

    @property
    def tokens(self) -> Tokens:
        """For each scope."""
        return self._served.tokens

    async def ended(self) -> str:
        """Wait until it ends; return the message for the user."""
        await engines.ended(self._served)
        return f"the engine at {self.description} has ended; {see_log(Path(self._served.log))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """An engine of `kuberoll serve` that a run uses.

    Attributes:
        token: For generation; None: none is known.
        engine: The engine, if it is one of this user's on this machine; else None.
    """

    url: str
    token: str | None
    engine: KeptEngine | None = None

    @property
    def description(self) -> str:
        """Text for the user."""
        return self.url if self.engine is None else self.engine.description


def served_endpoint(job: RolloutJob, args: ServeArgs, endpoint: str | None) -> ServedEndpoint | None:
    """Find the served engine that a run shall use; None: none.

    Args:
        endpoint: Its URL; `none` for none; None for the one that serves a job of this name, if there is one.

    Raises:
        JobRefused: It cannot be used for this job; the message says how to mend it.
    """
    if job.spec.generation.external is not None:
        if endpoint not in (None, "none"):
            raise JobRefused("--endpoint: spec.generation.external.url names the endpoint already: remove one of them")
        return None
    if endpoint == "none":
        return None
    name = job.metadata.name
    engine = engines.find(name) if endpoint is None else engines.find_by_url(endpoint)
    if engine is None:
        if endpoint is None and engines.is_claimed(name):
            raise JobRefused(
                f"kuberoll serve has an engine for the job {name!r} that is starting, or ending: run again when it "
                "says where it serves or has ended, or start an engine of this run's own with --endpoint none"
            )
        if endpoint is None:
            return None
        url = endpoint.rstrip("/").removesuffix("/v1")
        return ServedEndpoint(url=url, token=os.environ.get(TOKEN_VARIABLE))
    if changed := engines.differences(engine, args):
        lines = "\n  ".join(changed)
        raise JobRefused(
            f"kuberoll serve (process {engine.pid}) has another engine for the job {engine.name!r}:\n  {lines}\n"
            "End it, or start an engine of this run's own with --endpoint none"
        )
    return ServedEndpoint(url=engine.url, token=engine.tokens.generate, engine=KeptEngine(engine))


async def served_ready(
    served: ServedEndpoint,
    *,
    version: str | None,
    deadline: float,
    trouble: Callable[[str], None],
    commit: str | None = None,
) -> PolicyEndpoint:
    """Wait until a served engine can generate.

    Args:
        version: Of the weights that the job wants; None: whatever it serves.
        deadline: Maximum time to wait, seconds.
        trouble: Called with the reason while it is not ready.
        commit: Of the job's model at the hub; None: it has none.

    Raises:
        RunFailed: It was not ready in time, or serves another model or other weights.
    """
    from kuberoll_workers.policy.client import ServeClient, check_commit

    try:
        async with ServeClient(served.url, limit=1, token=served.token) as client:
            info = await client.wait_ready(deadline, trouble=trouble)
        check_commit(served.url, info.commit, commit)
    except (PolicyUnavailable, PolicyRefused) as error:
        raise RunFailed(f"--endpoint {error}") from error
    if version is not None and info.policy_version != version:
        raise RunFailed(
            f"{served.url} serves the weights {info.policy_version!r}, and spec.weights.version is {version!r}: "
            "POST them to /v1/weights there, or change the manifest"
        )
    return PolicyEndpoint(url=served.url, max_model_len=info.max_model_len, token=served.token)


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
