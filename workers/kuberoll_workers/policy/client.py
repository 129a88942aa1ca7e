"""The client of the Serve app."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import aiohttp
import msgspec

from kuberoll_workers.data.causes import NO_EVIDENCE, Evidence, error_name
from kuberoll_workers.network.connections import tcp_connector
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.agent_sessions import AgentSession, ClosedSession, SessionSettings
from kuberoll_workers.policy.headers import COMMIT_HEADER, LOAD_HEADER, SESSION_HEADER
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    Silent,
)
from kuberoll_workers.policy.readiness import wait_until_ready

_Body = TypeVar("_Body")

_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 10.0
_MESSAGE_CHARACTERS = 2000


class Busy(PolicyUnavailable):
    """The endpoint works, and has no place for this request now.

    Attributes:
        retry_after: Seconds after which to retry; None if the response does not say.
    """

    reason = "PolicyOverloaded"

    def __init__(self, message: str, *, retry_after: float | None = None, evidence: Evidence = NO_EVIDENCE) -> None:
        super().__init__(message, evidence=evidence)
        self.retry_after = retry_after


class Overloaded(Busy):
    """The endpoint is overloaded: it works, and generated nothing for this request."""


class SessionsFull(Busy):
    """The replica has no place for one more session; it works, and takes other requests."""


class Unreachable(PolicyUnavailable):
    """The endpoint could not be connected to; nothing was sent."""

    reason = "PolicyUnreachable"


class Broken(PolicyUnavailable):
    """The connection to the endpoint broke; what became of the request is unknown."""

    reason = "PolicyUnreachable"


class OtherModel(Unreachable):
    """The endpoint has another commit of the model than the one that is asked for: it is as if it were not there."""


class ServeClient:
    """Generates over HTTP, at most `limit` requests at once; an async context manager.

    A connection carries one request at a time, so `limit` bounds both. Time limits and retries are the caller's:
    cancelling a call closes its connection, which aborts the generation.

    Attributes:
        load: Number of other requests at the endpoint when it sent its newest response; None if unknown.
    """

    def __init__(self, url: str, *, limit: int, token: str | None = None, commit: str | None = None) -> None:
        """
        Args:
            token: Sent as a bearer token.
            commit: The model's at the hub, without which nothing is taken; None: whichever there is.
        """
        self._commit = commit
        self._url = url.rstrip("/")
        self._limit = limit
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self.load: int | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=tcp_connector(limit=self._limit, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            auto_decompress=False,
            # The only cookies are a load balancer's, and session affinity is by header here.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence.

        Raises:
            Overloaded: Status 429, or a 503 that does not come from the engine.
            Unreachable: No connection.
            OtherModel: It has another model; so for all calls.
            PolicyUnavailable: A broken connection, status 5xx, or a body that is not a result.
            PolicyRefused: Another status 4xx.
        """
        answer = await self._send(
            "POST",
            "/v1/generate",
            data=wire.encode_request(request),
            headers={"content-type": wire.MSGPACK, SESSION_HEADER: request.session_id},
        )
        if (load := answer.headers.get(LOAD_HEADER)) is not None and load.isdecimal():
            self.load = int(load)
        if answer.status == 200:
            try:
                return wire.decode_result(answer.body, wire.media_type(answer.headers.get("content-type")))
            except wire.WireError as error:
                raise PolicyUnavailable(f"{self._url}: {error}") from error
        raise _refusal(self._url, answer)

    async def open_session(self, settings: SessionSettings) -> AgentSession:
        """Open a session for an agent.

        Raises:
            SessionsFull: The replica has as many sessions as it takes.
            Overloaded, Unreachable, PolicyUnavailable, PolicyRefused: As `generate` does.
        """
        answer = await self._send("POST", "/sessions", data=msgspec.json.encode(settings))
        if answer.status == 201:
            return self._decode(answer, "/sessions", AgentSession)
        if answer.status == 429 and _error_type(answer.body) == "SessionRefused":
            refusal = _refusal(self._url, answer)
            raise SessionsFull(str(refusal), retry_after=_seconds(answer.headers.get("retry-after")))
        if answer.status == 404:
            raise PolicyRefused(f"{self._url} has no sessions, which agents need: it is of an older version")
        raise _refusal(self._url, answer)

    async def close_session(self) -> ClosedSession:
        """Close the session whose URL is this client's.

        Raises:
            PolicyUnavailable: The replica is gone, and with it what was sampled.
        """
        answer = await self._send("DELETE", "")
        if answer.status == 200:
            return self._decode(answer, "", ClosedSession)
        # Also where another replica has taken the address: it does not know the session.
        raise PolicyUnavailable(str(_refusal(self._url, answer)))

    async def check_health(self) -> None:
        """Check that the endpoint reports that it can generate.

        Raises:
            PolicyUnavailable: It does not; the message has the reason.
        """
        async with answering_within(self._url, _HEALTH_SECONDS):
            answer = await self._send("GET", "/healthz")
        if answer.status != 200:
            raise PolicyUnavailable(str(_refusal(self._url, answer)))

    async def info(self) -> EngineInfo:
        """Get the model and limits of the endpoint.

        Raises:
            PolicyUnavailable: It does not answer as KubeRoll's endpoints do.
        """
        answer = await self._send("GET", "/info")
        if answer.status == 200:
            return self._decode(answer, "/info", EngineInfo)
        raise PolicyUnavailable(str(_refusal(self._url, answer)))

    async def replicas(self) -> list[tuple[str, str]]:
        """Names and base URLs of the replicas behind the endpoint; empty if it has no such route.

        Raises:
            PolicyUnavailable: No response, or a malformed one.
        """
        answer = await self._send("GET", "/replicas")
        if answer.status == 404:
            return []
        if answer.status == 200:
            found = self._decode(answer, "/replicas", _Replicas).replicas
            return [(replica.id, replica.url) for replica in found]
        raise PolicyUnavailable(str(_refusal(self._url, answer)))

    async def wait_ready(
        self, seconds: float, *, interval: float = 0.25, trouble: Callable[[str], None] | None = None
    ) -> EngineInfo:
        """Wait until the endpoint can generate.

        Args:
            trouble: Called with the reason while it cannot.

        Raises:
            PolicyUnavailable: It was not ready in time; the message has the last reason.
        """
        return await wait_until_ready(self._url, self._ready, seconds=seconds, interval=interval, trouble=trouble)

    async def _ready(self) -> EngineInfo:
        await self.check_health()
        async with answering_within(self._url, _HEALTH_SECONDS):
            return await self.info()

    def _decode(self, answer: _Answer, path: str, kind: type[_Body]) -> _Body:
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.DecodeError as error:
            raise PolicyUnavailable(f"{self._url}{path}: not a KubeRoll endpoint: {error}") from error

    async def _send(self, method: str, path: str, **options: Any) -> _Answer:
        if self._session is None:
            raise RuntimeError("a ServeClient is used inside `async with`")
        with connection_errors(self._url):
            async with self._session.request(method, self._url + path, **options) as response:
                answer = _Answer(response.status, response.headers, await response.read())
        # With each answer: another replica may have taken the address at any time.
        check_commit(self._url, answer.headers.get(COMMIT_HEADER), self._commit)
        return answer


def check_commit(url: str, found: str | None, wanted: str | None) -> None:
    """Check that an endpoint has the wanted commit of the model, as far as both are known.

    Raises:
        OtherModel: It has another one.
    """
    if None not in (found, wanted) and found != wanted:
        raise OtherModel(
            f"{url} has the commit {found} of the model, and the run began with {wanted}: its branch has moved at the "
            f"hub. Set spec.generation.model.revision: {wanted}"
        )


@asynccontextmanager
async def answering_within(url: str, seconds: float) -> AsyncIterator[None]:
    """Limit the time of an exchange with an endpoint.

    Raises:
        Silent: It took longer.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Silent(f"{url}: no answer within {seconds:g} s") from error


@contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Convert the HTTP client's errors.

    Raises:
        Unreachable: No connection to the endpoint.
        PolicyUnavailable: A broken connection.
    """
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Unreachable(f"{url}: {_reason(error)}", evidence=_evidence(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise Broken(f"{url}: {_reason(error)}", evidence=_evidence(error)) from error


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionError) and cause.errno is not None:
        # The system's words alone: "connection refused". The address is known.
        return os.strerror(cause.errno).lower()
    return f"{type(error).__name__}: {error}"


def _evidence(error: Exception) -> Evidence:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return Evidence(error=error_name(cause.errno)) if isinstance(cause, OSError) else NO_EVIDENCE


class _Replica(msgspec.Struct):
    id: str
    url: str


class _Replicas(msgspec.Struct):
    replicas: list[_Replica]


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def _error_type(body: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(body)["error"]["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


def _refusal(url: str, answer: _Answer) -> PolicyRefused | PolicyUnavailable:
    status, body = answer.status, answer.body
    ours = True
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message, ours = body.decode(errors="replace").strip(), False
    text = f"{url} answered {status}: {message[:_MESSAGE_CHARACTERS]}"
    evidence = Evidence(http_status=status)
    # Errors of the engine have our format; those of a proxy without a replica, or of a full queue, do not.
    if status == 429 or (status == 503 and not ours):
        return Overloaded(text, retry_after=_seconds(answer.headers.get("retry-after")), evidence=evidence)
    # Serve has no route while the application is being redeployed.
    refused = 400 <= status < 500 and status != 408 and (status != 404 or ours)
    return PolicyRefused(text, evidence=evidence) if refused else PolicyUnavailable(text, evidence=evidence)


def _seconds(value: str | None) -> float | None:
    # It may be a date, too, which no server here sends.
    return float(value) if value is not None and value.strip().isdecimal() else None
