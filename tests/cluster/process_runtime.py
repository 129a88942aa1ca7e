"""Containers as processes of this machine, without images, namespaces and cgroups.

A container's command runs as it is, `python` being the one that runs the tests. A pod has an address of 127.0.0.0/8 and
must listen on that one (it is in `status.podIP`); volumes are directories, and their mount paths and the names of
Services are replaced in commands, variables and ConfigMaps. The termination message is what is in the file that
KUBEROLL_TERMINATION_LOG names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.processes import CONTAINER_VARIABLE, end_marked, marked
from tests.cluster.runtime import End, StartError
from tests.cluster.volumes import Find, NotYet, PodFiles, expand

Object = dict[str, Any]

KUBELET_PORT = 10250
MISSING_IMAGE = "missing/"
TERMINATION_LOG_VARIABLE = "KUBEROLL_TERMINATION_LOG"
_INHERITED = ("LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE")


class ProcessRuntime:
    """Pods of a network of their own in 127.0.0.0/8.

    Args:
        environment: Variables of every container.
        logs: Directory of the containers' logs.
    """

    # A pod may listen at all addresses, which here are the machine's.
    port_offset = 20000

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self.environment, self.logs = dict(environment), logs
        self._resolve: Callable[[str], str] = str
        self._lock, self._network = _own_network()
        self.address = f"127.{self._network}.0.1"
        self._addresses = 0

    async def start(self, resolve: Callable[[str], str], lookup: Callable[[str], list[str] | None]) -> None:
        self._resolve = resolve

    def pod(self, pod: Object, root: Path, claims: Path) -> ProcessPod:
        self._addresses += 1
        address = f"127.{self._network}.{1 + self._addresses // 250 % 127}.{1 + self._addresses % 250}"
        return ProcessPod(self, pod, address, PodFiles(root, claims, self._resolve))

    def service_address(self, number: int) -> str:
        return f"127.{self._network}.{128 + number % 127}.{1 + number // 127 % 254}"

    def listen(self, address: str, port: int) -> socket.socket:
        return socket.create_server((address, port))

    def text(self, log: Path) -> str:
        return log.read_text(errors="replace")

    async def close(self) -> None:
        self._lock.close()


@dataclass(slots=True)
class ProcessPod:
    """One pod's processes."""

    runtime: ProcessRuntime
    pod: Object
    address: str
    files: PodFiles
    _markers: dict[str, str] = field(default_factory=dict)

    async def open(self) -> None:
        pass

    async def has_image(self, name: str) -> bool:
        return not name.startswith(MISSING_IMAGE)

    async def make_volumes(self, find: Find) -> None:
        await self.files.make(self.pod, find)
        spec = self.pod["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            self.files.fill(self.pod, container)
        self.files.filled()

    def update(self, pod: Object) -> None:
        self.pod = pod
        if self.files.volumes:
            self.files.show(pod)

    async def launch(self, container: Object, variables: Mapping[str, str], attempt: int) -> ProcessLaunch:
        name, pod = container["name"], self.pod["metadata"]
        marker = self._markers.setdefault(name, f"{pod['uid']}/{name}")
        termination_log = self.files.root / f"{name}.termination"
        temporary = self.files.temporary(container)
        environment = {
            **{name: os.environ[name] for name in _INHERITED if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(temporary),
            "TMPDIR": str(temporary),
            "HOSTNAME": pod["name"],
            **self.runtime.environment,
            **{key: self.files.translate(value, container) for key, value in variables.items()},
            TERMINATION_LOG_VARIABLE: str(termination_log),
            CONTAINER_VARIABLE: marker,
        }
        words = [*container.get("command", ()), *container.get("args", ())]
        command = [self.files.translate(expand(word, variables), container) for word in words]
        if not command:
            raise NotYet(f"processes have no images; container {name} needs a command")
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        given = container.get("workingDir")
        directory = Path(self.files.translate(given, container)) if given else temporary
        self.runtime.logs.mkdir(exist_ok=True)
        log = self.runtime.logs / f"{pod['namespace']}_{pod['name']}_{name}.log"
        return ProcessLaunch(command, environment, directory, termination_log, log, marker)

    def is_running(self, container: str) -> bool:
        return container in self._markers and any(True for _ in marked(self._markers[container]))

    async def close(self) -> None:
        for marker in self._markers.values():
            await end_marked(marker)


@dataclass(slots=True)
class ProcessLaunch:
    """How a container's process is started."""

    command: list[str]
    environment: Mapping[str, str]
    directory: Path
    termination_log: Path
    log: Path
    marker: str

    async def start(self) -> ProcessExecution:
        self.termination_log.write_bytes(b"")
        with self.log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    env=self.environment,
                    cwd=self.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"failed to start container process: {error}") from error
        return ProcessExecution(process, self)

    def log_tail(self, size: int) -> bytes:
        return self.log.read_bytes()[-size:]


@dataclass(slots=True)
class ProcessExecution:
    """A container's first process, and what carries its marker."""

    process: asyncio.subprocess.Process
    how: ProcessLaunch

    async def wait(self) -> End:
        code = await self.process.wait()
        # The first process of a container takes the others with it.
        await end_marked(self.how.marker)
        code = code if code >= 0 else 128 - code
        return End(code, "Completed" if code == 0 else "Error")

    async def stop(self, grace: float) -> None:
        # To the first process only, as a kubelet does.
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace, self._signal, signal.SIGKILL)

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await end_marked(self.how.marker)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def execute(self, command: Sequence[str], seconds: float) -> int:
        other = await asyncio.create_subprocess_exec(*command, env=self.how.environment, cwd=self.how.directory)
        try:
            return await asyncio.wait_for(other.wait(), seconds)
        except TimeoutError:
            other.kill()
            await other.wait()
            return 124


def _own_network() -> tuple[socket.socket, int]:
    """The second number of this kubelet's addresses, and the socket that keeps others from it."""
    for number in range(1 + os.getpid() % 100, 250):
        lock = socket.socket()
        try:
            lock.bind((f"127.{number}.0.1", KUBELET_PORT))
            lock.listen()
        except OSError:
            lock.close()
            continue
        return lock, number
    raise RuntimeError("no free network in 127.0.0.0/8: are test kubelets left over?")
