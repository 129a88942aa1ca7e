"""Pods as a kubelet has containerd run them: images, users, cgroups, namespaces and profiles are the runtime's own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.cluster.runtime import End, StartError
from tests.cluster.volumes import Find, NotYet, expand
from tests.containers import name_server
from tests.containers.containerd import Containerd, Cri, cri
from tests.containers.mounts import PodVolumes
from tests.containers.spec import Refused, container_config, pod_config

Object = dict[str, Any]

# One line of a log as runtimes write it: time, stream, whole or part of a line, and what was written.
_LINE = re.compile(rb"^\S+ (?:stdout|stderr) ([FP]) (.*)$", re.MULTILINE)
_FORCED_SECONDS = 30.0


def written(log: bytes) -> bytes:
    """What a container wrote, of the log that the runtime made of it."""
    return b"".join(text + (b"\n" if kind == b"F" else b"") for kind, text in _LINE.findall(log))


class ContainerRuntime:
    """Pods of one containerd.

    Args:
        containerd: What runs them.
        logs: Directory of the containers' logs.
        environment: Variables of every container.
        folders: Directories of this machine that every container sees, by where it sees them.
    """

    port_offset = 0

    def __init__(
        self,
        containerd: Containerd,
        logs: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        self.containerd, self.logs = containerd, logs
        self.environment, self.folders = dict(environment or {}), dict(folders or {})
        self.address = containerd.gateway
        self._cri: Cri | None = None
        self._names: asyncio.DatagramTransport | None = None

    @property
    def cri(self) -> Cri:
        """The service of containerd; between `start` and `close`."""
        assert self._cri is not None, "the runtime was not started"
        return self._cri

    async def start(self, resolve: Callable[[str], str], lookup: Callable[[str], list[str] | None]) -> None:
        self._cri = Cri(self.containerd.socket)
        await self._cri.wait_ready()
        self._names = await name_server.serve(self.listen(self.containerd.name_server, 53, socket.SOCK_DGRAM), lookup)

    def pod(self, pod: Object, root: Path, claims: Path) -> ContainerPod:
        return ContainerPod(self, pod, root, claims)

    def service_address(self, number: int) -> str:
        services = self.containerd.services
        return str(services[1 + number % (services.num_addresses - 2)])

    def listen(self, address: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        return self.containerd.socket_of(address, port, kind)

    def text(self, log: Path) -> str:
        return written(log.read_bytes()).decode(errors="replace")

    async def close(self) -> None:
        if self._names is not None:
            self._names.close()
        if self._cri is not None:
            await self._cri.close()


@dataclass(slots=True)
class ContainerPod:
    """One pod's namespaces, volumes and containers."""

    runtime: ContainerRuntime
    pod: Object
    root: Path
    claims: Path
    address: str = ""
    _id: str = ""
    _config: Any = None
    _volumes: PodVolumes | None = None
    _executions: dict[str, ContainerExecution] = field(default_factory=dict)

    async def open(self) -> None:
        self.runtime.logs.mkdir(exist_ok=True)
        self._config = pod_config(self.pod, logs=self.runtime.logs, dns=self.runtime.containerd.name_server)
        self._id, self.address = await self.runtime.cri.run_pod(self._config)

    async def has_image(self, name: str) -> bool:
        return await self.runtime.cri.image(name) is not None

    async def make_volumes(self, find: Find) -> None:
        if self._volumes is None:
            self._volumes = PodVolumes(self.pod, self.root, self.claims, self.address)
        await self._volumes.make(find)

    def update(self, pod: Object) -> None:
        # What its volumes show of it stays as it was.
        self.pod = pod

    async def launch(self, container: Object, variables: Mapping[str, str], attempt: int) -> ContainerLaunch:
        assert self._volumes is not None
        image = await self.runtime.cri.image(container["image"])
        name, metadata = container["name"], self.pod["metadata"]
        termination_log = self.root / f"{name}-{attempt}.termination"
        log = f"{metadata['namespace']}_{metadata['name']}_{name}_{attempt}.log"
        words = [[expand(word, variables) for word in container.get(part, ())] for part in ("command", "args")]
        mounts = self._volumes.mounts(container, termination_log)
        for path, folder in self.runtime.folders.items():
            mounts.append(cri.Mount(container_path=path, host_path=str(folder), readonly=True))
        try:
            config = container_config(
                self.pod,
                container,
                image=image,
                command=words[0],
                args=words[1],
                environment={**self.runtime.environment, **variables},
                mounts=mounts,
                log=log,
                attempt=attempt,
            )
        except Refused as error:
            raise NotYet(str(error)) from error
        return ContainerLaunch(self, name, config, termination_log, self.runtime.logs / log)

    def is_running(self, container: str) -> bool:
        found = self._executions.get(container)
        return found is not None and not found.ended

    async def close(self) -> None:
        if self._id:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.runtime.cri.remove_pod(self._id)
            for execution in self._executions.values():
                execution.ended = True
        if self._volumes is not None:
            await asyncio.to_thread(self._volumes.clean_up)

    async def execute(self, container: str, command: Sequence[str], seconds: float = 30.0) -> tuple[int, str]:
        """Runs a command in a container, as `kubectl exec` does; its exit code and output."""
        return await self.runtime.cri.execute(self._executions[container].id, list(command), seconds)

    async def create(self, name: str, config: Any) -> ContainerExecution:
        """Makes and starts a container; what was there of it before is removed."""
        service = self.runtime.cri
        if (before := self._executions.pop(name, None)) is not None:
            await service.remove(before.id)
        identity = ""
        try:
            identity = await service.create(self._id, config, self._config)
            await service.start(identity)
        except grpc.aio.AioRpcError as error:
            if identity:
                await service.remove(identity)
            raise StartError(str(error.details())) from error
        made = self._executions[name] = ContainerExecution(service, identity)
        return made


@dataclass(slots=True)
class ContainerLaunch:
    """A container that is configured."""

    pod: ContainerPod
    name: str
    config: Any
    termination_log: Path
    log: Path

    async def start(self) -> ContainerExecution:
        return await self.pod.create(self.name, self.config)

    def log_tail(self, size: int) -> bytes:
        return written(self.log.read_bytes())[-size:] if self.log.exists() else b""


@dataclass(slots=True)
class ContainerExecution:
    """A container in the runtime."""

    service: Cri
    id: str
    ended: bool = False

    async def wait(self) -> End:
        try:
            found = await self.service.wait(self.id)
        except grpc.aio.AioRpcError as error:
            # Its pod was removed meanwhile.
            self.ended = True
            return End(137, "ContainerStatusUnknown", str(error.details()))
        self.ended = True
        return End(found.exit_code, found.reason, found.message)

    async def stop(self, grace: float) -> None:
        await self.service.stop(self.id, grace)

    async def kill(self) -> None:
        async with asyncio.timeout(_FORCED_SECONDS):
            await self.service.stop(self.id, 0)

    async def execute(self, command: Sequence[str], seconds: float) -> int:
        code, _ = await self.service.execute(self.id, list(command), seconds)
        return code

    async def exec_url(self, command: Sequence[str]) -> str:
        """The address at which a WebSocket runs another command in it."""
        return await self.service.exec_url(self.id, list(command))
