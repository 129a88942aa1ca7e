"""The client of the Serve app."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
)

SESSION_HEADER = "x-session-id"
"""Requests with the same value go to the same replica, where their prefix is cached."""

_CONNECT_SECONDS = 10.0
_MESSAGE_CHARACTERS = 2000


class ServeClient:
    """Generates over HTTP, at most `limit` requests at once; an async context manager.

    A connection carries one request at a time, so `limit` bounds both. Time limits and retries are the caller's:
    cancelling a call closes its connection, which aborts the generation.
    """

    def __init__(self, url: str, *, limit: int, token: str | None = None) -> None:
        """`token` is sent as a bearer token."""
        self._url = url.rstrip("/")
        self._limit = limit
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._limit, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            auto_decompress=False,
            # The only cookies are a load balancer's, and affinity goes by header here.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence.

        Raises:
            PolicyUnavailable: No connection, a broken one, an answer of 429 or 5xx, or one that is not a result.
            PolicyRefused: An answer of any other 4xx.
        """
        status, content_type, body = await self._send(
            "POST",
            "/v1/generate",
            data=wire.encode_request(request),
            headers={"content-type": wire.MSGPACK, SESSION_HEADER: request.session_id},
        )
        if status == 200:
            try:
                return wire.decode_result(body, wire.media_type(content_type))
            except wire.WireError as error:
                raise PolicyUnavailable(f"{self._url}: {error}") from error
        raise _refusal(self._url, status, body)

    async def info(self) -> EngineInfo:
        """What the endpoint serves.

        Raises:
            PolicyUnavailable: It does not say.
        """
        status, _, body = await self._send("GET", "/info")
        try:
            if status == 200:
                return msgspec.json.decode(body, type=EngineInfo)
        except msgspec.DecodeError as error:
            raise PolicyUnavailable(f"{self._url}/info: not a KubeRoll endpoint: {error}") from error
        raise PolicyUnavailable(str(_refusal(self._url, status, body)))

    async def wait_ready(self, seconds: float, *, interval: float = 0.25) -> EngineInfo:
        """Wait until the endpoint can generate.

        Raises:
            PolicyUnavailable: It could not within so many seconds; says what it answered last.
        """
        last = "no answer"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        status, _, body = await self._send("GET", "/healthz")
                        if status == 200:
                            return await self.info()
                        last = str(_refusal(self._url, status, body))
                    except PolicyUnavailable as error:
                        last = str(error)
                    await asyncio.sleep(interval)
        except TimeoutError as error:
            raise PolicyUnavailable(f"{self._url} was not ready within {seconds:g} s: {last}") from error

    async def _send(self, method: str, path: str, **options: Any) -> tuple[int, str | None, bytes]:
        if self._session is None:
            raise RuntimeError("a ServeClient is used inside `async with`")
        try:
            async with self._session.request(method, self._url + path, **options) as response:
                return response.status, response.headers.get("content-type"), await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise PolicyUnavailable(f"{self._url}: {type(error).__name__}: {error}") from error


def _refusal(url: str, status: int, body: bytes) -> PolicyRefused | PolicyUnavailable:
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = body.decode(errors="replace").strip()
    text = f"{url} answered {status}: {message[:_MESSAGE_CHARACTERS]}"
    refused = 400 <= status < 500 and status not in (408, 429)
    return PolicyRefused(text) if refused else PolicyUnavailable(text)
