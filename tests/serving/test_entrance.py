"""A server with few places, behind the entrance: those who hold what they do not use keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kuberoll_workers.policy.auth import AccessDenied
from kuberoll_workers.serving import bodies, entrance
from kuberoll_workers.serving.arrivals import LEAST_PLACES, Arrivals, Calls
from kuberoll_workers.serving.entrance import Entrance, Rules
from kuberoll_workers.serving.spending import CALL_SECONDS, SAVED_SECONDS, Spending, body_seconds
from tests.serving.test_slow_clients import serving

PLACES = 4
PATIENCE_SECONDS = 240


class Places:
    """An application with places, as Ray Serve has them."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(PLACES)
        self.under_way: list[str] = []
        self.calls: list[str] = []
        self.go_on = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.free:
            request = Request(scope, receive)
            body = await request.body()
            if scope["path"].startswith("/sessions"):
                self.under_way.append(scope["path"])
                self.calls.append(scope["path"])
                self.begun.set()
                await self.go_on.wait()
                self.under_way.remove(scope["path"])
            await JSONResponse({"bytes": len(body), "path": scope["path"]})(scope, receive, send)


async def healthy() -> Response:
    return Response("ok")


def authorize(request: Request, path: str) -> None:
    if request.headers.get("authorization") != "Bearer token":
        raise AccessDenied(401, "who are you?")


def session_of(path: str) -> str | None:
    return path.split("/")[2] if path.startswith("/sessions/") else None


def spender_of(request: Request, path: str) -> str | None:
    return session_of(path)


@asynccontextmanager
async def replica(
    app: Any, arrivals: Arrivals | None = None, places: int = PLACES, spending: Spending | None = None
) -> AsyncIterator[int]:
    rules = Rules(
        authorize=authorize,
        session=session_of,
        spender=spender_of,
        health=healthy,
        calls=Calls(places),
        spending=spending or Spending(),
    )
    async with serving(Entrance(app, rules=rules, arrivals=arrivals or Arrivals()), HttpToolsProtocol, 600) as port:
        yield port


def head(path: str, length: int, token: str = "token") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n".encode()
    )


@asynccontextmanager
async def connections(port: int, count: int, first: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        for _, writer in made:
            writer.write(first)
        yield [reader for reader, _ in made]
    finally:
        for _, writer in made:
            writer.close()
        for _, writer in made:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        aiohttp.ClientSession(
            headers={"authorization": "Bearer token"}, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session,
    ):
        yield session


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        said = await reader.read()
    first, _, body = said.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)


@pytest.mark.parametrize("path", ["/v1/generate", "/sessions/bad/v1/chat/completions"])
async def test_bodies_that_have_not_arrived_take_no_place(path: str) -> None:
    """A hundred times as many as there are places."""
    app = Places()
    async with replica(app) as port, connections(port, 100 * PLACES, head(path, 100_000) + b"x"), http() as session:
        url = f"http://127.0.0.1:{port}/v1/generate"
        async with session.post(url, data=b"x" * 100_000) as found:
            assert (await found.json())["bytes"] == 100_000
        assert not app.free.locked()


async def test_a_body_arrives_as_it_was_sent() -> None:
    async with replica(Places()) as port, http() as session:
        url = f"http://127.0.0.1:{port}/v1/generate"

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"y" * 50_000

        async with session.post(url, data=chunks()) as found:
            assert (await found.json())["bytes"] == 500_000
        async with session.post(url) as found:
            assert (await found.json())["bytes"] == 0
        async with session.get(url) as found:
            assert (await found.json())["bytes"] == 0
        async with session.post(url, data=b"x" * (bodies.MAX_BODY_BYTES + 1)) as found:
            assert found.status == 413


async def test_a_session_has_no_more_calls_under_way_than_its_share() -> None:
    app = Places()
    app.free = asyncio.Semaphore(1_000)
    async with replica(app) as port, http() as session:
        url = f"http://127.0.0.1:{port}/sessions"
        calls = [asyncio.create_task(session.post(f"{url}/bad/v1", data=b"{}")) for _ in range(100 * LEAST_PLACES)]
        while len(app.under_way) < LEAST_PLACES:
            app.begun.clear()
            await app.begun.wait()
        # Those of others are not behind its.
        app.begun.clear()
        good = asyncio.create_task(session.post(f"{url}/good/v1", data=b"{}"))
        while "/sessions/good/v1" not in app.under_way:
            await app.begun.wait()
            app.begun.clear()
        assert len(app.under_way) == LEAST_PLACES + 1
        # One who does not wait for its answer leaves no call behind.
        for call in calls[LEAST_PLACES : 50 * LEAST_PLACES]:
            call.cancel()
        app.go_on.set()
        assert (await good).status == 200
        answered = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(found, aiohttp.ClientResponse) and found.status == 200 for found in answered) >= 50
        assert app.under_way == []


@pytest.mark.parametrize("path", ["/v1/generate", "/sessions/bad/v1/chat/completions"])
async def test_a_caller_who_holds_too_much_loses_what_came_least_lately(path: str) -> None:
    app = Places()
    # Room for 2 bodies of each session, and 100 bytes; 4 calls of a session are under way at once.
    async with (
        replica(app, Arrivals(bodies=16, size=800)) as port,
        connections(port, 200, head(path, 90) + b"x" * 30) as readers,
        http() as session,
    ):
        async with session.post(f"http://127.0.0.1:{port}/v1/generate", data=b"x" * 50) as found:
            assert found.status == 200
        refused = await asyncio.gather(*map(answer, readers[:100]))
        assert {status for status, _ in refused} == {429}
        assert refused[0][1]["error"]["type"] == "TooManyBodies"


async def test_callers_are_told_apart_by_what_they_show() -> None:
    # One who holds little loses nothing to one who holds much, though its body is the oldest.
    entered = Entrance(Places(), arrivals=Arrivals(bodies=2))
    async with serving(entered, HttpToolsProtocol, 600) as port, http() as session:

        @asynccontextmanager
        async def arriving(token: str, bodies: int) -> AsyncIterator[asyncio.StreamReader]:
            async with connections(port, 1, head("/v1/generate", 90, token)) as (reader,):
                while entered.arrivals.bodies < bodies:  # noqa: ASYNC110 - the bodies are counted without an event
                    await asyncio.sleep(0)
                yield reader

        async with arriving("few", 1) as oldest, arriving("many", 2) as other:
            async with session.post(
                f"http://127.0.0.1:{port}/v1/generate", data=b"{}", headers={"authorization": "Bearer many"}
            ) as found:
                assert found.status == 200
            assert (await answer(other))[0] == 429
            assert not oldest.at_eof()


async def test_a_body_that_comes_where_there_is_no_room_is_refused_itself() -> None:
    app = Places()
    # Each of these is whole: none can be dropped.
    async with replica(app, Arrivals(bodies=2)) as port, http() as session:
        url = f"http://127.0.0.1:{port}/sessions"
        held = [asyncio.create_task(session.post(f"{url}/{name}/v1", data=b"{}")) for name in "ab"]
        while len(app.under_way) < 2:
            app.begun.clear()
            await app.begun.wait()
        async with session.post(f"{url}/c/v1", data=b"{}") as found:
            assert found.status == 429
        app.go_on.set()
        assert [(await call).status for call in held] == [200, 200]


async def test_calls_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "MAX_WAITING", 1)
    monkeypatch.setattr(entrance, "_REFUSAL_SECONDS", 0.0)
    app = Places()
    async with replica(app) as port, http() as session:
        url = f"http://127.0.0.1:{port}/sessions/bad/v1"
        calls = [asyncio.create_task(session.post(url, data=b"{}")) for _ in range(100)]
        while sum(call.done() for call in calls) < 99 - LEAST_PLACES:
            await asyncio.wait([call for call in calls if not call.done()], return_when=asyncio.FIRST_COMPLETED)
        app.go_on.set()
        statuses = sorted([(await call).status for call in calls])
        assert statuses == [200] * (LEAST_PLACES + 1) + [429] * (99 - LEAST_PLACES)


class Waits(Spending):
    """Tells when a session has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.changed = asyncio.Event(), asyncio.Event()
        self.spent: list[tuple[str, float]] = []

    def delay(self, session: str, now: float) -> float:
        found = super().delay(session, now)
        if found:
            self.told.set()
        return found

    def spend(self, session: str, seconds: float, now: float) -> None:
        self.spent.append((session, seconds))
        self.changed.set()
        super().spend(session, seconds, now)


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_session_that_has_spent_its_time_waits_and_others_do_not(method: str) -> None:
    app = Places()
    app.go_on.set()
    spending = Waits()
    async with replica(app, spending=spending) as port, http() as session:
        url = f"http://127.0.0.1:{port}/sessions"
        async with session.post(f"{url}/good/v1", data=b"{}") as found:
            assert found.status == 200
        now = asyncio.get_running_loop().time()
        spending.spend("bad", SAVED_SECONDS + 3600, now)
        waiting = asyncio.create_task(session.request(method, f"{url}/bad/v1"))
        await spending.told.wait()
        async with session.post(f"{url}/good/v1", data=b"{}") as found:
            assert found.status == 200
        assert not waiting.done()
        # It has its time again.
        spending.spend("bad", -7200, now)
        waiting.cancel()
        async with session.request(method, f"{url}/bad/v1") as found:
            assert found.status == 200


class Poor(Waits):
    """A session that begins a call is an hour behind afterwards."""

    def spend(self, session: str, seconds: float, now: float) -> None:
        super().spend(session, seconds, now)
        if seconds == CALL_SECONDS:
            Spending.spend(self, session, 3600, now)


async def test_a_body_that_waits_is_forgotten_when_its_caller_leaves() -> None:
    app = Places()
    app.go_on.set()
    spending = Poor()
    async with replica(app, spending=spending) as port:
        now = asyncio.get_running_loop().time()
        spending.spend("good", 0.1, now)
        async with connections(port, 1, head("/sessions/bad/v1", 500) + b"x" * 500):
            await spending.told.wait()
            spending.changed.clear()
        # What has come is counted.
        await spending.changed.wait()
        assert spending.spent[-1] == ("bad", body_seconds(500))
        assert app.calls == []


async def test_a_session_pays_for_what_arrives_whatever_becomes_of_it() -> None:
    app = Places()
    app.go_on.set()
    spending = Waits()
    async with replica(app, spending=spending) as port, http() as session:
        url = f"http://127.0.0.1:{port}/sessions/one/v1"
        async with session.post(url, data=b"x" * 1000) as found:
            assert found.status == 200
        assert spending.spent == [("one", CALL_SECONDS), ("one", body_seconds(1000))]
        spending.spent.clear()
        async with connections(port, 1, head("/sessions/one/v1", 100_000) + b"x" * 500):
            while len(spending.spent) < 2:
                await spending.changed.wait()
                spending.changed.clear()
        assert spending.spent == [("one", CALL_SECONDS), ("one", body_seconds(500))]
        spending.spent.clear()
        async with session.put(url, data=b"x" * 1000) as found:
            assert found.status == 200
        assert spending.spent == [("one", CALL_SECONDS), ("one", body_seconds(1000))]


async def test_a_body_that_trickles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bodies.read_body.__kwdefaults__ is not None
    monkeypatch.setitem(bodies.read_body.__kwdefaults__, "grace", 0.05)
    async with (
        replica(Places()) as port,
        connections(port, 1, head("/v1/generate", 1_000_000) + b"x" * 6_000) as (reader,),
    ):
        status, said = await answer(reader)
    assert status == 408
    assert "6,000 bytes came" in said["error"]["message"]


async def test_strangers_are_refused_before_they_send_anything() -> None:
    async with (
        replica(Places()) as port,
        connections(port, 3, head("/v1/generate", 100_000, token="guess")) as readers,
    ):
        for reader in readers:
            status, said = await answer(reader)
            assert (status, said["error"]["type"]) == (401, "Unauthorized")


async def test_health_needs_no_place_and_no_token() -> None:
    app = Places()
    async with replica(app) as port, http() as session:
        for _ in range(PLACES):
            await app.free.acquire()
        async with session.get(f"http://127.0.0.1:{port}/healthz", headers={"authorization": ""}) as found:
            assert await found.text() == "ok"


async def test_a_websocket_is_refused() -> None:
    async with replica(Places()) as port, http() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"http://127.0.0.1:{port}/v1/realtime")
        assert refused.value.status == 403


async def test_serve_s_own_proxy_has_an_entrance_that_reads_bodies() -> None:
    (middleware,) = entrance.proxy_middlewares()
    app = Places()
    wrapped: Any = middleware.cls
    wrapped = wrapped(app, **middleware.kwargs)
    async with (
        serving(wrapped, HttpToolsProtocol, 600) as port,
        connections(port, 100 * PLACES, head("/v1/generate", 100_000) + b"x"),
        http() as session,
        session.post(f"http://127.0.0.1:{port}/v1/generate", data=b"xyz") as found,
    ):
        assert (await found.json())["bytes"] == 3
