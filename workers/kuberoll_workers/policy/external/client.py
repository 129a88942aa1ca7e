"""The client of an endpoint that somebody else keeps, whatever it speaks."""

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

from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenizer import Tokenizer
from kuberoll_workers.policy.client import SESSION_HEADER, Overloaded, ServeClient, Unreachable
from kuberoll_workers.policy.external.completions import (
    BARE,
    EXTENDED,
    check_ids,
    completion_body,
    completion_result,
)
from kuberoll_workers.policy.external.sglang import generate_body, generate_result
from kuberoll_workers.policy.interface import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
)
from kuberoll_workers.policy.readiness import wait_until_ready

Api = Literal["Auto", "KubeRoll", "OpenAI"]

_CONNECT_SECONDS = 10.0
_ASKING_SECONDS = 30.0
_MESSAGE_CHARACTERS = 2000
# "Not now": nothing is wrong with the server, and nothing was generated.
_OVERLOADED = (429, 503, 529)
# What servers answer to a field that they do not know, and to much else.
_NOT_UNDERSTOOD = (400, 422)
# Where servers list how long a context may be.
_WINDOWS = ("max_model_len", "context_length", "context_window")


@dataclass(slots=True, kw_only=True)
class _Server:
    """What a server was found to be.

    Attributes:
        engine: Its kind, in words.
        native: It is SGLang, with its own route.
        dialect: What its completions are asked for.
        proven: It has answered in that dialect, so that what it refuses now is the request.
    """

    model: str
    engine: str
    window: int
    native: bool
    dialect: int = EXTENDED
    proven: bool = False


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body; None where it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class ExternalClient:
    """Generates at one endpoint that somebody else keeps; an async context manager.

    What it speaks is asked when it is first used: KubeRoll's own protocol, SGLang's, or OpenAI's completions. Time
    limits and retries are the caller's: cancelling a call closes its connection, which ends the generation there.
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
        vocabulary: int | None = None,
    ) -> None:
        """A client that has asked nothing yet.

        Args:
            url: With or without the `/v1` that OpenAI's clients are given.
            model: Its name at an OpenAI-compatible server; None: the first that it lists.
            api_key: Sent as a bearer token.
            limit: Requests at once.
            tokenizer: Encodes the texts of servers that tell no ids; None: those are refused.
            window: Tokens of context, where the server does not say how many it takes.
            vocabulary: Token ids that there are; None: not known.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api = api
        self._model = model
        self._key = api_key
        self._limit = limit
        self._tokenizer = tokenizer
        self._window = window
        self._vocabulary = vocabulary
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._probe_lock = asyncio.Lock()
        self._serve_client: ServeClient | None = None
        self._server: _Server | None = None

    @property
    def load(self) -> int | None:
        """Requests that it was working on besides the newest answered one; None where it does not say."""
        return None if self._serve_client is None else self._serve_client.load

    async def __aenter__(self) -> Self:
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._limit, keepalive_timeout=60.0),
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
        """Continue one sequence; `exact` is False where the server does not tell which tokens it sampled.

        Raises:
            Overloaded: An answer of 429, 503 or 529.
            Unreachable: No connection.
            PolicyUnavailable: A broken connection, an answer of another 5xx, or one that is no result.
            PolicyRefused: An answer of another 4xx, or a request that the server cannot serve.
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
            result = await self._generate(request, room)
        else:
            result = await self._complete(request, found, room)
        with _naming(self._url):
            check_ids(result.token_ids, self._vocabulary)
        return result

    async def _generate(self, request: GenerationRequest, room: int) -> GenerationResult:
        answer = await self._post("/generate", request, generate_body(request, room=room))
        if answer.status != 200:
            raise _refusal(self._url, answer)
        with _naming(self._url):
            return generate_result(answer.body)

    async def _complete(self, request: GenerationRequest, server: _Server, room: int) -> GenerationResult:
        dialect = server.dialect
        while True:
            body = completion_body(request, model=server.model, room=room, dialect=dialect)
            answer = await self._post("/v1/completions", request, body)
            if answer.status not in _NOT_UNDERSTOOD or server.proven or dialect == BARE:
                break
            # It may be a field that is not OpenAI's; the server is asked for less, until it has once understood.
            dialect += 1
        if answer.status != 200:
            raise _refusal(self._url, answer)
        server.dialect, server.proven = dialect, True
        with _naming(self._url):
            return completion_result(answer.body, stop=request.sampling.stop, tokenizer=self._tokenizer)

    async def healthy(self) -> bool:
        """Whether the endpoint says that it can generate."""
        try:
            async with asyncio.timeout(_ASKING_SECONDS):
                found = await self._resolved()
                if isinstance(found, ServeClient):
                    return await found.healthy()
                answer = await self._send("GET", "/health")
                if answer.status in (404, 405):
                    answer = await self._send("GET", "/v1/models")
                return answer.status == 200
        except (PolicyUnavailable, PolicyRefused, TimeoutError):
            return False

    async def info(self) -> EngineInfo:
        """What the endpoint serves, as far as it says.

        Raises:
            PolicyUnavailable: It does not answer, or not as any server that is known here.
            PolicyRefused: It wants an API key, or something is left to be said by the job.
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
            trouble: Told meanwhile why it cannot.

        Raises:
            PolicyUnavailable: It could not within so many seconds; says what it answered last.
            PolicyRefused: Waiting would not help: see `info`.
        """
        return await wait_until_ready(self._url, self._ready, seconds=seconds, interval=interval, trouble=trouble)

    async def _ready(self) -> EngineInfo:
        info = await self.info()
        if not await self.healthy():
            raise PolicyUnavailable(f"{self._url}: it is not healthy")
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
        """Find out what the endpoint speaks.

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
            # Some servers list nothing; whoever says what they are is believed.
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
        return _Server(model=model, engine=engine, window=window, native=native)

    async def _is_sglang(self) -> bool:
        # The second is what it was called before.
        for path in ("/model_info", "/get_model_info"):
            answer = await self._send("GET", path)
            said = answer.json() if answer.status == 200 else None
            if isinstance(said, dict) and "model_path" in said and said.get("is_generation") is not False:
                return True
        return False

    async def _post(self, path: str, request: GenerationRequest, body: Mapping[str, Any]) -> _Answer:
        headers = {"content-type": "application/json", SESSION_HEADER: request.session_id}
        return await self._send("POST", path, data=msgspec.json.encode(body), headers=headers)

    async def _send(self, method: str, path: str, **options: Any) -> _Answer:
        if self._session is None:
            raise RuntimeError("an ExternalClient is used inside `async with`")
        try:
            async with self._session.request(method, self._url + path, **options) as response:
                return _Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{self._url}: {type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PolicyUnavailable(f"{self._url}: {type(error).__name__}: {error}") from error


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
    vocabulary: int | None = None,
) -> AsyncIterator[list[ExternalClient]]:
    """Clients of the endpoints of one policy, in order; see `ExternalClient`."""
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
                    vocabulary=vocabulary,
                )
            )
            for url in urls
        ]


@contextmanager
def _naming(url: str) -> Iterator[None]:
    try:
        yield
    except (PolicyUnavailable, PolicyRefused) as error:
        raise type(error)(f"{url}: {error}") from error
    except OverflowError as error:
        raise PolicyUnavailable(f"{url}: the server told a token id that is none: {error}") from error


def _models(answer: _Answer) -> list[dict[str, Any]] | None:
    said = answer.json() if answer.status == 200 else None
    cards = said.get("data") if isinstance(said, dict) else None
    if not isinstance(cards, list):
        return None
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _refusal(url: str, answer: _Answer) -> PolicyRefused | PolicyUnavailable:
    said = answer.json()
    error = said.get("error", said) if isinstance(said, dict) else said
    words = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    message = str(words) if words else answer.body.decode(errors="replace").strip()
    text = f"{url} answered {answer.status}: {message[:_MESSAGE_CHARACTERS]}"
    if answer.status in _OVERLOADED:
        return Overloaded(text, retry_after=_seconds(answer.headers.get("retry-after")))
    refused = 400 <= answer.status < 500 and answer.status != 408
    return PolicyRefused(text) if refused else PolicyUnavailable(text)


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.strip().isdecimal() else None
