"""JSON over HTTP to the servers of other libraries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp
import orjson

from kuberoll_workers.data.causes import Evidence
from kuberoll_workers.environments.interface import Unavailable
from kuberoll_workers.network.connections import tcp_connector

CONNECT_SECONDS: Final = 20.0
"""Default time that a server which refuses connections is waited for: less than the default of stepTimeoutSeconds."""

_Result = TypeVar("_Result")

_CONNECT_SECONDS = 30.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_SHOWN = 500


class ServerError(RuntimeError):
    """A server cannot be reached, or refused a request; the message names its address."""


class Unreachable(Unavailable, ServerError):
    """There is no connection: nothing was sent."""

    reason = "EnvironmentUnreachable"


class Disconnected(Unavailable, ServerError):
    """The connection broke, or the session is lost: what became of a request is unknown."""

    reason = "EnvironmentUnreachable"


class Overloaded(Unavailable, ServerError):
    """It, or what is in front of it, cannot answer now."""

    reason = "EnvironmentUnreachable"


# Request timeouts, too many requests, and what servers and gateways say when they are overloaded or restart; a 500 is
# how FastAPI says that the environment's code has raised an exception.
OVERLOADED: Final = frozenset({408, 425, 429, 502, 503, 504, 529})


async def patiently(ask: Callable[[], Awaitable[_Result]], seconds: float) -> _Result:
    """The result of `ask`, which is called again while the server cannot be reached, as when it is started again.

    Args:
        seconds: Time after which it is not.

    Raises:
        Unreachable: It could not be reached for so long.
    """
    clock = asyncio.get_running_loop().time
    deadline, pause = clock() + seconds, _SHORTEST_PAUSE
    while True:
        try:
            return await ask()
        except Unreachable:
            if clock() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE, 2 * pause)


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer.

    Attributes:
        url: Of the request.
        cookies: Cookies of the request, with those that the server has set.
    """

    url: str
    status: int
    body: bytes
    cookies: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """The body's value.

        Raises:
            ServerError: It is not JSON.
        """
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise self.error() from error

    def error(self) -> ServerError:
        """An error with the status and the beginning of the body."""
        text = f"{self.url} answered {self.status}: {self.text[:_SHOWN]}"
        if self.status in OVERLOADED:
            return Overloaded(text, evidence=Evidence(http_status=self.status))
        return ServerError(text)


async def post(url: str, value: Any, cookies: Mapping[str, str]) -> Answer:
    """Send a JSON value.

    There is no time limit: the environment's step has one. A connection is not kept, because calls of an environment
    in a process of its own have an event loop each.

    Raises:
        Unreachable: There is no connection.
        ServerError: No complete answer came.
    """
    headers = {"Content-Type": "application/json"}
    if cookies:
        # As the server has written them: its quotes are part of a signature.
        headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    return await _ask("POST", url, cookies, data=orjson.dumps(value), headers=headers)


async def get(url: str) -> Answer:
    """Ask for what a server has, without cookies.

    Raises:
        Unreachable: There is no connection.
        ServerError: No complete answer came.
    """
    return await _ask("GET", url, {})


async def _ask(method: str, url: str, cookies: Mapping[str, str], **request: Any) -> Answer:
    try:
        async with (
            aiohttp.ClientSession(
                connector=tcp_connector(limit=1),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            ) as session,
            session.request(method, url, **request) as response,
        ):
            body = await response.read()
            new = {name: morsel.coded_value for name, morsel in response.cookies.items()}
            return Answer(url, response.status, body, {**cookies, **new})
    except (aiohttp.ClientError, OSError) as error:
        raise failed(url, error) from error


def failed(url: str, error: aiohttp.ClientError | OSError) -> ServerError:
    """What to raise for a request without an answer."""
    kind = Unreachable if isinstance(error, aiohttp.ClientConnectorError) else Disconnected
    return kind(f"{url}: {reason_of(error)}")


def reason_of(error: aiohttp.ClientError | OSError) -> str:
    """Why there is no answer, without the address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    words = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error)
    return words or type(error).__name__
