"""The entrance of a replica: a request takes a place when all of it has arrived, and what it takes is its session's."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kuberoll_workers.policy.auth import AccessDenied
from kuberoll_workers.serving.arrivals import MAX_WAITING, Arrival, Arrivals, Calls
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.spending import CALL_SECONDS, Spending, body_seconds

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("ray.serve")

_POLICY_VIOLATION: Final = 1008
_RETRY: Final = {"retry-after": "1"}
_REFUSAL_SECONDS: Final = 1.0
_LONGEST_SLEEP_SECONDS: Final = 1.0
_LONG_WAIT_SECONDS: Final = 5.0
# What is left of a body that was refused is not read.
_CLOSE: Final = {"connection": "close"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an entrance knows of the replica behind it.

    Attributes:
        authorize: Checks that a request may use its path; raises AccessDenied.
        session: The open session to which a call of a path belongs; None: to none.
        spender: The session whose own token a request has; None: it has another's.
        health: The answer to health checks, which take no place.
        calls: Counts the calls of sessions.
        spending: Counts the time that they spend.
    """

    authorize: Callable[[Request, str], None]
    session: Callable[[str], str | None]
    spender: Callable[[Request, str], str | None]
    health: Callable[[], Awaitable[Response]]
    calls: Calls
    spending: Spending = field(default_factory=Spending)


@dataclass(frozen=True, slots=True)
class Entrance:
    """ASGI middleware around a server that bounds the requests that it works on, such as Ray Serve.

    A request that has not arrived takes no place: its body is read here, within limits of time, rate and size, and of
    what each caller and all of them may have (`Arrivals`). A session has no more calls under way than its share
    (`Calls`), those whose bodies arrive among them, and spends no more time than its share (`Spending`); its others
    wait without being read. WebSockets are refused.

    Attributes:
        rules: None: bodies are read, and nothing else is known.
    """

    app: ASGIApp
    _: KW_ONLY
    rules: Rules | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "websocket":
            await receive()
            # Before the handshake is accepted: the answer is 403.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        # Serve's own paths say how it is, and nothing of a caller.
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        path = scope["path"].rstrip("/") or "/"
        spender = None
        if self.rules is not None:
            if (request.method, path) == ("GET", "/healthz"):
                await (await self.rules.health())(scope, receive, send)
                return
            try:
                self.rules.authorize(request, path)
            except AccessDenied as error:
                kind = "Unauthorized" if error.status == 401 else "Forbidden"
                await _error(error.status, kind, str(error), _CLOSE)(scope, receive, send)
                return
            session = self.rules.session(path) if request.method == "POST" else None
            if session is not None:
                await self._in_turn(request, send, session, self.rules)
                return
            if (spender := self.rules.spender(request, path)) is not None:
                await _pay(self.rules.spending, spender)
        if not _has_body(request):
            await self.app(scope, receive, send)
            return
        await self._arrived(request, send, None, spender)

    async def _in_turn(self, request: Request, send: Send, session: str, rules: Rules) -> None:
        """Answer a call of a session when it is its turn; until then its body is not even read."""
        calls = rules.calls
        begun = await _begun(calls, session)
        if not begun:
            # Not at once: who asks again in the same moment takes the time of all.
            await asyncio.sleep(_REFUSAL_SECONDS)
            message = f"{MAX_WAITING:,} calls of this session wait already"
            await _error(429, "TooManyCalls", message, {**_CLOSE, **_RETRY})(request.scope, request.receive, send)
            return
        try:
            await _pay(rules.spending, session)
            await self._arrived(request, send, session, session)
        finally:
            calls.end(session)

    async def _arrived(self, request: Request, send: Send, session: str | None, spender: str | None) -> None:
        loop = asyncio.get_running_loop()
        arrival: Arrival | None = None
        # What is still to be counted.
        spending = None if self.rules is None else self.rules.spending
        try:
            try:
                # Entered first: where there is no room, a body is dropped as it begins.
                async with asyncio.timeout(None) as dropped:
                    arrival = self.arrivals.begin(
                        session or _caller(request),
                        lambda: dropped.reschedule(loop.time()),
                        bounded=session is not None,
                    )
                    body = await read_body(request, arrived=partial(self.arrivals.add, arrival))
                    if not arrival.counted:
                        # It was here already, so that nothing was awaited.
                        raise TimeoutError
                    self.arrivals.complete(arrival)
            except ClientDisconnect:
                return
            except BodyRefused as error:
                await _error(error.status, "BodyRefused", str(error), _CLOSE)(request.scope, request.receive, send)
                return
            except TimeoutError:
                if arrival is None or arrival.counted:
                    raise
                await _too_many(arrival)(request.scope, request.receive, send)
                return
            if spending is not None and spender is not None:
                # Before it is parsed: of several bodies that came at once, all but the first wait here.
                if not await _pay(spending, spender, body_seconds(len(body)), request.receive):
                    return
                spending = None
            await self.app(request.scope, _replayed(body, request.receive), send)
        finally:
            if arrival is not None:
                if spending is not None and spender is not None:
                    spending.spend(spender, body_seconds(arrival.size), loop.time())
                self.arrivals.end(arrival)


async def _begun(calls: Calls, session: str) -> bool:
    """Wait until it is a call's turn; False: too many wait.

    That its caller has left is noticed when it is its turn: nothing is read before.
    """
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()

    def start() -> None:
        if not turn.done():
            turn.set_result(None)

    if calls.waiting_of(session) >= MAX_WAITING:
        return False
    if calls.begin(session, loop.time(), start):
        return True
    try:
        await turn
    except asyncio.CancelledError:
        if not calls.withdraw(session, start):
            calls.end(session)
        raise
    return True


async def _pay(spending: Spending, session: str, seconds: float = CALL_SECONDS, receive: Receive | None = None) -> bool:
    """Wait until a session may spend time, and count it; False: its caller has left, and nothing is counted.

    Args:
        receive: Of a request whose body has arrived, by which that is noticed; None: it is not.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    delay = spending.delay(session, loop.time())
    while delay > 0:
        # Its share grows when others stop.
        if await _leaves_within(receive, min(delay, _LONGEST_SLEEP_SECONDS)):
            return False
        # Others of its requests may have waited for the same moment.
        delay = spending.delay(session, loop.time())
    spending.spend(session, seconds, loop.time())
    if (waited := loop.time() - began) >= _LONG_WAIT_SECONDS and spending.report(loop.time()):
        _log.warning(
            "a request of session %s has waited %.3g s: beside %d other sessions, it sends more than its part of what "
            "this replica can read (at most one such line in 10 s)",
            session, waited, spending.others(session),
        )  # fmt: skip
    return True


async def _leaves_within(receive: Receive | None, seconds: float) -> bool:
    """Wait so long; True: the caller of a request has left before."""
    if receive is None:
        await asyncio.sleep(seconds)
        return False
    try:
        async with asyncio.timeout(seconds):
            if (await receive())["type"] == "http.disconnect":
                return True
            await asyncio.sleep(seconds)
    except TimeoutError:
        pass
    return False


def proxy_middlewares() -> list[Middleware]:
    """Middlewares of Ray Serve's own proxy, which knows nothing of sessions; Serve finds them by name."""
    from starlette.middleware import Middleware

    return [Middleware(Entrance)]


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _caller(request: Request) -> str:
    shown = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    return hashlib.blake2b(shown.encode(), digest_size=16).hexdigest()


def _replayed(body: bytes, receive: Receive) -> Receive:
    bodies = iter([body])

    async def receive_again() -> Message:
        for whole in bodies:
            return {"type": "http.request", "body": whole, "more_body": False}
        return await receive()

    return receive_again


def _too_many(arrival: Arrival) -> Response:
    whose = "this session sends" if arrival.caller.bounded else "callers send"
    message = f"{whose} more bodies at once than this server holds, and this one, of {arrival.size:,} bytes so far, "
    return _error(429, "TooManyBodies", f"{message}was among the oldest that had not arrived", {**_CLOSE, **_RETRY})


def _error(status: int, kind: str, message: str, headers: dict[str, Any]) -> Response:
    content = msgspec.json.encode({"error": {"type": kind, "message": message}})
    return Response(content, status_code=status, media_type="application/json", headers=headers)
