"""Client of an externally managed endpoint; it detects the protocol."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import aiohttp
import msgspec

from kuberoll_workers.data.causes import Evidence
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.network.connections import tcp_connector
from kuberoll_workers.policy.agent_sessions import AgentSession, SessionSettings
from kuberoll_workers.policy.client import Overloaded, ServeClient, answering_within, connection_errors
from kuberoll_workers.policy.external.completions import (
    BARE,
    EXTENDED,
    completion_body,
    completion_result,
)
from kuberoll_workers.policy.external.sglang import generate_body, generate_result
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    InvalidAnswer,
    PolicyRefused,
    PolicyUnavailable,
)
from kuberoll_workers.policy.readiness import wait_until_ready

Api = Literal["Auto", "KubeRoll", "OpenAI"]

_CONNECT_SECONDS = 10.0
_ASKING_SECONDS = 30.0
_MESSAGE_CHARACTERS = 2000
# The server works, and generated nothing for this request.
_OVERLOADED = (429, 503, 529)
# Statuses for unknown fields, and for other errors.
_NOT_UNDERSTOOD = (400, 422)
# Fields with the length of the context window, in the order of preference.
_WINDOWS = ("max_model_len", "context_length", "context_window")


@dataclass(slots=True, kw_only=True)
class _Server:
    """The detected properties of a server.

    Attributes:
        engine: Name for messages.
        window: Context window in tokens.
        native: It is SGLang, with its own route.
        structured: It honors vLLM's field for structured outputs.
        dialect: The fields that its completions are requested with.
        proven: It has answered in that dialect, so a later refusal is of the request itself.
    """

    model: str
    engine: str
    window: int
    native: bool
    structured: bool
    dialect: int = EXTENDED
    proven: bool = False


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Decode the body; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class ExternalClient:
    """Generates at one externally managed endpoint; an async context manager.

    Its protocol is detected on first use: KubeRoll's own, SGLang's, or OpenAI's completions. Time limits and retries
    are the caller's: cancelling a call closes its connection, which ends the generation there.
    """

    def __init__(
        self,
        url: str,
        *,
        api: Api,
        model: str | None,
        api_key: str | None,
        limit: int,
        tokenizer: Tokenizer | None = None,
        window: int | None = None,
    ) -> None:
        """Store the settings; nothing is sent before the first use.

        Args:
            url: With or without the `/v1` that OpenAI's clients are given.
            model: Its name at an OpenAI-compatible server; None: the first that it lists.
            api_key: Sent as a bearer token.
            limit: Maximum number of concurrent requests.
            tokenizer: Encodes the texts of servers that return no token ids; None: such servers are refused.
            window: Context window in tokens, for servers that do not report it.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api = api
        self._model = model
        self._key = api_key
        self._limit = limit
        self._tokenizer = tokenizer
        self._window = window
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._probe_lock = asyncio.Lock()
        self._serve_client: ServeClient | None = None
        self._server: _Server | None = None

    @property
    def load(self) -> int | None:
        """Number of other requests at the endpoint when it sent its newest response; None if unknown."""
        return None if self._serve_client is None else self._serve_client.load

    async def __aenter__(self) -> Self:
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=tcp_connector(limit=self._limit, keepalive_timeout=60.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers={} if self._key is None else {"authorization": f"Bearer {self._key}"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence; `exact` is False if the server does not return the sampled token ids.

        Raises:
            Overloaded: Status 429, 503 or 529.
            Unreachable: No connection.
            PolicyUnavailable: A broken connection, another status 5xx, or a body that is not a result.
            PolicyRefused: Another status 4xx, or a request that the server cannot serve.
        """
        found = await self._resolved()
        if isinstance(found, ServeClient):
            return await found.generate(request)
        prompt = len(request.token_ids)
        if prompt > found.window:
            raise PolicyRefused(f"the prompt has {prompt} tokens, the server's window {found.window}")
        room = min(request.sampling.max_tokens, found.window - prompt)
        if room == 0:
            return GenerationResult(token_ids=token_array(), logprobs=array(LOGPROB_TYPE), finish_reason="length")
        if found.native:
            return await self._generate(request, room)
        return await self._complete(request, found, room)

    async def _generate(self, request: GenerationRequest, room: int) -> GenerationResult:
        answer = await self._post("/generate", request, generate_body(request, room=room))
        if answer.status != 200:
            raise _refusal(self._url, answer)
        with _naming(self._url):
            return generate_result(answer.body, structured=request.sampling.structured_outputs is not None)

    async def _complete(self, request: GenerationRequest, server: _Server, room: int) -> GenerationResult:
        dialect, answer = server.dialect, None
        while True:
            try:
                body = completion_body(
                    request, model=server.model, room=room, dialect=dialect, structured=server.structured
                )
            except PolicyRefused as error:
                # The server may have refused the value of the field, not the field.
                words = "" if answer is None else f". {_refusal(self._url, answer)}"
                raise PolicyRefused(f"{error}{words}") from error
            answer = await self._post("/v1/completions", request, body)
            if answer.status not in _NOT_UNDERSTOOD or server.proven or dialect == BARE:
                break
            # It may be a field that is not OpenAI's: use fewer fields, until the server has answered once.
            dialect += 1
        if answer.status != 200:
            raise _refusal(self._url, answer)
        server.dialect, server.proven = dialect, True
        with _naming(self._url):
            return completion_result(
                answer.body,
                stop=request.sampling.stop,
                tokenizer=self._tokenizer,
                structured=request.sampling.structured_outputs is not None,
            )

    async def open_session(self, settings: SessionSettings) -> AgentSession:
        """Open a session, if KubeRoll's own server is behind the endpoint.

        Raises:
            Overloaded, Unreachable, PolicyUnavailable: As `generate` does.
            PolicyRefused: It is another server.
        """
        server = await self._resolved()
        if isinstance(server, ServeClient):
            return await server.open_session(settings)
        raise PolicyRefused(
            f"{self._url}: agents need the sessions of KubeRoll's own server, and this one is another; use another "
            "spec.generation.backend, or environments without an agent"
        )

    async def check_health(self) -> None:
        """Check that the endpoint reports that it can generate.

        Raises:
            PolicyUnavailable: It does not; the message has the reason.
            PolicyRefused: See `info`.
        """
        async with answering_within(self._url, _ASKING_SECONDS):
            found = await self._resolved()
            if isinstance(found, ServeClient):
                await found.check_health()
                return
            answer = await self._send("GET", "/health")
            if answer.status in (404, 405):
                answer = await self._send("GET", "/v1/models")
        if answer.status != 200:
            raise PolicyUnavailable(f"not healthy: {_refusal(self._url, answer)}")

    async def info(self) -> EngineInfo:
        """Get the model and limits of the endpoint, as far as it reports them.

        Raises:
            PolicyUnavailable: It does not respond, or its protocol is unknown.
            PolicyRefused: It requires an API key, or the job lacks a setting; the message names it.
        """
        found = await self._resolved()
        if isinstance(found, ServeClient):
            return await found.info()
        return EngineInfo(
            model=found.model, engine=found.engine, max_model_len=found.window, vocab_size=0, policy_version=""
        )

    async def wait_ready(
        self, seconds: float, *, interval: float = 0.25, trouble: Callable[[str], None] | None = None
    ) -> EngineInfo:
        """Wait until the endpoint can generate.

        Args:
            trouble: Called with the reason while it cannot.

        Raises:
            PolicyUnavailable: It was not ready in time; the message has the last reason.
            PolicyRefused: Waiting would not help: see `info`.
        """
        return await wait_until_ready(self._url, self._ready, seconds=seconds, interval=interval, trouble=trouble)

    async def _ready(self) -> EngineInfo:
        info = await self.info()
        await self.check_health()
        return info

    async def _resolved(self) -> ServeClient | _Server:
        found = self._serve_client or self._server
        if found is not None:
            return found
        async with self._probe_lock:
            found = self._serve_client or self._server
            if found is None:
                found = await self._probe()
                if isinstance(found, ServeClient):
                    self._serve_client = await self._stack.enter_async_context(found)
                else:
                    self._server = found
            return found

    async def _probe(self) -> ServeClient | _Server:
        """Detect the protocol of the endpoint.

        Raises:
            PolicyUnavailable, PolicyRefused: See `info`.
        """
        if self._api == "KubeRoll" or (self._api == "Auto" and await self._is_kuberoll()):
            return ServeClient(self._url, limit=self._limit, token=self._key)
        answer = await self._send("GET", "/v1/models")
        if answer.status in (401, 403):
            raise PolicyRefused(
                f"{_refusal(self._url, answer)}\nSet spec.generation.external.apiKeyVariable to the environment "
                "variable that holds a key for it"
            )
        listed = _models(answer)
        if listed is None:
            # Some servers list no models; with a protocol and a model in the job they are accepted.
            if not (self._api == "OpenAI" and self._model is not None and answer.status in (404, 405)):
                raise PolicyUnavailable(f"{_refusal(self._url, answer)} (asked for /v1/models)")
            listed = []
        return await self._server_of(listed)

    async def _is_kuberoll(self) -> bool:
        answer = await self._send("GET", "/info")
        if answer.status >= 500:
            raise _refusal(self._url, answer)
        try:
            msgspec.json.decode(answer.body, type=EngineInfo)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return answer.status == 200

    async def _server_of(self, listed: Sequence[Mapping[str, Any]]) -> _Server:
        card = next((card for card in listed if self._model in (None, card["id"])), {})
        model = self._model or card.get("id")
        if model is None:
            raise PolicyUnavailable(f"{self._url}/v1/models lists no model")
        window = next((card[name] for name in _WINDOWS if isinstance(card.get(name), int)), self._window)
        if not window:
            raise PolicyRefused(
                f"{self._url} does not say how long a context {model} takes; set spec.rollout.maxSequenceLength"
            )
        owner = str(card.get("owned_by") or "")
        native = owner not in ("vllm", "kuberoll") and await self._is_sglang()
        engine = "sglang" if native else f"OpenAI-compatible ({owner})" if owner else "OpenAI-compatible"
        return _Server(model=model, engine=engine, window=window, native=native, structured=owner == "vllm")

    async def _is_sglang(self) -> bool:
        # The second is the older name.
        for path in ("/model_info", "/get_model_info"):
            answer = await self._send("GET", path)
            body = answer.json() if answer.status == 200 else None
            if isinstance(body, dict) and "model_path" in body and body.get("is_generation") is not False:
                return True
        return False

    async def _post(self, path: str, request: GenerationRequest, body: Mapping[str, Any]) -> _Answer:
        headers = {"content-type": "application/json", SESSION_HEADER: request.session_id}
        return await self._send("POST", path, data=msgspec.json.encode(body), headers=headers)

    async def _send(self, method: str, path: str, **options: Any) -> _Answer:
        if self._session is None:
            raise RuntimeError("an ExternalClient is used inside `async with`")
        with connection_errors(self._url):
            async with self._session.request(method, self._url + path, **options) as response:
                return _Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def open_external(
    urls: Sequence[str],
    *,
    api: Api,
    model: str | None,
    api_key: str | None,
    limit: int,
    tokenizer: Tokenizer | None = None,
    window: int | None = None,
) -> AsyncIterator[list[ExternalClient]]:
    """Open the clients of the endpoints of one policy, in order; see `ExternalClient`."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                ExternalClient(
                    url,
                    api=api,
                    model=model,
                    api_key=api_key,
                    limit=limit,
                    tokenizer=tokenizer,
                    window=window,
                )
            )
            for url in urls
        ]


@contextmanager
def _naming(url: str) -> Iterator[None]:
    try:
        yield
    except (PolicyUnavailable, PolicyRefused) as error:
        raise type(error)(f"{url}: {error}", evidence=error.evidence) from error
    except OverflowError as error:
        raise InvalidAnswer(f"{url}: the server returned an invalid token id: {error}") from error


def _models(answer: _Answer) -> list[dict[str, Any]] | None:
    body = answer.json() if answer.status == 200 else None
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list):
        return None
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _refusal(url: str, answer: _Answer) -> PolicyRefused | PolicyUnavailable:
    body = answer.json()
    error = body.get("error", body) if isinstance(body, dict) else body
    words = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    message = str(words) if words else answer.body.decode(errors="replace").strip()
    text = f"{url} answered {answer.status}: {message[:_MESSAGE_CHARACTERS]}"
    evidence = Evidence(http_status=answer.status)
    if answer.status in _OVERLOADED:
        return Overloaded(text, retry_after=_seconds(answer.headers.get("retry-after")), evidence=evidence)
    refused = 400 <= answer.status < 500 and answer.status != 408
    return PolicyRefused(text, evidence=evidence) if refused else PolicyUnavailable(text, evidence=evidence)


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.strip().isdecimal() else None
