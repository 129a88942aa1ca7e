"""Background polling of a job's pods, with limits on what they may answer.

Workers report their progress at `/progress`, replicas of the policy report the weights that they serve at `/weights`;
with backend KubeRay, Serve's app reports for all its replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Self, TypeVar

import aiohttp
from pydantic import TypeAdapter, ValidationError

from kuberoll_api import contract
from kuberoll_api.contract import PodProgress, PodWeights, ServeWeights
from kuberoll_operator import names
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.backends.pods import is_leader, pods_of, shard_of
from kuberoll_operator.model import Key, Object, PodReports, ServedWeights, status_of, was_ready

ANSWER_SECONDS = 2.0
FIRST_SECONDS = 3.0
"""Seconds between polls until every worker of a job has reported something."""
MISSED_POLLS = 3
"""Polls in a row that a worker misses, after which what it has said of others is not told any more."""
ANSWER_BYTES = 64 * 1024
CONCURRENCY = 64

_log = logging.getLogger(__name__)

_PROGRESS: Final = TypeAdapter(PodProgress)
_POD_WEIGHTS: Final = TypeAdapter(PodWeights)
_SERVE_WEIGHTS: Final = TypeAdapter(ServeWeights)
_Answer = TypeVar("_Answer")


class _Endpoints:
    """Endpoints of a job that are polled.

    Attributes:
        workers: Shard and host of worker pods, by pod uid.
        engines: Hosts of replicas that are pods, by pod uid.
        serve: URL of Serve's app, if it reports for the replicas.
        token: Bearer token for Serve's app.
    """

    def __init__(self, raw: Object, pods: Sequence[Object], token: Callable[[str], str | None]) -> None:
        status = status_of(raw)
        generation = status.get("generation") or {}
        backend = BACKENDS.get(generation.get("backend", ""))
        source = None if backend is None else backend.weights_from
        self.workers = {
            pod["metadata"]["uid"]: (shard, host)
            for pod in pods_of(pods, names.WORKERS)
            if (host := _host(pod)) is not None and (shard := shard_of(pod)) is not None
        }
        # A replica that spans pods answers through its leader.
        engines = [pod for pod in pods_of(pods, names.GENERATION) if source == "Pods" and is_leader(pod)]
        self.engines = {pod["metadata"]["uid"]: host for pod in engines if (host := _host(pod)) is not None}
        ready = source == "Serve" and was_ready(status)
        self.serve = f"{generation['endpoint']}/v1/weights" if ready and generation.get("endpoint") else None
        self.token = token(raw["metadata"]["uid"]) if self.serve else None

    def __bool__(self) -> bool:
        return bool(self.workers or self.engines or self.serve)


class ReportPoller:
    """Polls the pods of jobs, and reports jobs with news; an async context manager.

    A job is polled as long as it has pods that can answer. The last answer of a pod that does not respond counts until
    the pod is gone.

    Args:
        on_news: Called with the key of a job that has news.
        seconds: Seconds between two polls of a job.
        port: Progress port of worker pods.
        weights_port: Status port of generation pods.
        token: Bearer token for the policy of the job with this uid.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        on_news: Callable[[Key], None],
        *,
        seconds: float,
        port: int = contract.PROGRESS_PORT,
        weights_port: int = contract.STATUS_PORT,
        token: Callable[[str], str | None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self._on_news, self._seconds, self._port, self._weights_port = on_news, seconds, port, weights_port
        self._token = token
        self._endpoints: dict[Key, _Endpoints] = {}
        self._known: dict[Key, dict[str, PodProgress]] = {}
        self._missed: dict[Key, dict[str, int]] = {}
        self._counted: dict[Key, dict[int, PodProgress]] = {}
        self._served: dict[Key, dict[str, ServedWeights]] = {}
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

    def latest(self, key: Key, raw: Object, pods: Sequence[Object]) -> PodReports:
        """Latest reports of a job's pods, without waiting; starts polling them.

        Args:
            raw: The job, live.
            pods: All pods of the job.
        """
        uids = {pod["metadata"]["uid"] for pod in pods}
        known = {uid: item for uid, item in self._known.get(key, {}).items() if uid in uids}
        if key in self._known:
            self._known[key] = known
        endpoints = _Endpoints(raw, pods, self._token)
        served = self._served.get(key, {})
        if endpoints.serve is None:
            served = {uid: item for uid, item in served.items() if uid in uids}
        self._endpoints[key] = endpoints
        if endpoints and key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._poll_repeatedly(key))
        progress: dict[int, PodProgress] = {}
        missed = self._missed.get(key, {})
        for uid, item in known.items():
            if uid not in endpoints.workers or missed.get(uid, 0) >= MISSED_POLLS:
                item = dataclasses.replace(item, answering=None, unanswering=())
            # A shard's pod and its successor may both exist for a moment.
            if item.shard not in progress or item.trajectories > progress[item.shard].trajectories:
                progress[item.shard] = item
        return PodReports(progress=progress, counted=dict(self._counted.get(key, {})), served=served)

    def forget(self, key: Key) -> None:
        """Stop polling a job that is gone or has finished."""
        self._endpoints.pop(key, None)
        self._known.pop(key, None)
        self._missed.pop(key, None)
        self._counted.pop(key, None)
        self._served.pop(key, None)

    async def _poll_repeatedly(self, key: Key) -> None:
        try:
            while endpoints := self._endpoints.get(key):
                answered = await self._poll(key, endpoints)
                # A pod that has just started does not answer yet, or has nothing to report.
                await self._sleep(self._seconds if answered else min(FIRST_SECONDS, self._seconds))
        finally:
            del self._tasks[key]

    async def _poll(self, key: Key, endpoints: _Endpoints) -> bool:
        """Poll once; True if all workers answered and have counted at least one turn."""
        shards = dict(endpoints.workers)
        answers, served = await asyncio.gather(
            asyncio.gather(*(self._progress(shard, host) for shard, host in shards.values())),
            self._weights(endpoints),
        )
        if key not in self._endpoints:
            return True
        missed_before = self._missed.get(key, {})
        missed = {
            uid: 0 if answer is not None else missed_before.get(uid, 0) + 1
            for uid, answer in zip(shards, answers, strict=True)
        }
        self._missed[key] = missed
        before, served_before = self._known.get(key, {}), self._served.get(key, {})
        found = {uid: answer for uid, answer in zip(shards, answers, strict=True) if answer is not None}
        # Serve reports on all replicas, a pod on itself only.
        served = served if endpoints.serve and served else {**served_before, **served}
        silenced = any(missed[uid] == MISSED_POLLS and before[uid].unanswering for uid in missed if uid in before)
        if any(before.get(uid) != answer for uid, answer in found.items()) or served != served_before or silenced:
            self._known[key] = {**before, **found}
            counted = self._counted.setdefault(key, {})
            for item in found.values():
                # What is stored does not get less, but a new pod has counted nothing before it has read that.
                if item.shard not in counted or item.trajectories >= counted[item.shard].trajectories:
                    counted[item.shard] = item
            self._served[key] = served
            self._on_news(key)
        return len(found) == len(shards) and all(answer.turns for answer in found.values())

    async def _progress(self, shard: int, host: str) -> PodProgress | None:
        answer = await self._ask(f"http://{host}:{self._port}/progress", _PROGRESS)
        # The pod's own shard counts, not the one that it reports.
        return None if answer is None else dataclasses.replace(answer, shard=shard)

    async def _weights(self, endpoints: _Endpoints) -> dict[str, ServedWeights]:
        """Weights of the replicas that answered."""
        if endpoints.serve is not None:
            weights = await self._ask(endpoints.serve, _SERVE_WEIGHTS, token=endpoints.token)
            if weights is None:
                return {}
            return {
                name: ServedWeights(version, weights.problems.get(name)) for name, version in weights.replicas.items()
            }
        engines = dict(endpoints.engines)
        urls = [f"http://{host}:{self._weights_port}/weights" for host in engines.values()]
        answers = await asyncio.gather(*map(self._pod_weights, urls))
        return {
            uid: ServedWeights(answer.served, answer.problem)
            for uid, answer in zip(engines, answers, strict=True)
            if answer is not None
        }

    async def _pod_weights(self, url: str) -> PodWeights | None:
        return await self._ask(url, _POD_WEIGHTS)

    async def _ask(self, url: str, kind: TypeAdapter[_Answer], *, token: str | None = None) -> _Answer | None:
        assert self._session is not None, "the poller is not entered"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValidationError):
            async with self._room, self._session.get(url, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                content = await _all(answer.content, ANSWER_BYTES)
                return None if content is None else kind.validate_json(content)
        return None


async def _all(stream: aiohttp.StreamReader, most: int) -> bytes | None:
    """Content until the end of the stream; None if it is longer than `most` bytes."""
    content = bytearray()
    async for chunk in stream.iter_any():
        content += chunk
        if len(content) > most:
            return None
    return bytes(content)


def _host(pod: Object) -> str | None:
    """Host of a pod that can be polled: running, ready and not being deleted."""
    status = pod.get("status") or {}
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    host = status.get("podIP")
    if not host or not ready or status.get("phase") != "Running" or pod["metadata"].get("deletionTimestamp"):
        return None
    return f"[{host}]" if ":" in host else str(host)
