"""Where an environment runs: on this process's event loop, in a thread, in child processes, or on servers."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kuberoll_api import plugins
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.inline import InlineExecutor
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.loop_thread import LoopExecutor
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec

EnvironmentFactory = Callable[[], Any]

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

MAX_ABANDONED_THREADS = 16
"""Limit of the threads that hang at a time: threads cannot be killed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers of an environment with isolation Remote.

    Attributes:
        urls: Base URLs of the servers.
        token: Bearer token of the servers; None: none.
        scope: Prefix of the names of stateful episodes, where other runs use the same servers.
    """

    urls: Sequence[str]
    token: str | None = None
    scope: str = ""


class RemoteEnvironment(EnvironmentInterface):
    """An environment on servers, for checks, rows and metrics.

    Attributes:
        hooks: Hooks of the environment.
        digest: Digest of its code; None: unknown.
    """

    hooks: Hooks
    digest: str | None


class RemoteIsolation(Protocol):
    """Environments on servers, `Remote` of the entry points `kuberoll.isolations`."""

    def executor(
        self,
        spec: PlainSpec,
        *,
        processes: int,
        timeout: float,
        spare: int,
        access: ProcessAccess,
        servers: Servers | None,
    ) -> Executor:
        """Create the executor of an environment; the arguments are those of `make_executor`."""
        ...

    def environment(self, name: str, servers: Servers, *, patience: float) -> RemoteEnvironment:
        """Ask servers for an environment.

        Args:
            patience: Time to wait until one of them answers, in seconds.

        Raises:
            UnusableEnvironment: None answers, or the environment cannot be created there.
        """
        ...

    def serve(self, channel: socket.socket) -> None:
        """Serve an environment in a child process of a worker, which says over the channel what to serve."""
        ...


def make_executor(
    factory: EnvironmentFactory,
    *,
    isolation: str,
    processes: int,
    timeout: float,
    spare: int = 0,
    access: ProcessAccess | None = None,
    servers: Servers | None = None,
) -> Executor:
    """Create the executor of an environment.

    Args:
        factory: Creates the environment; a `registry.PlainSpec` for isolation Process and Remote.
        isolation: `Inline`, `Process` or `Remote`.
        processes: Maximum number of child processes, with `Process`, and of a server that is a child process.
        timeout: Time limit of one step, in seconds.
        spare: Maximum number of further child processes while steps take unusually long.
        access: Files and variables of child processes; None for the defaults.
        servers: With `Remote`, the servers; None: one is started, as a child process.
    """
    if isolation == "Remote":
        if not isinstance(factory, PlainSpec):
            raise TypeError("isolation Remote: the environment must be given as a registry.PlainSpec")
        return remote_isolation().executor(
            factory,
            processes=processes,
            timeout=timeout,
            spare=spare,
            access=access or ProcessAccess(),
            servers=servers,
        )
    if isolation == "Process":
        if not isinstance(factory, PlainSpec):
            raise TypeError("isolation Process: the environment must be given as a registry.PlainSpec")
        return ProcessExecutor(factory, processes=processes, timeout=timeout, spare=spare, access=access)
    environment = factory()
    if inspect.iscoroutinefunction(environment.step):
        return LoopExecutor(factory, environment, timeout=timeout)
    return InlineExecutor(environment, timeout=timeout, make=factory)


def remote_isolation() -> RemoteIsolation:
    """Load isolation Remote.

    Raises:
        MissingPlugin: No installed package has it.
    """
    found: RemoteIsolation = plugins.load(plugins.ISOLATIONS, "Remote")
    return found
