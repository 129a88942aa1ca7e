"""One container as a process of this machine: its states, its probes, its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from tests.cluster.processes import CONTAINER_VARIABLE, end_marked

Object = dict[str, Any]
MESSAGE_BYTES = 4096
LOG_MESSAGE_BYTES = 2048


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class Launch:
    """How a container's process is started."""

    command: list[str]
    environment: Mapping[str, str]
    directory: Path
    termination_log: Path
    log: Path


@dataclass(slots=True)
class Container:
    """A container's state as the pod's status shows it."""

    spec: Object
    address: str
    probe_seconds: float
    changed: Callable[[], Awaitable[None]]
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    started: bool = False
    ready: bool = False
    process: asyncio.subprocess.Process | None = None
    marker: str = ""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def exit_code(self) -> int | None:
        """Of a container that ended."""
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    def status(self) -> Object:
        """The entry of status.containerStatuses."""
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }

    async def run(self, launch: Launch) -> int:
        """Starts it and returns its exit code when it is at its end, with everything that it started."""
        began = now()
        launch.termination_log.write_bytes(b"")
        with launch.log.open("ab") as output:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *launch.command,
                    env={**launch.environment, CONTAINER_VARIABLE: self.marker},
                    cwd=launch.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                await self._ended(began, 128, "StartError", f"failed to start container process: {error}")
                return 128
        self.state = {"running": {"startedAt": began}}
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        await self.changed()
        probes = asyncio.create_task(self._probe())
        try:
            code = await self.process.wait()
        finally:
            probes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probes
            # The first process of a container takes the others with it.
            await end_marked(self.marker)
        code = code if code >= 0 else 128 - code
        message = _message(self.spec, launch, code)
        await self._ended(began, code, "Completed" if code == 0 else "Error", message)
        return code

    async def _ended(self, began: str, code: int, reason: str, message: str) -> None:
        ended: Object = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        if message:
            ended["message"] = message
        self.process, self.started, self.ready = None, False, False
        self.state = {"terminated": ended}
        await self.changed()

    def signal(self, number: int) -> None:
        """To the first process only, as a kubelet does."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _probe(self) -> None:
        async with aiohttp.ClientSession() as session:
            if (probe := self.spec.get("startupProbe")) and not await self._passes(session, probe):
                self._restart()
                return
            self.started = True
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._readiness(session))
                tasks.create_task(self._liveness(session))

    def _restart(self) -> None:
        self.signal(signal.SIGTERM)
        grace = self.spec.get("terminationGracePeriodSeconds", 30)
        asyncio.get_running_loop().call_later(grace, self.signal, signal.SIGKILL)

    async def _passes(self, session: aiohttp.ClientSession, probe: Object) -> bool:
        seconds, failures = self._pace(probe)
        await asyncio.sleep(min(probe.get("initialDelaySeconds", 0), self.probe_seconds))
        for _ in range(failures):
            if await self._ask(session, probe):
                return True
            await asyncio.sleep(seconds)
        return False

    async def _readiness(self, session: aiohttp.ClientSession) -> None:
        probe = self.spec.get("readinessProbe")
        if probe is None:
            if not self.ready:
                self.ready = True
                await self.changed()
            return
        seconds, failures = self._pace(probe)
        failed = 0
        while True:
            passed = await self._ask(session, probe)
            failed = 0 if passed else failed + 1
            ready = passed or (self.ready and failed < failures)
            if ready != self.ready:
                self.ready = ready
                await self.changed()
            await asyncio.sleep(seconds)

    async def _liveness(self, session: aiohttp.ClientSession) -> None:
        probe = self.spec.get("livenessProbe")
        if probe is None:
            return
        seconds, failures = self._pace(probe)
        failed = 0
        while failed < failures:
            failed = 0 if await self._ask(session, probe) else failed + 1
            await asyncio.sleep(seconds)
        self._restart()

    def _pace(self, probe: Object) -> tuple[float, int]:
        """Seconds between probes and failures in a row that count; together as long as the probe says."""
        given = probe.get("periodSeconds", 10)
        seconds = min(given, self.probe_seconds)
        return seconds, math.ceil(probe.get("failureThreshold", 3) * given / seconds)

    async def _ask(self, session: aiohttp.ClientSession, probe: Object) -> bool:
        timeout = aiohttp.ClientTimeout(total=probe.get("timeoutSeconds", 1) + 4)  # this machine is shared
        try:
            if http := probe.get("httpGet"):
                url = f"{http.get('scheme', 'HTTP').lower()}://{self.address}:{self._port(http['port'])}"
                async with session.get(url + http.get("path", "/"), timeout=timeout) as answer:
                    return 200 <= answer.status < 400
            if tcp := probe.get("tcpSocket"):
                _, writer = await asyncio.open_connection(self.address, self._port(tcp["port"]))
                writer.close()
                return True
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False
        raise NotImplementedError(f"probe of {self.name}: {probe}")

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(int(item["containerPort"]) for item in self.spec["ports"] if item.get("name") == port)


def _message(spec: Object, launch: Launch, code: int) -> str:
    written = launch.termination_log.read_bytes()[-MESSAGE_BYTES:]
    if not written and code and spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
        written = launch.log.read_bytes()[-LOG_MESSAGE_BYTES:]
    return written.decode(errors="replace")
