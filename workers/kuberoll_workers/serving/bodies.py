"""The bodies of requests, read within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES: Final = 16 << 20
"""A prompt of a million token ids as JSON is half of it."""

BODY_SECONDS: Final = 60.0
"""Within which the whole of a body must come."""


class BodyRefused(Exception):
    """A body that is too large, or comes too slowly.

    Attributes:
        status: 413 or 408.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES, seconds: float = BODY_SECONDS) -> bytes:
    """The whole body of a request.

    Raises:
        BodyRefused: It has more than `max_bytes` bytes, or was not there within so many seconds.
        starlette.requests.ClientDisconnect: The caller is gone.
    """
    too_large = BodyRefused(413, f"the body has more than {max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        raise BodyRefused(408, f"the body was not there within {seconds:g} s") from error
    return b"".join(parts)
