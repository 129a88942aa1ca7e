"""What a pod answers over HTTP about itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web


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
