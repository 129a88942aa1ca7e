"""HTTP of a worker's side of the direct path, for consumers with a token of the scope `read`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import Final

import msgspec
from aiohttp import web

from kuberoll_workers.output.fed_parts import MOST_SECONDS, PARTS_PATH, PLAN_PATH
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.policy.auth import AccessDenied, require_token
from kuberoll_workers.telemetry.direct import DirectMetrics

MOST_REQUESTS: Final = 64
"""Requests for parts at a time: each may hold an answer in memory."""

_SEND_SECONDS: Final = 30.0


def feed_routes(feed: PartFeed, tokens: Collection[str], metrics: DirectMetrics) -> list[web.RouteDef]:
    """The routes of a feed.

    Args:
        tokens: Bearer tokens that open them.
        metrics: Told of what is asked and sent.
    """
    requests = 0

    def refusal(request: web.Request) -> web.Response | None:
        try:
            require_token(request.headers.get("Authorization"), tokens)
        except AccessDenied as error:
            return web.Response(status=error.status, text=str(error))
        return None

    async def parts(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        if (refused := refusal(request)) is not None:
            return refused
        try:
            epoch, place = request.query.get("epoch", ""), int(request.query.get("after", "0"))
            seconds = float(request.query.get("seconds", "0"))
            if not math.isfinite(seconds):
                raise ValueError(f"seconds: found {seconds}")
        except ValueError as error:
            return web.Response(status=400, text=f"{error}; after is a whole number, and seconds a number")
        if requests >= MOST_REQUESTS:
            return web.Response(status=503, text=f"{MOST_REQUESTS} requests wait already", headers={"Retry-After": "1"})
        requests += 1
        metrics.wait(requests)
        try:
            found = await feed.after(epoch, place, min(max(0.0, seconds), MOST_SECONDS))
            answer, sent = await _answer(request, msgspec.msgpack.encode(found))
        finally:
            requests -= 1
            metrics.wait(requests)
        if sent:
            # Who has no place yet is told that it lacks what was before.
            metrics.hand_over(
                len(found.parts), sum(len(part.lines) for part in found.parts), gap=found.gap and epoch != ""
            )
        return answer

    async def plan(request: web.Request) -> web.Response:
        if (refused := refusal(request)) is not None:
            return refused
        # What it says is read where it is: whoever asks can only have it read sooner.
        feed.plan_written.set()
        return web.Response(status=204)

    return [web.get(PARTS_PATH, parts), web.post(PLAN_PATH, plan)]


async def _answer(request: web.Request, body: bytes) -> tuple[web.StreamResponse, bool]:
    """Answer a consumer that may have stopped to read; False if it did."""
    response = web.StreamResponse(headers={"Content-Type": "application/msgpack"})
    response.content_length = len(body)
    try:
        async with asyncio.timeout(_SEND_SECONDS):
            await response.prepare(request)
            await response.write(body)
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
        return response, False
    return response, True
