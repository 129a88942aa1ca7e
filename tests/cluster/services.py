"""What kube-proxy and the cluster's DNS do: an address of its own for every Service, forwarded to its ready pods."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tests.cluster.runtime import Runtime

Object = dict[str, Any]

_NAME = re.compile(
    r"\b(?P<service>[a-z][-a-z0-9]*)\.(?P<namespace>[a-z0-9][-a-z0-9]*)\.svc(?:\.cluster\.local)?\b(?::(?P<port>\d+))?"
)


def is_ready(pod: Object) -> bool:
    """Whether a pod takes requests."""
    conditions = pod.get("status", {}).get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        item["type"] == "Ready" and item["status"] == "True" for item in conditions
    )


def selects(service: Object, pod: Object) -> bool:
    """Whether a pod is behind a Service."""
    selector: Mapping[str, str] = service["spec"].get("selector") or {}
    labels = pod["metadata"].get("labels", {})
    same = pod["metadata"]["namespace"] == service["metadata"]["namespace"]
    return bool(selector) and same and all(labels.get(name) == value for name, value in selector.items())


def target_port(port: Object, pod: Object) -> int | None:
    """The number of the pod's port that a port of a Service leads to."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for named in container.get("ports", ()):
            if named.get("name") == target:
                return int(named["containerPort"])
    return None


class Services:
    """Listeners for Services.

    Args:
        runtime: Has addresses for Services.
        pods: All pods, as last seen.
        direct: Whether their names stand for the addresses of ready pods, as those of headless ones do. Connections
            then come from who makes them, which NetworkPolicies tell apart, and ports are the pods'.
    """

    def __init__(self, runtime: Runtime, pods: Callable[[], list[Object]], *, direct: bool = False) -> None:
        self._runtime, self._pods, self._direct = runtime, pods, direct
        self._services: dict[tuple[str, str], Object] = {}
        self._listeners: dict[tuple[str, str], list[asyncio.Server]] = {}
        self._connections: set[asyncio.Task[None]] = set()

    def address(self, namespace: str, name: str) -> str:
        """The same for the same name, so that a Service that is made again is where it was."""
        number = int.from_bytes(hashlib.sha256(f"{namespace}/{name}".encode()).digest()[:4], "big")
        return self._runtime.service_address(number)

    def resolve(self, text: str) -> str:
        """The text with names of Services, and their ports, replaced; a headless one by a pod of it if there is one."""

        def address(match: re.Match[str]) -> str:
            service = self._services.get((match["namespace"], match["service"]))
            if service is not None and service["spec"].get("clusterIP") == "None":
                pods = [pod for pod in self._pods() if selects(service, pod) and pod.get("status", {}).get("podIP")]
                pods.sort(key=is_ready, reverse=True)
                port = f":{match['port']}" if match["port"] else ""
                return pods[0]["status"]["podIP"] + port if pods else match[0]
            port = f":{int(match['port']) + self._runtime.port_offset}" if match["port"] else ""
            return self.address(match["namespace"], match["service"]) + port

        return _NAME.sub(address, text)

    def lookup(self, name: str) -> list[str] | None:
        """What the cluster's DNS says of `<service>.<namespace>.svc`; None: there is no such Service."""
        parts = name.split(".")
        service = self._services.get((parts[1], parts[0])) if len(parts) == 3 and parts[2] == "svc" else None
        if service is None:
            return None
        if service["spec"].get("clusterIP") != "None" and not self._direct:
            return [self.address(parts[1], parts[0])]
        early = service["spec"].get("publishNotReadyAddresses", False)
        found = [pod for pod in self._pods() if selects(service, pod) and (early or is_ready(pod))]
        return [pod["status"]["podIP"] for pod in found if pod.get("status", {}).get("podIP")]

    async def changed(self, service: Object) -> None:
        """A Service was made or changed."""
        key = (service["metadata"]["namespace"], service["metadata"]["name"])
        before = self._services.get(key)
        self._services[key] = service
        if service["spec"].get("clusterIP") == "None" or not service["spec"].get("selector"):
            return
        if before is not None and before["spec"].get("ports") == service["spec"].get("ports"):
            return
        await self._close(key)
        self._listeners[key] = [
            await self._listen(key, port)
            for port in service["spec"].get("ports", ())
            if port.get("protocol", "TCP") == "TCP"
        ]

    async def removed(self, namespace: str, name: str) -> None:
        """A Service is no more."""
        self._services.pop((namespace, name), None)
        await self._close((namespace, name))

    async def keep(self, keys: set[tuple[str, str]]) -> None:
        """Only these are left."""
        for key in set(self._services) - keys:
            await self.removed(*key)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        await self.keep(set())
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _close(self, key: tuple[str, str]) -> None:
        for server in self._listeners.pop(key, ()):
            server.close()

    async def _listen(self, key: tuple[str, str], port: Object) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                await self._forward(key, port, reader, writer)
            except asyncio.CancelledError:
                pass
            finally:
                self._connections.discard(task)

        bound = self._runtime.listen(self.address(*key), port["port"] + self._runtime.port_offset)
        return await asyncio.start_server(accept, sock=bound)

    async def _forward(
        self, key: tuple[str, str], port: Object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        service = self._services.get(key)
        pods = [pod for pod in self._pods() if service and selects(service, pod) and is_ready(pod)]
        number = target_port(port, random.choice(pods)) if pods else None
        if number is None:
            _reset(writer)
            return
        try:
            back, forth = await asyncio.open_connection(random.choice(pods)["status"]["podIP"], number)
        except OSError:
            _reset(writer)
            return
        try:
            await asyncio.gather(copy_stream(reader, forth), copy_stream(back, writer))
        finally:
            forth.close()
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    # What a client sees that kube-proxy has no endpoint for.
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes on what comes until its end."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        # TLS has no half that could be closed.
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()
