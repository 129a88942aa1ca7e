"""HTTP routes that report a pod's state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web


def json_route(path: str, read: Callable[[], Any]) -> web.RouteDef:
    """Route for `GET path`, which returns the value of `read` as JSON."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(read()), content_type="application/json")

    return web.get(path, answer)


def health_route(problem: Callable[[], Awaitable[str | None]]) -> web.RouteDef:
    """Route for `GET /healthz`: 503 with the problem, or 200 without one."""

    async def healthz(_: web.Request) -> web.Response:
        text = await problem()
        return web.Response(text="ok" if text is None else text, status=200 if text is None else 503)

    return web.get("/healthz", healthz)
