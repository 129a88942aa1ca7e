"""Small HTTP servers for the health, metrics and state of a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_route(registry: CollectorRegistry, *, before: Callable[[], None] = lambda: None) -> web.RouteDef:
    """`GET /metrics` in the format that the scraper accepts; `before` is called first."""

    async def metrics(request: web.Request) -> web.Response:
        before()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(registry), headers={"content-type": content_type})

    return web.get("/metrics", metrics)


@asynccontextmanager
async def serving(
    routes: Iterable[web.RouteDef], *, host: str, port: int, most_bytes: int = 1 << 20
) -> AsyncIterator[int]:
    """Serve routes until the block is left; yields the port, which the system chooses for 0.

    Args:
        host: Address; empty for all addresses of the machine.
        most_bytes: Maximum size of a request.

    Raises:
        OSError: The address is not available.
    """
    app = web.Application(client_max_size=most_bytes)
    app.add_routes(routes)
    # Frequent scrapes are not worth a line in the log.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
