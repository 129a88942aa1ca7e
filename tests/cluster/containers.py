"""One container: its states, its probes, its end, as the kubelet sees them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from tests.cluster.runtime import End, Execution, Launch, PodHome, StartError
from tests.cluster.volumes import expand

Object = dict[str, Any]
MESSAGE_BYTES = 4096
LOG_MESSAGE_BYTES = 2048


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class Container:
    """A container's state as the pod's status shows it."""

    spec: Object
    home: PodHome
    probe_seconds: float
    changed: Callable[[], Awaitable[None]]
    grace: float
    variables: Mapping[str, str] = field(default_factory=dict)
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    started: bool = False
    ready: bool = False
    execution: Execution | None = None
    _stops: set[asyncio.Task[None]] = field(default_factory=set)

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
        try:
            self.execution = await launch.start()
        except StartError as error:
            await self._ended(began, End(128, "StartError", str(error)))
            return 128
        self.state = {"running": {"startedAt": began}}
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        await self.changed()
        probes = asyncio.create_task(self._probe())
        try:
            end = await self.execution.wait()
        finally:
            probes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probes
        await self._ended(began, end._replace(message=_message(self.spec, launch, end.code)))
        return end.code

    async def _ended(self, began: str, end: End) -> None:
        ended: Object = {"exitCode": end.code, "reason": end.reason, "startedAt": began, "finishedAt": now()}
        if end.message:
            ended["message"] = end.message
        self.execution, self.started, self.ready = None, False, False
        self.state = {"terminated": ended}
        await self.changed()

    def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after so many seconds; `run` returns when it has ended."""
        if self.execution is not None:
            task = asyncio.create_task(self.execution.stop(grace))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def kill(self) -> None:
        """SIGKILL to all of it."""
        if self.execution is not None:
            await self.execution.kill()

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
        self.stop(self.grace)

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
                url = f"{http.get('scheme', 'HTTP').lower()}://{self.home.address}:{self._port(http['port'])}"
                async with session.get(url + http.get("path", "/"), timeout=timeout) as answer:
                    return 200 <= answer.status < 400
            if tcp := probe.get("tcpSocket"):
                _, writer = await asyncio.open_connection(self.home.address, self._port(tcp["port"]))
                writer.close()
                return True
            if (command := probe.get("exec")) and self.execution is not None:
                words = [expand(word, self.variables) for word in command["command"]]
                return await self.execution.execute(words, timeout.total or 1) == 0
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
        written = launch.log_tail(LOG_MESSAGE_BYTES)
    return written.decode(errors="replace")
