"""A door to the API server that a test can watch, close, and put errors into."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOP_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})
_REASONS = {
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


class Write(NamedTuple):
    """A write that the API server has answered.

    Attributes:
        method: POST, PUT, PATCH or DELETE.
        path: With subresource, without query.
        status: Of the server's answer.
    """

    method: str
    path: str
    status: int

    @property
    def is_lease(self) -> bool:
        return "/leases" in self.path


class ApiProxy:
    """Plain HTTP on 127.0.0.1, forwarded; in a thread of its own.

    Attributes:
        writes: All writes that were accepted, those of Leases excepted, in the server's order.
        after_write: Called in the proxy's thread with the number (from 1) of an accepted write, after the server has
            answered and before the client is told: who is killed here does not know whether its write was done.
        fault: Called with method and path of each request; a status is answered in the server's place.
    """

    def __init__(self, url: str, authority: Path) -> None:
        self._upstream = url
        self._context = ssl.create_default_context(cafile=str(authority))
        self.writes: list[Write] = []
        self.after_write: Callable[[int, Write], None] | None = None
        self.fault: Callable[[str, str], int | None] | None = None
        self.url = ""
        self._away = False
        self._streams: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._stop: Future[None] = Future()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._main, name="api-proxy")
        self._thread.start()
        self._started.result(30)

    def go_away(self) -> None:
        """Requests find nobody, and watches end, until `come_back`."""

        def cut() -> None:
            self._away = True
            for task in self._streams:
                task.cancel()

        self._loop.call_soon_threadsafe(cut)

    def come_back(self) -> None:
        self._loop.call_soon_threadsafe(lambda: setattr(self, "_away", False))

    def cut_watches(self) -> None:
        """Ends the watches that are open."""

        def cut() -> None:
            for task in self._streams:
                task.cancel()

        self._loop.call_soon_threadsafe(cut)

    def stop(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)
        self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set_result(None)
            try:
                await asyncio.wrap_future(self._stop)
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._away:
            return self._abort(request)
        if self.fault is not None and (status := self.fault(request.method, request.path)) is not None:
            return _status(status)
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        body = await request.read()
        try:
            async with self._session.request(
                request.method,
                self._upstream + request.path_qs,
                data=body or None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer:
                if request.query.get("watch") in ("1", "true"):
                    return await self._stream(request, answer)
                content = await answer.read()
        except aiohttp.ClientError:
            return self._abort(request)
        if request.method in WRITES and answer.status < 300:
            write = Write(request.method, request.path, answer.status)
            if not write.is_lease:
                self.writes.append(write)
                if self.after_write is not None:
                    self.after_write(len(self.writes), write)
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
        return web.Response(status=answer.status, body=content, headers=passed)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except (OSError, asyncio.CancelledError):
            return self._abort(request)
        finally:
            self._streams.discard(task)
        return response

    def _abort(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)


def _status(code: int) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": _REASONS.get(code, "InternalError"),
        "message": f"a test answers {code}",
        "code": code,
    }
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response(body, status=code, headers=headers)
