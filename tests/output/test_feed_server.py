"""The direct path over HTTP: its token, its limits, and consumers that stop to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from kuberoll_api.http_server import serving
from kuberoll_workers.output.fed_parts import FedPart, FedParts
from kuberoll_workers.output.feed_server import MOST_REQUESTS, feed_routes
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.telemetry import RolloutMetrics

TOKENS = ["first" * 8, "second" * 8]


class CountingFeed(PartFeed):
    """A feed that says when so many requests have come that no more are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._came = 0
        self.full = asyncio.Event()

    async def after(self, epoch: str, place: int, seconds: float) -> FedParts:
        self._came += seconds > 0
        if self._came == MOST_REQUESTS:
            self.full.set()
        return await super().after(epoch, place, seconds)


class Served:
    """A feed behind its routes."""

    def __init__(self, feed: CountingFeed, metrics: RolloutMetrics, port: int, session: aiohttp.ClientSession) -> None:
        self.feed = feed
        self.port = port
        self._metrics = metrics
        self._session = session

    async def ask(
        self, path: str = "/v1/parts", method: str = "GET", token: str = TOKENS[1], **query: Any
    ) -> tuple[int, bytes]:
        """Status and body."""
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Authorization": f"Bearer {token}"}
        async with self._session.request(method, url, params=query, headers=headers) as answer:
            return answer.status, await answer.read()

    def metric(self, name: str) -> float:
        """Value of a metric of the direct path."""
        value = self._metrics.registry.get_sample_value(f"kuberoll_direct_{name}", {"rolloutjob": "test"})
        assert value is not None
        return value

    async def parts(self, **query: Any) -> FedParts:
        """The answer to a request that is in order."""
        status, body = await self.ask(**query)
        assert status == 200, body
        return msgspec.msgpack.decode(body, type=FedParts)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    feed, metrics = CountingFeed(), RolloutMetrics("test")
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        serving(feed_routes(feed, TOKENS, metrics.direct), host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        try:
            yield Served(feed, metrics, port, session)
        finally:
            feed.end()


async def test_only_a_token_opens_it(served: Served) -> None:
    for path, method in (("/v1/parts", "GET"), ("/v1/plan", "POST")):
        for token in ("", "third" * 8, TOKENS[0][:-1]):
            status, body = await served.ask(path, method, token=token)
            assert (status, b"Bearer and a token of the scope read" in body) == (401, True)
    assert not served.feed.plan_written.is_set()
    for token in TOKENS:
        assert (await served.ask("/v1/plan", "POST", token=token))[0] == 204
    assert served.feed.plan_written.is_set()


@pytest.mark.parametrize("query", [{"after": "x"}, {"after": "1.5"}, {"seconds": "nan"}, {"seconds": "soon"}])
async def test_a_request_that_is_none_is_refused(served: Served, query: dict[str, str]) -> None:
    assert (await served.ask(**query))[0] == 400


async def test_a_part_comes_to_all_who_wait_and_those_beyond_the_limit_are_refused(served: Served) -> None:
    first = await served.parts()
    place: dict[str, Any] = {"epoch": first.epoch, "after": first.next, "seconds": 30}
    waiting = [asyncio.create_task(served.parts(**place)) for _ in range(MOST_REQUESTS)]
    await served.feed.full.wait()
    assert (await served.ask(**place))[0] == 503
    assert served.metric("waiting_requests") == MOST_REQUESTS
    served.feed.written("shard-00000/w-1.jsonl", b"{}\n")
    for answer in await asyncio.gather(*waiting):
        assert answer.parts == [FedPart("shard-00000/w-1.jsonl", b"{}\n")]
    assert (await served.ask(**place))[0] == 200
    assert served.metric("waiting_requests") == 0


async def test_what_was_sent_is_counted_and_gaps_of_those_who_had_a_place(served: Served) -> None:
    counted = ("parts_total", "bytes_total", "gaps_total")
    first = await served.parts()
    assert first.gap
    assert [served.metric(name) for name in counted] == [0, 0, 0]
    for number in (1, 2):
        served.feed.written(f"shard-00000/w-{number}.jsonl", b"12\n")
    for _ in range(2):
        await served.parts(epoch=first.epoch, after=first.next)
    assert [served.metric(name) for name in counted] == [4, 12, 0]
    assert (await served.parts(epoch="of another process", after=3)).gap
    assert [served.metric(name) for name in counted] == [4, 12, 1]


async def test_a_consumer_that_reads_nothing_keeps_nobody_waiting(served: Served) -> None:
    first = await served.parts()
    served.feed.written("shard-00000/w-1.jsonl", b"x" * (3 << 20))
    slow = []
    for _ in range(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            f"GET /v1/parts?epoch={first.epoch}&after={first.next} HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {TOKENS[0]}\r\n\r\n".encode()
        )
        slow.append(writer)
    answer = await served.parts(epoch=first.epoch, after=first.next)
    assert len(answer.parts[0].lines) == 3 << 20
    for writer in slow:
        writer.transport.abort()
