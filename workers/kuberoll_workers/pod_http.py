"""What a pod answers over HTTP about itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_route(registry: CollectorRegistry, *, before: Callable[[], None]) -> web.RouteDef:
    """`GET /metrics` in the format that the scraper asks for; `before` is called first."""

    async def metrics(request: web.Request) -> web.Response:
        before()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(registry), headers={"content-type": content_type})

    return web.get("/metrics", metrics)


def json_route(path: str, read: Callable[[], Any]) -> web.RouteDef:
    """`GET path` as JSON."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(read()), content_type="application/json")

    return web.get(path, answer)


def health_route(problem: Callable[[], Awaitable[str | None]]) -> web.RouteDef:
    """`GET /healthz`: 503 with the problem, or 200 where there is none."""

    async def healthz(_: web.Request) -> web.Response:
        found = await problem()
        return web.Response(text="ok" if found is None else found, status=200 if found is None else 503)

    return web.get("/healthz", healthz)


@asynccontextmanager
async def serving(routes: list[web.RouteDef], *, host: str, port: int) -> AsyncIterator[None]:
    """Answer at an address until the end.

    Raises:
        OSError: The address cannot be had.
    """
    app = web.Application()
    app.add_routes(routes)
    # A scrape a second is no line in the log.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
