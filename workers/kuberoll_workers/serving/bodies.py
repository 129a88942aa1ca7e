"""Request bodies, read within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES: Final = 16 << 20
"""A prompt of a million token ids as JSON takes half of this."""

BODY_SECONDS: Final = 60.0
"""Time limit for a whole body, seconds."""

GRACE_SECONDS: Final = 10.0
LEAST_BYTES_A_SECOND: Final = 64 << 10
"""After some seconds a body must have arrived at this rate."""


class BodyRefused(Exception):
    """A body that is too large or arrives too slowly.

    Attributes:
        status: HTTP status, 413 or 408.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(
    request: Request,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    seconds: float = BODY_SECONDS,
    grace: float = GRACE_SECONDS,
    arrived: Callable[[int], None] | None = None,
) -> bytes:
    """Read the whole body of a request.

    Args:
        grace: Seconds after which it must have arrived at `LEAST_BYTES_A_SECOND`.
        arrived: Called with the size of each part.

    Raises:
        BodyRefused: It has more than `max_bytes` bytes, did not arrive within `seconds`, or arrived too slowly.
        starlette.requests.ClientDisconnect: The client has disconnected.
    """
    too_large = BodyRefused(413, f"the body has more than {max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    parts, size = [], 0
    began = asyncio.get_running_loop().time()
    limit = asyncio.timeout_at(began + min(seconds, grace))
    try:
        async with limit:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
                if arrived is not None and part:
                    arrived(len(part))
                limit.reschedule(began + min(seconds, grace + size / LEAST_BYTES_A_SECOND))
    except TimeoutError as error:
        if not limit.expired():
            raise
        took = asyncio.get_running_loop().time() - began
        raise BodyRefused(408, f"the body did not arrive within {took:.3g} s: {size:,} bytes came") from error
    return b"".join(parts)
