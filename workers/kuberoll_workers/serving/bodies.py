"""Request bodies, read within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES: Final = 16 << 20
"""A prompt of a million token ids as JSON takes half of this."""

BODY_SECONDS: Final = 60.0
"""Time limit for a whole body, seconds."""


class BodyRefused(Exception):
    """A body that is too large or arrives too slowly.

    Attributes:
        status: HTTP status, 413 or 408.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Request, *, max_bytes: int = MAX_BODY_BYTES, seconds: float = BODY_SECONDS) -> bytes:
    """Read the whole body of a request.

    Raises:
        BodyRefused: It has more than `max_bytes` bytes, or did not arrive within `seconds`.
        starlette.requests.ClientDisconnect: The client has disconnected.
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
        raise BodyRefused(408, f"the body did not arrive within {seconds:g} s") from error
    return b"".join(parts)
