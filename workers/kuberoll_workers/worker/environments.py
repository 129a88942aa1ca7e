"""The environments of a worker's job: where they run, what they may see, and their policy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kuberoll_api import plugins
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.policy_access import POLICY_VARIABLES
from kuberoll_workers.environments import registry
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.isolation import (
    EnvironmentFactory,
    RemoteEnvironment,
    Servers,
    make_executor,
    remote_isolation,
)
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.processes import ProcessEnvironment
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.environments.served_models import ServedModel, service_variables
from kuberoll_workers.rollouts.player import PlayerFactory
from kuberoll_workers.telemetry import Meters, RolloutMetrics
from kuberoll_workers.worker.config import WorkerConfig

# Servers in a cluster are started together with the first pod that asks for them.
_START_PATIENCE = 300.0
_METRICS_PATIENCE = 30.0


def environment_factory(job: RolloutJob) -> Callable[[str], EnvironmentInterface]:
    """A function that creates the job's environments by name."""
    specs = {spec.name: spec for spec in job.spec.environments}
    return lambda name: environment_of(specs[name])


def environment_of(spec: Environment) -> EnvironmentInterface:
    """An environment for its own metrics, in this process; one on servers elsewhere computes them there.

    Raises:
        UnusableEnvironment: It cannot be created, or no server answers.
    """
    if is_elsewhere(spec):
        return _on_servers(spec, patience=_METRICS_PATIENCE)
    return registry.create(spec)


def is_elsewhere(spec: Environment) -> bool:
    """True if the environment is on servers that this process does not start."""
    return spec.remote is not None and bool(spec.remote.located)


def servers_of(spec: Environment, *, scope: str = "") -> Servers | None:
    """The servers of an environment that are elsewhere; None if there are none.

    Args:
        scope: As in `Servers`.
    """
    if spec.remote is None or not spec.remote.located:
        return None
    variable = spec.remote.api_key_variable
    return Servers(
        urls=spec.remote.located, token=None if variable is None else os.environ.get(variable) or None, scope=scope
    )


def _on_servers(spec: Environment, *, patience: float) -> RemoteEnvironment:
    servers = servers_of(spec)
    assert servers is not None
    return remote_isolation().environment(spec.name, servers, patience=patience)


def remote_digests(job: RolloutJob) -> dict[str, str | None]:
    """Digests of the code of environments that are on servers elsewhere, by name.

    Raises:
        UnusableEnvironment: No server of one answers.
    """
    return {
        spec.name: _on_servers(spec, patience=_METRICS_PATIENCE).digest
        for spec in job.spec.environments
        if is_elsewhere(spec)
    }


def isolated_environment_factory(job: RolloutJob, *, protected: Sequence[str]) -> Callable[[str], EnvironmentInterface]:
    """A function that gives the job's environments by name, to read their rows.

    Those with isolation Process, and with isolation Remote without a url, run in processes of their own: none of their
    code runs in this one. Others with isolation Remote are asked of their servers.

    Args:
        protected: As in `open_environments`.
    """
    specs = {spec.name: spec for spec in job.spec.environments}

    def make(name: str) -> EnvironmentInterface:
        spec = specs[name]
        if is_elsewhere(spec):
            return _on_servers(spec, patience=_START_PATIENCE)
        if spec.isolation != "Inline":
            return ProcessEnvironment(registry.PlainSpec.of(spec), process_access_of(spec, protected=protected))
        return registry.create(spec)

    return make


def check_environment(job: RolloutJob, name: str, *, protected: Sequence[str]) -> Hooks:
    """Check that an environment of a job can be created, where it will run; returns its hooks.

    Args:
        protected: As in `open_environments`.

    Raises:
        UnusableEnvironment: It cannot, or no server of it answers.
    """
    spec = next(spec for spec in job.spec.environments if spec.name == name)
    if is_elsewhere(spec):
        return _on_servers(spec, patience=_START_PATIENCE).hooks
    made = isolated_environment_factory(job, protected=protected)(name)
    return made.check() if isinstance(made, ProcessEnvironment) else Hooks.of(made)


def players_of(job: RolloutJob) -> dict[str, PlayerFactory]:
    """The players of the job's environments that are not played turn by turn, by name."""
    return {
        spec.name: plugins.load(plugins.PLAYERS, spec.player)(spec)
        for spec in job.spec.environments
        if spec.player is not None
    }


def environments_policy(config: WorkerConfig) -> ServedModel | None:
    """The policy's endpoint for the environments that use it; None: none does.

    Raises:
        UnusableEnvironment: The policy has no endpoint, or its API key is not set.
    """
    users = [spec.name for spec in config.job.spec.environments if spec.uses_policy]
    if not users:
        return None
    external = config.job.spec.generation.external
    url = config.endpoint or (None if external is None else external.url)
    if not url:
        raise UnusableEnvironment(
            f"environment {users[0]!r}: it uses the policy's endpoint, but this worker simulates the engine itself"
        )
    variable = None if external is None else external.api_key_variable
    return ServedModel(url=url, token=config.token if variable is None else os.environ.get(variable))


def process_access_of(spec: Environment, *, protected: Sequence[str]) -> ProcessAccess:
    """Access rights of the processes of an environment."""
    access = spec.access
    return ProcessAccess(
        protected=protected,
        readable=access.readable_paths,
        writable=access.writable_paths,
        variables=[
            *access.variables,
            *(POLICY_VARIABLES if spec.uses_policy else ()),
            *service_variables(spec.used_services),
        ],
    )


def local_paths(*places: str | None) -> list[str]:
    """The local directories among a run's locations, which environments must not see."""
    return [place.removeprefix("file://") for place in places if place and "://" not in place.removeprefix("file://")]


@asynccontextmanager
async def open_environments(
    job: RolloutJob, *, protected: Sequence[str] = (), output: str = "", metrics: RolloutMetrics | None = None
) -> AsyncIterator[dict[str, EnvironmentRunner]]:
    """Open the job's environments by name; they are closed at the end.

    Args:
        protected: Files and directories that processes of environments never reach.
        output: The run's directory or URI, to tell its episodes from those of other runs on the same servers.
        metrics: Where environments in this process publish what they count themselves; None: nowhere.
    """
    scope = hashlib.blake2b(f"{job.metadata.name}\n{output}".encode(), digest_size=6).hexdigest()
    async with AsyncExitStack() as stack:
        runners = {}
        for spec in job.spec.environments:
            plain = registry.PlainSpec.of(spec)
            factory: EnvironmentFactory = plain
            if spec.isolation == "Inline" and metrics is not None:
                factory = _metered(plain, metrics.environment(spec.name).meters.watch)
            executor = make_executor(
                factory,
                isolation=spec.isolation,
                processes=spec.processes,
                spare=spec.call_spares,
                timeout=spec.call_seconds,
                access=process_access_of(spec, protected=protected),
                servers=servers_of(spec, scope=scope),
            )
            runners[spec.name] = EnvironmentRunner(executor, max_batch=spec.call_size)
            stack.push_async_callback(runners[spec.name].close)
        yield runners


def _metered(factory: EnvironmentFactory, watch: Callable[[Meters], None]) -> EnvironmentFactory:
    """A function that creates the environment, and has what it counts itself published."""

    def make() -> Any:
        environment = factory()
        # Other people's environments may have something else of this name.
        if isinstance(meters := getattr(environment, "meters", None), Meters):
            watch(meters)
        return environment

    return make
