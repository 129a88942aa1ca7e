"""JSON over HTTP to the servers of other libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

_CONNECT_SECONDS = 30.0
_SHOWN = 500


class ServerError(RuntimeError):
    """A server cannot be reached, or refused a request; the message names its address."""


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
        return ServerError(f"{self.url} answered {self.status}: {self.text[:_SHOWN]}")


async def post(url: str, value: Any, cookies: Mapping[str, str]) -> Answer:
    """Send a JSON value.

    There is no time limit: the environment's step has one. A connection is not kept, because calls of an environment
    in a process of its own have an event loop each.

    Raises:
        ServerError: No complete answer came.
    """
    headers = {"Content-Type": "application/json"}
    if cookies:
        # As the server has written them: its quotes are part of a signature.
        headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    try:
        async with (
            aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            ) as session,
            session.post(url, data=orjson.dumps(value), headers=headers) as response,
        ):
            body = await response.read()
            new = {name: morsel.coded_value for name, morsel in response.cookies.items()}
            return Answer(url, response.status, body, {**cookies, **new})
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"{url}: {reason_of(error)}") from error


def reason_of(error: aiohttp.ClientError | OSError) -> str:
    """Why there is no answer, without the address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    words = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error)
    return words or type(error).__name__
