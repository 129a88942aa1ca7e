"""Where an environment runs: on this process's event loop, in a thread, in child processes, or on servers."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kuberoll_api.model.environments import AGENT_TYPE
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.inline import InlineExecutor
from kuberoll_workers.environments.loop_thread import LoopExecutor
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.sandbox import Sandbox

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


def make_executor(
    factory: EnvironmentFactory,
    *,
    isolation: str,
    processes: int,
    timeout: float,
    spare: int = 0,
    sandbox: Sandbox | None = None,
    servers: Servers | None = None,
) -> Executor:
    """Create the executor of an environment.

    Args:
        factory: Creates the environment; a `registry.PlainSpec` for isolation Process and Remote.
        isolation: `Inline`, `Process` or `Remote`.
        processes: Maximum number of child processes, with `Process`, and of a server that is a child process.
        timeout: Time limit of one step, in seconds.
        spare: Maximum number of further child processes while steps take unusually long.
        sandbox: Files and variables of child processes; None for the defaults.
        servers: With `Remote`, the servers; None: one is started, as a child process.
    """
    if isolation == "Remote":
        if not isinstance(factory, PlainSpec):
            raise TypeError("isolation Remote: the environment must be given as a registry.PlainSpec")
        return _remote_executor(factory, processes, timeout, spare, sandbox or Sandbox(), servers)
    if isolation == "Process":
        if not isinstance(factory, PlainSpec):
            raise TypeError("isolation Process: the environment must be given as a registry.PlainSpec")
        return ProcessExecutor(factory, processes=processes, timeout=timeout, spare=spare, sandbox=sandbox)
    environment = factory()
    if inspect.iscoroutinefunction(environment.step):
        return LoopExecutor(factory, environment, timeout=timeout)
    return InlineExecutor(environment, timeout=timeout, make=factory)


def _remote_executor(
    spec: PlainSpec, processes: int, timeout: float, spare: int, sandbox: Sandbox, servers: Servers | None
) -> Executor:
    # An HTTP client is a large part of what a worker imports, and other isolations need none.
    from kuberoll_workers.environments.remote.addresses import UrlAddresses
    from kuberoll_workers.environments.remote.child_server import ChildServer
    from kuberoll_workers.environments.remote.executor import RemoteExecutor

    repeats = spec.type != AGENT_TYPE
    if servers is not None:
        urls, token, scope = UrlAddresses(servers.urls), servers.token, servers.scope
        return RemoteExecutor(urls, name=spec.name, timeout=timeout, token=token, scope=scope, repeats=repeats)
    settings = {
        "spec": dataclasses.asdict(spec),
        "sandbox": dataclasses.asdict(sandbox),
        "processes": processes,
        "spare": spare,
        "timeout": timeout,
    }
    child = ChildServer(settings, sandbox)
    return RemoteExecutor(child, name=spec.name, timeout=timeout, token=child.token, owned=True, repeats=repeats)
