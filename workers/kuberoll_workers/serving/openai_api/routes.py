"""The way of a request to vLLM's API: limits, session, application."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kuberoll_workers.data.thoughts import ThoughtsReader
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tool_calls import parse_tool_calls
from kuberoll_workers.data.tools import Tool, ToolCall
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.executor import BoundedExecutor
from kuberoll_workers.serving.openai_api.chats import chat_of, tools_of
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Texts
from kuberoll_workers.serving.openai_api.demanded_calls import demand_of, read_demanded
from kuberoll_workers.serving.openai_api.exchange import EXCHANGE, Exchange, RecordedSession
from kuberoll_workers.serving.openai_api.limits import Abilities, InvalidRequest, check_request

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

_log = logging.getLogger("ray.serve")

PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths of vLLM's API that a replica answers."""

_MODELS: Final = "/v1/models"
_RETRY_HEADER: Final = "x-stainless-retry-count"

# Longer bodies are checked in a thread.
_SHORT_BYTES = 64 << 10


class _Opened(NamedTuple):
    application: ASGIApp
    abilities: Abilities


class OpenAIRoutes:
    """vLLM's API over one engine; see `docs/how-to/openai.md`.

    Errors have the body `{"error": {"message", "type", "param", "code"}}`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        executor: BoundedExecutor | None = None,
    ) -> None:
        """Store the parts; the application is made at the first request.

        Args:
            engine: Must be started before the first request.
            model_name: Name of the model for callers; its source (`EngineInfo.model`) is accepted too.
            tool_parser: vLLM's name of the parser of tool calls; None: requests with tools are refused.
            reasoning_parser: vLLM's name of the parser of reasoning.
            chat_template: Jinja source of a template in place of the tokenizer's own; None: its own.
            template_variables: Variables of the chat template, for chats that do not set them.
            executor: Checks long bodies; None: a new one.
        """
        self._engine = engine
        self._model = model_name
        self._parsers = (tool_parser, reasoning_parser)
        self._template = chat_template
        self._variables = dict(template_variables or {})
        self._executor = BoundedExecutor() if executor is None else executor
        self._opening = asyncio.Lock()
        self._opened: _Opened | None = None
        self._texts: Texts | None = None
        self._memory: ChatMemory | None = None
        self._created = int(time.time())

    async def handle(
        self,
        request: Request,
        path: str,
        *,
        session: RecordedSession | None = None,
    ) -> Response | None:
        """Respond to a request; None if it is for another route.

        Args:
            path: The request's path, without a slash at its end and without that of its session.
            session: Session of the request; None: that which its header names, if it has one, unrecorded.
        """
        if request.method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")):
            # The only route that vLLM need not be imported for: clients ask it before anything else.
            return self._models(path[len(_MODELS) + 1 :])
        if path not in PATHS:
            return None
        from kuberoll_workers.serving.openai_api.mounted import Mounted

        try:
            opened = await self._open()
            body = await read_body(request)
            chat, tools, demand = None, list[Tool](), None
            if request.method == "POST":
                fields = await self._check(body, opened.abilities)
                demand = demand_of(fields)
                if session is not None:
                    chat, tools = chat_of(path, fields), tools_of(path, fields)
                    if session.complete(path, fields):
                        body = msgspec.json.encode(fields)
        except InvalidRequest as error:
            return _error(error.status, str(error), param=error.param)
        except BodyRefused as error:
            return _error(error.status, str(error))
        except PolicyUnavailable as error:
            return _error(503, str(error))
        name = request.headers.get(SESSION_HEADER) if session is None else session.identity
        digest = b"" if session is None else _digest(path, body)
        exchange = Exchange(name, session, chat, tools, demand, request=digest, repeats=_repeats(request))
        EXCHANGE.set(exchange)
        return Mounted(opened.application, body, path=path, exchange=exchange)

    def _models(self, name: str) -> Response:
        info = self._engine.info()
        names = self._names()
        if name and name not in names:
            message = f"The model `{name}` does not exist. Valid names: {', '.join(names)}."
            return _error(404, message, param="model", kind="NotFoundError")
        models = [
            {
                "id": found,
                "object": "model",
                "created": self._created,
                "owned_by": "kuberoll",
                "root": info.model,
                "max_model_len": info.max_model_len,
            }
            for found in ([name] if name else names)
        ]
        return _json(200, models[0] if name else {"object": "list", "data": models})

    def _names(self) -> list[str]:
        """Names of the model, the first of which answers have."""
        return list(dict.fromkeys((self._model, self._engine.info().model)))

    @property
    def model(self) -> str:
        """The model's name for callers."""
        return self._model

    @property
    def texts(self) -> Texts | None:
        """Conversions of the model; None before the first request."""
        return self._texts

    def forget(self, session: str) -> None:
        """Forget what was generated in a session that takes no more calls."""
        if self._memory is not None:
            self._memory.forget(session)

    async def _check(self, body: bytes, abilities: Abilities) -> dict[str, Any]:
        if len(body) <= _SHORT_BYTES:
            return check_request(body, abilities)
        return await self._executor.run(check_request, body, abilities)

    async def _open(self) -> _Opened:
        async with self._opening:
            if self._opened is None:
                try:
                    self._opened = await self._make()
                except PolicyUnavailable:
                    raise
                except ImportError as error:
                    raise InvalidRequest(
                        f"this API needs vLLM, which is not installed here ({error}): pip install 'kuberoll[gpu]', or "
                        "'kuberoll[cpu]' without a GPU",
                        status=501,
                    ) from error
                except Exception as error:
                    # vLLM and transformers raise many exception types with the same meaning here.
                    _log.exception("vLLM's API could not be started")
                    raise InvalidRequest(
                        f"vLLM's API cannot be started: {type(error).__name__}: {error}", status=501
                    ) from error
            return self._opened

    async def _make(self) -> _Opened:
        client = await self._engine.open_client()
        # Imports of seconds.
        exact, application = await asyncio.to_thread(_modules)
        tool_parser, reasoning_parser = self._parsers
        tokenizer = client.renderer.tokenizer
        converter = HuggingFaceTokenizer(tokenizer).with_template(self._template)
        self._texts = texts = await asyncio.to_thread(_texts, converter, tokenizer, tool_parser)
        self._memory = ChatMemory(texts)
        made = await application.make_application(
            exact.ExactClient(client, self._engine, self._memory),
            names=self._names(),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            chat_template=self._template,
            template_variables=self._variables,
        )
        return _Opened(made, Abilities(renders_tools=_renders_tools(converter), parses_calls=tool_parser is not None))


def _digest(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=path[-16:].encode()).digest()


def _repeats(request: Request) -> bool:
    """True if the caller says that it got no answer: the clients of OpenAI and Anthropic count what they repeat."""
    count = request.headers.get(_RETRY_HEADER, "")
    return count.isdecimal() and int(count[:9]) > 0


def _modules() -> tuple[Any, Any]:
    # They import FastAPI and vLLM.
    from kuberoll_workers.serving.openai_api import application, exact_client

    application.import_vllm()
    return exact_client, application


def _texts(converter: HuggingFaceTokenizer, tokenizer: Any, tool_parser: str | None) -> Texts:
    parser = None
    if tool_parser is not None:
        from kuberoll_workers.serving.engines.tool_parser import ToolParser

        parser = ToolParser(tool_parser, tokenizer)

    thinking = ThoughtsReader(converter)

    def read(
        text: str, tools: Sequence[Tool], demand: str | None, opened: bool | None = None, cut: bool = False
    ) -> tuple[str, list[ToolCall]]:
        thoughts = thinking.end_in_marked(text, opened=opened, cut=cut)
        if demand is not None and parser is not None and parser.demands_plain:
            calls = read_demanded(text[thoughts:], demand)
            return "" if calls else text.strip(), calls
        parse = parse_tool_calls if parser is None else functools.partial(parser.parse, tools=tools)
        found = parse(text, thoughts=thoughts, cut=cut)
        if not found.calls or found.invalid:
            return text.strip(), []
        return (found.text or "").strip(), found.calls

    return Texts(
        decode=converter.decode_with_special_tokens,
        encode=converter.encode,
        end=tokenizer.eos_token_id,
        read=read,
        opened=thinking.opened,
    )


def _renders_tools(tokenizer: HuggingFaceTokenizer) -> bool:
    try:
        tokenizer.check_tools()
    except TemplateRefused:
        return False
    return True


def _error(status: int, message: str, *, param: str | None = None, kind: str | None = None) -> Response:
    kind = kind or ("BadRequestError" if status < 500 else "InternalServerError")
    return _json(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def _json(status: int, content: Any) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
