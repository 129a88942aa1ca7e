"""The routes of sessions: `POST /sessions`, and below `/sessions/ID` vLLM's API, the state, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.openai_api import OpenAIRoutes
from kuberoll_workers.serving.sessions.store import SessionRefused, Sessions
from kuberoll_workers.serving.sessions.trajectories import trajectories

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PREFIX: Final = "/sessions"
_MAX_BODY_BYTES: Final = 64 << 10


class SessionRoutes:
    """The sessions of one replica, at its own address.

    The id is in the path, because agents can set the base URL of their client, but not its headers. Errors have the
    body `{"error": {"type", "message"}}`.
    """

    def __init__(self, api: OpenAIRoutes, *, replica: str, address: Callable[[], Awaitable[str | None]]) -> None:
        """
        Args:
            api: Answers the calls in sessions.
            replica: The replica's id.
            address: Finds the replica's own URL; None: it has none, and is reached at the policy's.
        """
        self._api, self._address = api, address
        self._sessions = Sessions(replica)

    def session_of(self, path: str, token: str) -> str | None:
        """The session to which a path belongs, open or closed; None: there is none, or the token is not its own."""
        identity, _ = _parts(path)
        return identity if self._sessions.opens(identity, token) else None

    def called(self, path: str) -> str | None:
        """The open session to which a call of a path belongs; None: there is none, or it is no call."""
        if not path.startswith(PREFIX + "/"):
            return None
        identity, inner = _parts(path)
        return identity if inner and self._sessions.is_open(identity) else None

    async def handle(self, request: Request, path: str) -> Response | None:
        """Respond to a request; None if it is for another route."""
        if path != PREFIX and not path.startswith(PREFIX + "/"):
            return None
        identity, inner = _parts(path)
        try:
            if not identity:
                return await self._open(request) if request.method == "POST" else None
            if inner:
                return await self._api.handle(request, inner, session=self._sessions.enter(identity))
            if request.method == "GET":
                return _json(200, self._sessions.find(identity).state())
            if request.method == "DELETE":
                session = self._sessions.close(identity)
                self._api.forget(identity)
                # Parsers take milliseconds for a long response, and nothing changes in a closed session.
                found = await asyncio.to_thread(trajectories, session, self._api.texts)
                return _json(200, {**session.state(), "trajectories": found})
        except SessionRefused as error:
            return _error(error.status, "SessionRefused", str(error))
        except BodyRefused as error:
            return _error(error.status, "BodyRefused", str(error))
        return None

    async def _open(self, request: Request) -> Response:
        body = await read_body(request, max_bytes=_MAX_BODY_BYTES)
        try:
            settings = msgspec.json.decode(body or b"{}", type=SessionSettings)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, "BadRequest", f"the body: {error}")
        session = self._sessions.open(settings)
        base = await self._address() or str(request.base_url).rstrip("/")
        url = f"{base}{PREFIX}/{session.identity}"
        return _json(
            201,
            {
                "id": session.identity,
                "url": url,
                "openai_base_url": f"{url}/v1",
                "anthropic_base_url": url,
                "token": session.token,
                "model": self._api.model,
                "idle_seconds": session.idle_seconds,
            },
        )


def _parts(path: str) -> tuple[str, str]:
    """The session's id in a path, and what follows it; empty where there is none."""
    identity, slash, inner = path.removeprefix(PREFIX).lstrip("/").partition("/")
    return identity, slash + inner


def _json(status: int, content: Any) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _error(status: int, kind: str, message: str) -> Response:
    return _json(status, {"error": {"type": kind, "message": message}})
