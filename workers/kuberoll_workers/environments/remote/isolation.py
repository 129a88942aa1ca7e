"""Isolation Remote: environments on servers, of this worker's own or elsewhere."""

from __future__ import annotations

import dataclasses
import socket

from kuberoll_api.environment_types import AGENT_TYPE
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.isolation import RemoteEnvironment, Servers
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec


class ServerIsolation:
    """See `isolation.RemoteIsolation`. Imports what one of its methods needs: each is called in another process."""

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
        """See `isolation.RemoteIsolation`."""
        from kuberoll_workers.environments.remote.addresses import UrlAddresses
        from kuberoll_workers.environments.remote.child_server import ChildServer
        from kuberoll_workers.environments.remote.executor import RemoteExecutor

        repeats = spec.type != AGENT_TYPE
        if servers is not None:
            urls, token, scope = UrlAddresses(servers.urls), servers.token, servers.scope
            return RemoteExecutor(urls, name=spec.name, timeout=timeout, token=token, scope=scope, repeats=repeats)
        settings = {
            "spec": dataclasses.asdict(spec),
            "access": dataclasses.asdict(access),
            "processes": processes,
            "spare": spare,
            "timeout": timeout,
        }
        child = ChildServer(settings, access)
        return RemoteExecutor(child, name=spec.name, timeout=timeout, token=child.token, owned=True, repeats=repeats)

    def environment(self, name: str, servers: Servers, *, patience: float) -> RemoteEnvironment:
        """See `isolation.RemoteIsolation`."""
        from kuberoll_workers.environments.remote.proxy import ServerProxy

        return ServerProxy(name, servers.urls, token=servers.token, patience=patience)

    def serve(self, channel: socket.socket) -> None:
        """See `isolation.RemoteIsolation`."""
        from kuberoll_workers.environments.remote.serving import serve_channel

        serve_channel(channel)


REMOTE = ServerIsolation()
