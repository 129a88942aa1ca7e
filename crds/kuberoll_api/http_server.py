"""Small HTTP servers: what a process answers about itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_route(registry: CollectorRegistry, *, before: Callable[[], None] = lambda: None) -> web.RouteDef:
    """`GET /metrics` in the format that the scraper asks for; `before` is called first."""

    async def metrics(request: web.Request) -> web.Response:
        before()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(registry), headers={"content-type": content_type})

    return web.get("/metrics", metrics)


@asynccontextmanager
async def serving(routes: Iterable[web.RouteDef], *, host: str, port: int) -> AsyncIterator[int]:
    """Answer at an address until the end; yields the port, which the system chooses for 0.

    Args:
        host: Empty: all addresses of the machine.

    Raises:
        OSError: The address cannot be had.
    """
    app = web.Application()
    app.add_routes(routes)
    # A scrape a second is no line in the log.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
