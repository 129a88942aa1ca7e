"""An ASGI application's answer as a response of Ray Serve."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from starlette.responses import Response

from kuberoll_workers.serving.openai_api.exchange import Exchange

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Mounted(Response):
    """The answer of an application to one request, whose body has been read.

    Headers that are set on it are added to those of the application.
    """

    def __init__(self, application: ASGIApp, body: bytes, *, path: str, exchange: Exchange) -> None:
        """
        Args:
            path: Path that the application sees.
            exchange: Records what is sent.
        """
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.background = None
        self._application, self._request_body, self._path = application, body, path
        self._exchange = exchange
        self._context: Callable[[], AbstractContextManager[None]] = nullcontext

    def while_sent(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the answer, and send it, within a context."""
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bodies = iter([self._request_body])

        async def receive_again() -> Message:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        succeeds = False

        async def send_with_headers(message: Message) -> None:
            nonlocal succeeds
            if message["type"] == "http.response.start":
                succeeds = message["status"] == 200
                message = {**message, "headers": [*message.get("headers", ()), *self.raw_headers]}
            elif succeeds:
                # Before it is sent: the caller may go on, or close the session, as soon as it has the last byte.
                self._exchange.record_sent()
            await send(message)

        inner = {**scope, "path": self._path, "raw_path": self._path.encode(), "root_path": "", "app_root_path": ""}
        try:
            with self._context():
                await self._application(inner, receive_again, send_with_headers)
        finally:
            self._exchange.end()
