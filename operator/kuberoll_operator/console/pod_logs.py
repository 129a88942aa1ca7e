"""Logs of a job's pods and the operator's events about it, merged by time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from kuberoll_operator import names
from kuberoll_operator.backends.pods import component_of
from kuberoll_operator.console.connection import Connection
from kuberoll_operator.console.errors import describe_error
from kuberoll_operator.console.log_lines import LogLine, event_line, stamped_line
from kuberoll_operator.kube.errors import ApiError, Forbidden, TooMany, Unavailable, error_of
from kuberoll_operator.kube.resources import EVENTS, PODS, ROLLOUT_JOBS
from kuberoll_operator.model import Object

OPERATOR: Final = "operator"
COMPONENTS: Final = (
    names.WORKERS,
    names.GENERATION,
    OPERATOR,
    names.CHECK,
    names.FINISH,
    names.ENVIRONMENT,
    names.SERVICE,
)

POLL_SECONDS: Final = 2.0
# Lines that arrive from several pods within this time are sorted.
_WINDOW_SECONDS: Final = 0.25
_NANOSECONDS: Final = 1_000_000_000
_QUEUED_LINES: Final = 10_000


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Filter of the logs.

    Attributes:
        components: Components of the job.
        since: Earliest time, in nanoseconds since 1970; None for no limit.
        tail: Maximum number of lines of each container; None for all.
        previous: True to include logs of crashed containers that were restarted.
    """

    components: frozenset[str]
    since: int | None = None
    tail: int | None = None
    previous: bool = False


@dataclass(slots=True)
class _Source:
    """Log of one container, and the position up to which it has been read.

    Attributes:
        last: Time of the newest line that was read, and the number of lines with that time.
    """

    pod: str
    container: str
    shown_as: str
    restarts: int = 0
    running: bool = False
    last: tuple[int, int] = (0, 0)
    over: bool = False
    task: asyncio.Task[None] | None = field(default=None, compare=False)


class JobLogs:
    """Logs of one job.

    Args:
        note: Prints a line for the user.
    """

    def __init__(
        self, connection: Connection, namespace: str, name: str, log_filter: LogFilter, *, note: Callable[[str], None]
    ) -> None:
        self._connection, self._namespace, self._name = connection, namespace, name
        self._filter, self._note = log_filter, note
        self._sources: dict[tuple[str, str], _Source] = {}
        self._events_seen: set[tuple[str, int]] = set()
        self._events_readable = OPERATOR in log_filter.components
        self._queue: asyncio.Queue[LogLine] = asyncio.Queue(_QUEUED_LINES)

    async def history(self) -> AsyncIterator[LogLine]:
        """All existing lines, sorted by time; holds one line of each container in memory."""
        async with self._connection.access.session() as session:
            await self._look()
            parts: list[AsyncIterator[LogLine]] = [_each(await self._events())]
            for source in self._sources.values():
                if self._filter.previous and source.restarts:
                    parts.append(self._readable(source, self._lines(session, source, previous=True)))
                parts.append(self._readable(source, self._lines(session, source)))
            async for line in merge_lines(parts):
                yield line

    async def _readable(self, source: _Source, lines: AsyncIterator[LogLine]) -> AsyncIterator[LogLine]:
        """The lines, and a note if they cannot be read: one unreachable node does not hide other logs."""
        try:
            async for line in lines:
                yield line
        except (TooMany, Unavailable) as error:
            self._note(f"cannot read the log of {source.shown_as} now: {error.message}")

    async def live(self) -> AsyncIterator[LogLine]:
        """Lines after `history`, including those of new pods, until the job is over and all its containers have ended.

        It continues after periods in which the API server or a kubelet does not answer.
        """
        async with self._connection.access.session() as session:
            try:
                async for line in self._live(session):
                    yield line
            finally:
                tasks = [source.task for source in self._sources.values() if source.task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, session: aiohttp.ClientSession) -> AsyncIterator[LogLine]:
        ended, looked, away = False, time.monotonic(), False
        while True:
            for source in self._sources.values():
                if source.task is not None and source.task.done():
                    # Permanent errors, such as a missing permission, are raised here.
                    source.task.result()
                    source.task = None
            for line in await self._window(looked + POLL_SECONDS):
                yield line
            if time.monotonic() < looked + POLL_SECONDS:
                continue
            quiet = all(source.over for source in self._sources.values()) and self._queue.empty()
            try:
                for line in await self._events():
                    yield line
                if ended and quiet:
                    return
                ended = await self._is_over()
                await self._look()
                away = False
            except (TooMany, Unavailable) as error:
                if not away:
                    self._note(f"the API server does not answer: {error.message}; retrying")
                away = True
            looked = time.monotonic()
            for source in self._sources.values():
                if source.task is None and not source.over:
                    following = self._follow(session, source, ended=not source.running)
                    source.task = asyncio.create_task(following)

    async def _window(self, until: float) -> list[LogLine]:
        """Lines that arrived within a short window, sorted; empty if none arrived in time."""
        lines: list[LogLine] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                lines.append(await self._queue.get())
            async with asyncio.timeout(_WINDOW_SECONDS):
                while len(lines) < _QUEUED_LINES:
                    lines.append(await self._queue.get())
        return sorted(lines)

    async def _follow(self, session: aiohttp.ClientSession, source: _Source, *, ended: bool) -> None:
        """Read a log to its current end, or follow it. The log of an ended container is complete after that."""
        # Lines that the kubelet does not return now are read next time.
        with contextlib.suppress(TooMany, Unavailable):
            async for line in self._lines(session, source, follow=not ended):
                await self._queue.put(line)
            source.over = ended

    async def _look(self) -> None:
        """Update the list of containers."""
        selector = f"{names.JOB_LABEL}={self._name}"
        async for pod in self._connection.client.items(PODS, self._namespace, selector):
            component = component_of(pod)
            if component in self._filter.components and component != OPERATOR:
                for source in _containers(pod):
                    known = self._sources.setdefault((source.pod, source.container), source)
                    if source.restarts > known.restarts:
                        known.restarts, known.over = source.restarts, False
                    known.running = source.running

    async def _events(self) -> list[LogLine]:
        """New events of the operator, sorted."""
        if not self._events_readable:
            return []
        lines = []
        try:
            fields = f"regarding.name={self._name}"
            async for event in self._connection.client.items(EVENTS, self._namespace, fields=fields):
                about = event.get("regarding") or {}
                if about.get("kind") != ROLLOUT_JOBS.kind or about.get("name") != self._name:
                    continue
                line = event_line(event)
                mark = (str(event["metadata"]["name"]), line.when if line else 0)
                if line is not None and mark not in self._events_seen and line.when >= (self._filter.since or 0):
                    self._events_seen.add(mark)
                    lines.append(line)
        except Forbidden as error:
            self._events_readable = False
            self._note(f"the operator's events are not shown: {describe_error(error)}")
        return sorted(lines)

    async def _is_over(self) -> bool:
        job = await self._connection.client.get(ROLLOUT_JOBS, self._namespace, self._name)
        conditions = ((job or {}).get("status") or {}).get("conditions") or ()
        return job is None or any(
            item["type"] in {"Complete", "Failed"} and item["status"] == "True" for item in conditions
        )

    async def _lines(
        self, session: aiohttp.ClientSession, source: _Source, *, follow: bool = False, previous: bool = False
    ) -> AsyncIterator[LogLine]:
        """Lines of a container that have not been read yet."""
        query = {"container": source.container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {"previous": "true"} if previous else {}
        known_time, known_lines = source.last
        since = max(known_time, self._filter.since or 0)
        if since:
            # The API server accepts whole seconds only; lines that were read already are skipped below.
            second = datetime.fromtimestamp(since // _NANOSECONDS, UTC)
            query["sinceTime"] = second.strftime("%Y-%m-%dT%H:%M:%SZ")
        if self._filter.tail is not None and not known_time:
            query["tailLines"] = str(self._filter.tail)
        path = PODS.path(self._namespace, source.pod, "log")
        at_known_time = 0
        async for text in self._stream(session, path, query):
            line = stamped_line(source.shown_as, text, source.last[0] or since)
            if line.when < since:
                continue
            if line.when == known_time and not previous:
                at_known_time += 1
                if at_known_time <= known_lines:
                    continue
            if not previous:
                same = source.last[0] == line.when
                source.last = (line.when, source.last[1] + 1 if same else 1)
            yield line

    async def _stream(
        self, session: aiohttp.ClientSession, path: str, query: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        url = self._connection.access.server + path
        try:
            async with session.get(url, params=query, timeout=timeout) as answer:
                if answer.status >= 300:
                    _raise_for(answer.status, await answer.read(), path)
                    return
                async for line in _lines_of(answer.content):
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(str(error) or type(error).__name__, request=f"get {path}") from error


async def merge_lines(parts: Sequence[AsyncIterator[LogLine]]) -> AsyncIterator[LogLine]:
    """Lines of sorted sources, merged into one sorted sequence."""
    heap: list[tuple[LogLine, int]] = []

    async def advance(number: int) -> None:
        if (line := await anext(parts[number], None)) is not None:
            heapq.heappush(heap, (line, number))

    await asyncio.gather(*(advance(number) for number in range(len(parts))))
    while heap:
        line, number = heapq.heappop(heap)
        yield line
        await advance(number)


def _containers(pod: Object) -> list[_Source]:
    """Containers of a pod that may have logs."""
    name, spec, status = pod["metadata"]["name"], pod["spec"], pod.get("status") or {}
    states = {
        item["name"]: item
        for item in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    }
    containers = [item["name"] for item in (*(spec.get("initContainers") or ()), *spec["containers"])]
    found = []
    for container in containers:
        state = states.get(container, {})
        current = state.get("state") or {}
        if not (current.keys() & {"running", "terminated"} or state.get("restartCount")):
            continue
        shown_as = name if len(containers) == 1 else f"{name}/{container}"
        running = "terminated" not in current
        found.append(_Source(name, container, shown_as, int(state.get("restartCount", 0)), running))
    return found


def _raise_for(status: int, body: bytes, path: str) -> None:
    """Raise an error, unless it only means that there is no log: the container has not started, or its pod is gone."""
    try:
        status_body: Any = json.loads(body)
    except ValueError:
        status_body = {"message": body[:200].decode(errors="replace")}
    error: ApiError = error_of(status, status_body if isinstance(status_body, dict) else {}, f"get {path}")
    if status not in {400, 404}:
        raise error


async def _lines_of(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    buffer = bytearray()
    async for chunk in stream.iter_any():
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        for line in lines:
            yield bytes(line)
        buffer = bytearray(rest)
    if buffer:
        yield bytes(buffer)


async def _each(lines: Iterable[LogLine]) -> AsyncIterator[LogLine]:
    for line in lines:
        yield line
