"""What worker pods say of themselves at `/progress`: asked now and then, in the background, and believed in bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kuberoll_operator import names
from kuberoll_operator.backends.pods import of_component
from kuberoll_operator.model import Key, Object, PodProgress
from kuberoll_operator.plan import shard_of

ANSWER_SECONDS = 2.0
ANSWER_BYTES = 64 * 1024
CONCURRENCY = 64
MOST = 10**15

_log = logging.getLogger(__name__)

_Count = Annotated[int, Field(ge=0, le=MOST)]


class _Answer(BaseModel):
    # Whatever runs in a worker pod may answer here.
    model_config = ConfigDict(extra="ignore")

    trajectories: _Count = 0
    failed: _Count = 0
    turns: _Count = 0
    generated_tokens: _Count = 0
    reward_sum: float = Field(default=0.0, allow_inf_nan=False)
    planned: _Count = 0


class ProgressPoller:
    """Polls the worker pods of jobs, and tells when something new was said; an async context manager.

    A pod that does not answer is left out: its last answer counts until it is gone.

    Args:
        told: Called with a job of which something new is known.
        seconds: Shortest time between two polls of a job.
        clock: Seconds; None: the running loop's.
        port: Of the pods.
    """

    def __init__(
        self,
        told: Callable[[Key], None],
        *,
        seconds: float,
        clock: Callable[[], float] | None = None,
        port: int = names.PROGRESS_PORT,
    ) -> None:
        self._told, self._seconds, self._port = told, seconds, port
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._polled: dict[Key, float] = {}
        self._known: dict[Key, dict[str, PodProgress]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(CONCURRENCY)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONCURRENCY, force_close=True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def latest(self, key: Key, pods: Sequence[Object]) -> Mapping[int, PodProgress]:
        """What is known of a job's shards, without waiting; asks the pods again if it is time to.

        Args:
            pods: All pods of the job.
        """
        there = {pod["metadata"]["uid"]: pod for pod in of_component(pods, names.WORKERS)}
        known = {uid: item for uid, item in self._known.get(key, {}).items() if uid in there}
        if key in self._known:
            self._known[key] = known
        reachable = {uid: found for uid, pod in there.items() if (found := _address(pod)) is not None}
        due = self._clock() - self._polled.get(key, -self._seconds) >= self._seconds
        if reachable and due and key not in self._tasks:
            self._polled[key] = self._clock()
            self._tasks[key] = asyncio.create_task(self._poll(key, reachable))
        progress: dict[int, PodProgress] = {}
        for item in known.values():
            # A shard's pod and its successor may both be there for a moment.
            if item.shard not in progress or item.trajectories > progress[item.shard].trajectories:
                progress[item.shard] = item
        return progress

    def forget(self, key: Key) -> None:
        """The job is gone, or over."""
        self._polled.pop(key, None)
        self._known.pop(key, None)

    async def _poll(self, key: Key, addresses: Mapping[str, tuple[int, str]]) -> None:
        try:
            answers = await asyncio.gather(*(self._ask(shard, host) for shard, host in addresses.values()))
            before = self._known.get(key, {})
            found = {uid: answer for uid, answer in zip(addresses, answers, strict=True) if answer is not None}
            if key in self._polled and any(before.get(uid) != answer for uid, answer in found.items()):
                self._known[key] = {**before, **found}
                self._told(key)
        finally:
            del self._tasks[key]

    async def _ask(self, shard: int, host: str) -> PodProgress | None:
        assert self._session is not None, "the poller is not entered"
        url = f"http://{host}:{self._port}/progress"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValidationError):
            async with self._room, self._session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                content = await _all(answer.content, ANSWER_BYTES)
                return None if content is None else _progress(shard, content)
        return None


async def _all(stream: aiohttp.StreamReader, most: int) -> bytes | None:
    """Everything until the end; None where that is too much."""
    content = bytearray()
    async for chunk in stream.iter_any():
        content += chunk
        if len(content) > most:
            return None
    return bytes(content)


def _progress(shard: int, content: bytes) -> PodProgress:
    fields: dict[str, Any] = _Answer.model_validate_json(content).model_dump()
    return replace(PodProgress(shard=shard), **fields)


def _address(pod: Object) -> tuple[int, str] | None:
    """Shard and host of a pod that can be asked: running, ready, and not on its way out."""
    status, shard = pod.get("status") or {}, shard_of(pod)
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    host = status.get("podIP")
    if shard is None or not host or not ready or status.get("phase") != "Running":
        return None
    if pod["metadata"].get("deletionTimestamp"):
        return None
    return shard, f"[{host}]" if ":" in host else host
