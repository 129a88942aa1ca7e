"""One server of an environment, as a worker sees it."""

from __future__ import annotations

import asyncio
import io
import os
from typing import Final

import aiohttp
from yarl import URL

from kuberoll_workers.environments import messages
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.remote.addresses import Address
from kuberoll_workers.environments.remote.balance import Rest
from kuberoll_workers.network.connections import tcp_connector

_CONNECT_SECONDS: Final = 10.0
# Less than servers usually keep idle connections open: none is to be closed under a request.
_KEEP_ALIVE_SECONDS: Final = 4.0
_CHUNK: Final = 1 << 16
# aiohttp writes a body of bytes at once.
_LARGE_BODY: Final = 1 << 20


class ConnectionLost(Exception):
    """The server is gone, or does not answer: whether it has done what it was asked to is unknown."""


class Replica:
    """Connections to one server, and what is known about it.

    Attributes:
        up: It answers.
        accepting: It begins new episodes and calls: it is not draining and still listed.
        listed: Its address is still named by its source.
        calls: Time limits of the calls that wait for it.
        episodes: Number of open episodes that it holds for this worker.
        failures: Number of health checks that failed since one succeeded.
        rest: Its pause, after it was lost or busy.
    """

    def __init__(self, address: Address, *, token: str | None) -> None:
        self.address = address
        self.up = False
        self.accepting = True
        self.listed = True
        self.info: protocol.Info | None = None
        self.calls: set[asyncio.Timeout] = set()
        self.episodes = 0
        self.failures = 0
        self.rest = Rest()
        headers = {"User-Agent": "kuberoll"}
        if address.host is not None:
            headers["Host"] = address.host
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connector: aiohttp.BaseConnector
        if address.socket is not None:
            connector = aiohttp.UnixConnector(address.socket, limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        else:
            connector = tcp_connector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )
        self._token = token
        self._urls: dict[str, URL] = {}

    @property
    def parallel(self) -> int:
        """Number of calls that are worth sending at a time."""
        return 1 if self.info is None else max(1, self.info.parallel)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a `GET`.

        Raises:
            ConnectionLost: The server is gone.
            InvalidMessage: The body is too large.
        """
        return await self._request("GET", path, None, {})

    async def post(self, path: str, body: bytes, *, seconds: float) -> tuple[int, bytes]:
        """Status and body of a `POST`.

        Args:
            seconds: Time that the environment is given.

        Raises:
            ConnectionLost: The server is gone.
            InvalidMessage: The answer is that to another call, or its body is too large.
        """
        headers = {
            "Content-Type": "application/json",
            protocol.TIMEOUT_HEADER: f"{seconds:g}",
            protocol.CALL_HEADER: os.urandom(16).hex(),
        }
        return await self._request("POST", path, body, headers)

    def lose(self) -> None:
        """End the calls that wait for it: it is gone."""
        self.up = False
        now = asyncio.get_running_loop().time()
        for scope in self.calls:
            if not scope.expired():
                scope.reschedule(now)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(f"{self.address.url}{path}")
        sent = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
        try:
            async with self._session.request(
                method, url, data=sent, headers=headers, allow_redirects=False
            ) as response:
                _check_call(response, headers.get(protocol.CALL_HEADER))
                data = await _body(response)
                # Errors end up in messages, and a server or a proxy may show what it was sent.
                return response.status, data if response.status == 200 else without_token(data, self._token)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise
            text = without_token(f"{self.address.url}: {type(error).__name__}: {error}".encode(), self._token)
            raise ConnectionLost(text.decode()) from error


def without_token(data: bytes, token: str | None) -> bytes:
    """The data, with something else in place of a token."""
    return data.replace(token.encode(), b"[token]") if token else data


def _check_call(response: aiohttp.ClientResponse, call: str | None) -> None:
    """Reject an answer that is not the one to this call, and the connection that brought it.

    Other statuses are those of proxies, too, and carry no results.

    Raises:
        InvalidMessage: It is not.
    """
    named = response.headers.get(protocol.CALL_HEADER)
    if call is not None and response.status in (200, protocol.STATUS_FAULT) and named != call:
        response.close()
        found = "has no" if named is None else "names another call in"
        raise messages.InvalidMessage(
            f"its answer {found} {protocol.CALL_HEADER}, which must repeat that of the request"
        )


async def _body(response: aiohttp.ClientResponse) -> bytes:
    size = response.content_length
    if size is not None:
        if size > messages.MAX_BYTES:
            raise messages.InvalidMessage(f"it announced a message of {size} bytes")
        return await response.read()
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        data += chunk
        if len(data) > messages.MAX_BYTES:
            raise messages.InvalidMessage(f"its message has more than {messages.MAX_BYTES} bytes")
    return bytes(data)
