"""The OpenAI-compatible routes over an engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.client import SESSION_HEADER
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyRefused, PolicyUnavailable
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.executor import BoundedExecutor
from kuberoll_workers.serving.openai_api.answers import (
    Answer,
    Choice,
    chat_body,
    chat_chunks,
    completion_body,
    completion_chunks,
    events,
)
from kuberoll_workers.serving.openai_api.chats import ChatFormat, ChatMemory
from kuberoll_workers.serving.openai_api.requests import (
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    chat_messages,
    check_characters,
    parse,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger("ray.serve")
_Parsed = TypeVar("_Parsed")

_CHATS = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_MODELS = "/v1/models"
_SESSION_TOKENS = 64
_SESSION_CHARACTERS = 256
# Longer bodies are parsed in a thread.
_SHORT_BYTES = 64 << 10


class OpenAIRoutes:
    """`/v1/chat/completions`, `/v1/completions` and `/v1/models` over one engine; see `docs/openai.md`.

    Errors have the body `{"error": {"message", "type", "param", "code"}}`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        tokenizer: str,
        revision: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        executor: BoundedExecutor | None = None,
    ) -> None:
        """Store the parts; the tokenizer is loaded at the first request that needs it.

        Args:
            engine: Must be started before the first request.
            model_name: Name of the model for callers; its source (`EngineInfo.model`) is accepted too.
            tokenizer: Directory or hub id.
            template_variables: Variables of the chat template, for chats that do not set them.
            executor: Runs templates and encoding; None: a new one.
        """
        self._engine = engine
        self._model = model_name
        self._source = (tokenizer, revision)
        self._variables = dict(template_variables or {})
        self._executor = BoundedExecutor() if executor is None else executor
        self._loading = asyncio.Lock()
        self._format: ChatFormat | None = None
        self._memory = ChatMemory()
        self._created = int(time.time())

    async def handle(self, request: Request) -> Response | None:
        """Respond to a request; None if it is for another route."""
        path = request.url.path.rstrip("/")
        if path not in (_CHATS, _COMPLETIONS, _MODELS) and not path.startswith(_MODELS + "/"):
            return None
        method = "GET" if path.startswith(_MODELS) else "POST"
        if request.method != method:
            return _error(InvalidRequest(f"{request.method} {path}: send a {method}", status=405))
        try:
            if path == _CHATS:
                return await self._chat(await read_body(request), request.headers)
            if path == _COMPLETIONS:
                return await self._completion(await read_body(request), request.headers)
            return self._models(path[len(_MODELS) + 1 :])
        except InvalidRequest as error:
            return _error(error)
        except BodyRefused as error:
            return _error(InvalidRequest(str(error), status=error.status))
        except RecursionError:
            return _error(InvalidRequest("the body is nested too deeply"))
        except PolicyRefused as error:
            return _error(InvalidRequest(str(error)))
        except PolicyUnavailable as error:
            return _error(InvalidRequest(str(error), status=503))
        except Exception as error:
            _log.exception("a request failed")
            return _error(InvalidRequest(f"{type(error).__name__}: {error}", status=500))

    async def _chat(self, body: bytes, headers: Mapping[str, str]) -> Response:
        request, messages = await self._prepared(body, _parse_chat)
        self._check_model(request.model)
        form = await self._chat_format()
        continued = bool(request.continue_final_message)
        text = await self._executor.run(
            form.chat_text,
            messages,
            tools=request.tools,
            generation_prompt=not continued and request.add_generation_prompt is not False,
            continued=continued,
            variables={**self._variables, **(request.chat_template_kwargs or {})},
        )
        check_characters(len(text), "messages")
        session = headers.get(SESSION_HEADER) or request.session_id or _session_of(messages)
        known, ids = self._memory.longest_prefix(session, text)
        prompt = ids + await self._executor.run(form.encode, text[known:])
        if not prompt:
            raise InvalidRequest("messages: the model's chat template renders them as an empty text", param="messages")
        answer = await self._answer(request, form, [prompt], session, kind="chatcmpl", param="messages")
        for choice in answer.choices:
            raw = form.decode(choice.result.token_ids, skip_special_tokens=False)
            self._memory.remember(session, text + raw, prompt + choice.result.token_ids)
        return _response(request, chat_body(answer), chat_chunks)

    async def _completion(self, body: bytes, headers: Mapping[str, str]) -> Response:
        request, given = await self._prepared(body, _parse_completion)
        self._check_model(request.model)
        form = await self._chat_format()
        special = request.add_special_tokens is not False
        prompts = [
            await self._executor.run(form.encode, prompt, special_tokens=special)
            if isinstance(prompt, str)
            else token_array(prompt)
            for prompt in given
        ]
        if not all(prompts):
            raise InvalidRequest("prompt: it has no tokens", param="prompt")
        session = headers.get(SESSION_HEADER) or request.session_id or _digest(prompts[0][:_SESSION_TOKENS].tobytes())
        answer = await self._answer(request, form, prompts, session, kind="cmpl", param="prompt")
        return _response(request, completion_body(answer), completion_chunks)

    async def _prepared(self, body: bytes, parse: Callable[[bytes], _Parsed]) -> _Parsed:
        return parse(body) if len(body) <= _SHORT_BYTES else await self._executor.run(parse, body)

    async def _answer(
        self,
        request: ChatRequest | CompletionRequest,
        form: ChatFormat,
        prompts: Sequence[array[int]],
        session: str,
        *,
        kind: str,
        param: str,
    ) -> Answer:
        window = self._engine.info().max_model_len
        longest = max(len(prompt) for prompt in prompts)
        if longest >= window:
            raise InvalidRequest(
                f"{param}: it has {longest} tokens, which leaves no room in the model's window of {window}",
                param=param,
                code="context_length_exceeded",
            )
        identity = f"{kind}-{uuid.uuid4().hex}"
        results = await self._generate(
            [
                GenerationRequest(
                    request_id=f"{identity}-{number}-{sample}",
                    session_id=session,
                    token_ids=prompt,
                    sampling=request.sampling(sample, window - len(prompt)),
                )
                for number, prompt in enumerate(prompts)
                for sample in range(request.samples)
            ]
        )
        return Answer(
            identity=identity,
            created=int(time.time()),
            model=request.model or self._model,
            prompts=prompts,
            choices=[
                Choice(
                    prompt=number // request.samples,
                    result=result,
                    text=_text(request, form, result),
                    pieces=_pieces(request, form, result),
                )
                for number, result in enumerate(results)
            ],
            token_ids=bool(request.return_token_ids),
        )

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        try:
            # A task group, so that a failure or a disconnected caller cancels all of them.
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._engine.generate(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _chat_format(self) -> ChatFormat:
        async with self._loading:
            if self._format is None:
                source, revision = self._source
                try:
                    self._format = await asyncio.to_thread(ChatFormat.load, source, revision=revision)
                except Exception as error:
                    # transformers and the hub's client raise many exception types with the same meaning here.
                    raise InvalidRequest(f"the tokenizer {source!r} cannot be loaded: {error}", status=501) from error
            return self._format

    def _check_model(self, name: str | None) -> None:
        known = dict.fromkeys((self._model, self._engine.info().model))
        if name and name not in known:
            raise InvalidRequest(
                f"model: {name!r} does not exist; use {' or '.join(known)}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _models(self, name: str) -> Response:
        self._check_model(name)
        info = self._engine.info()
        model = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "kuberoll",
            "root": info.model,
            "max_model_len": info.max_model_len,
        }
        return _json(200, model if name else {"object": "list", "data": [model]})


def _parse_chat(body: bytes) -> tuple[ChatRequest, list[dict[str, Any]]]:
    request = parse(body, ChatRequest)
    _check_sequences(request, 1, "messages")
    return request, chat_messages(request.messages)


def _parse_completion(body: bytes) -> tuple[CompletionRequest, list[str | list[int]]]:
    request = parse(body, CompletionRequest)
    prompts = request.prompts()
    # Before any of them is encoded.
    _check_sequences(request, len(prompts), "prompt")
    check_characters(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), "prompt")
    return request, prompts


def _check_sequences(request: ChatRequest | CompletionRequest, prompts: int, param: str) -> None:
    if prompts * request.samples > MAX_SEQUENCES:
        raise InvalidRequest(f"n: {param} times n must not exceed {MAX_SEQUENCES} sequences", param="n")


def _text(request: ChatRequest | CompletionRequest, form: ChatFormat, result: GenerationResult) -> str:
    text = form.decode(result.token_ids, skip_special_tokens=request.skip_special_tokens is not False)
    if request.include_stop_str_in_output or result.finish_reason != "stop":
        return text
    ends = [at for word in request.stop_strings if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def _pieces(request: ChatRequest | CompletionRequest, form: ChatFormat, result: GenerationResult) -> list[str] | None:
    if not request.wants_logprobs:
        return None
    if request.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in result.token_ids]
    return [form.decode([token], skip_special_tokens=False) for token in result.token_ids]


def _session_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A session id, the same for all turns of a chat: a digest of its beginning, up to the first user message."""
    beginning = []
    for message in messages:
        beginning.append((message["role"], message["content"][:_SESSION_CHARACTERS]))
        if message["role"] == "user":
            break
    return _digest(msgspec.json.encode(beginning))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _response(
    request: ChatRequest | CompletionRequest,
    body: dict[str, Any],
    chunks: Callable[[dict[str, Any]], Iterator[dict[str, Any]]],
) -> Response:
    from starlette.responses import StreamingResponse

    if not request.stream:
        return _json(200, body)
    usage = bool(request.stream_options is not None and request.stream_options.include_usage)
    return StreamingResponse(
        events(body, chunks(body), usage=usage), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


def _error(error: InvalidRequest) -> Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return _json(
        error.status, {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    )


def _json(status: int, content: Any) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
