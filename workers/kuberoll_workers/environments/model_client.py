"""HTTP client of a served model, for environments: retries, a bound on concurrent requests, errors that explain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from kuberoll_workers.data.causes import Evidence, ReasonName
from kuberoll_workers.data.plain import printable
from kuberoll_workers.environments.interface import Unavailable
from kuberoll_workers.environments.served_models import ServedModel
from kuberoll_workers.network.connections import tcp_connector

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER = 16 << 20
"""Maximum size of an answer in bytes."""
CONNECT_SECONDS = 10.0
_SHOWN = 500
_DENIALS = (401, 403)
# Request timeouts, conflicts, too many requests, and what servers and gateways say when they are overloaded or restart.
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504, 529)


class ServerFailed(Exception):
    """A served model could not be used; the message names its URL and the reason."""


class ServerUnavailable(Unavailable, ServerFailed):
    """It was out of reach, overloaded, or answered what is no answer: nothing that the request could help."""


class ServerDenied(Unavailable, ServerFailed):
    """It refused the credentials."""

    reason: ClassVar[ReasonName] = "AccessRefused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of requests.

    Attributes:
        attempts: Attempts of one request.
        seconds: Time limit of one attempt.
        parallel: Maximum number of requests at the same time.
        backoff_seconds, max_backoff_seconds: Wait after the first failed attempt, which is doubled each time, and its
            maximum; also of what a server asks for with `Retry-After`.
    """

    attempts: int = 5
    seconds: float = 60.0
    parallel: int = 16
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 10.0


class ModelClient:
    """Client of one served model; an async context manager for use in one event loop."""

    def __init__(self, address: ServedModel, limits: RequestLimits, slots: asyncio.Semaphore | None = None) -> None:
        """`slots` bounds the requests of several clients together; None: of this one."""
        self._address = address
        self._root = address.url.removesuffix("/v1")
        self._limits = limits
        self._slots = slots or asyncio.Semaphore(limits.parallel)
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        # Only for the jitter of backoff.
        self._draw = random.Random()

    async def __aenter__(self) -> Self:
        import aiohttp

        token = self._address.token
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=tcp_connector(limit=self._limits.parallel),
                timeout=aiohttp.ClientTimeout(total=self._limits.seconds, sock_connect=CONNECT_SECONDS),
                headers={} if token is None else {"authorization": f"Bearer {token}"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def first_model(self) -> str:
        """Name of the first model that the server lists.

        Raises:
            ServerFailed: The server cannot be used, or lists none.
        """
        listed = await self.request("GET", "/v1/models")
        try:
            name = listed["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str) or not name:
            raise ServerFailed(f"{self._root}/v1/models lists no model: name it in config.model")
        return name

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON body; returns the decoded answer.

        Args:
            path: At the server, such as `/v1/chat/completions`.

        Raises:
            ServerFailed: The request was refused, or all attempts failed.
        """
        return await self.request("POST", path, msgspec.json.encode(body))

    async def request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Send a request; see `post`."""
        url = self._root + path
        for attempt in range(1, self._limits.attempts + 1):
            status, answer, wait = await self._attempt(method, url, body)
            if status == 200:
                try:
                    return msgspec.json.decode(answer)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ServerUnavailable(f"{url} did not answer with JSON: {_shown(answer)}") from error
            reason = _shown(answer) if status is None else f"HTTP status {status}: {_shown(answer)}"
            evidence = Evidence(http_status=status)
            if status in _DENIALS:
                raise ServerDenied(f"{url} refused the request with {reason}", evidence=evidence)
            if status is not None and status not in _TEMPORARY:
                raise ServerFailed(f"{url} refused the request with {reason}")
            if attempt == self._limits.attempts:
                raise ServerUnavailable(f"{url} failed {attempt} times; the last time: {reason}", evidence=evidence)
            doubled = self._limits.backoff_seconds * 2.0 ** min(attempt - 1, 30)
            longest = min(self._limits.max_backoff_seconds, max(doubled, wait))
            await asyncio.sleep(max(min(wait, longest), longest * self._draw.uniform(0.5, 1.0)))
        raise AssertionError

    async def _attempt(self, method: str, url: str, body: bytes | None) -> tuple[int | None, bytes, float]:
        """Status, body, and the seconds to wait that the server asks for; the status is None without an answer."""
        import aiohttp

        assert self._session is not None
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with (
                self._slots,
                # A redirect would carry the token elsewhere.
                self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                answer = await response.content.read(MAX_ANSWER + 1)
                while len(answer) <= MAX_ANSWER and (chunk := await response.content.read(MAX_ANSWER + 1)):
                    answer += chunk
                if len(answer) > MAX_ANSWER:
                    raise ServerFailed(f"{url} answers with more than {MAX_ANSWER >> 20} MiB")
                return response.status, answer, _seconds(response.headers.get("retry-after"))
        except TimeoutError:
            return None, f"no answer within {self._limits.seconds:g} s".encode(), 0.0
        except (aiohttp.ClientError, OSError) as error:
            return None, (str(error) or type(error).__name__).encode(errors="replace"), 0.0


def _seconds(header: str | None) -> float:
    """Seconds of a `Retry-After` header; 0 if it has none, or names a date."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < 1e6 else 0.0


def _shown(answer: bytes) -> str:
    return printable(answer[:_SHOWN].decode(errors="replace")).strip() or "an empty body"
