"""vLLM's own API server parts, mounted around a replica's engine.

What is mounted is the list in `_routers`; of vLLM's other routes, those of its server process (health, metrics, load,
profiler, LoRA, sleep, weights) have counterparts of the replica's own.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.openai_api.exact_client import ExactClient
from kuberoll_workers.serving.openai_api.exchange import EXCHANGE

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_TASKS = ("generate",)


async def make_application(
    client: ExactClient,
    *,
    names: list[str],
    tool_parser: str | None,
    reasoning_parser: str | None,
    chat_template: str | None,
    template_variables: Mapping[str, Any],
) -> ASGIApp:
    """Build the application; it is ready for requests.

    Args:
        client: The engine's, as vLLM's serving classes use it.
        names: Names of the model, the first of which answers have.
        tool_parser: vLLM's name of the parser of tool calls; None: calls are not parsed.
        reasoning_parser: vLLM's name of the parser of reasoning; None: reasoning is part of the content.
        chat_template: Jinja source of a template in place of the tokenizer's own; None: its own.
        template_variables: Variables of the chat template, for chats that do not set them.

    Raises:
        Exception: vLLM's own, if a parser is unknown or does not fit the model.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = client.model_config.model
    arguments.served_model_name = names
    arguments.tool_call_parser = tool_parser
    arguments.enable_auto_tool_choice = tool_parser is not None
    arguments.structured_outputs_config = client.vllm_config.structured_outputs_config
    arguments.structured_outputs_config.reasoning_parser = reasoning_parser or ""
    arguments.reasoning_parser = reasoning_parser or ""
    arguments.chat_template = chat_template
    arguments.default_chat_template_kwargs = dict(template_variables) or None
    arguments.enable_prompt_tokens_details = True

    application = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    application.state.args = arguments
    for attach in _routers():
        attach(application)
    init_exception_handler(application)
    for kind in (PolicyUnavailable, EngineDeadError, EngineGenerateError):
        application.exception_handler(kind)(_unavailable)
    application.exception_handler(RecursionError)(_nested)
    await init_app_state(client, application.state, arguments, _TASKS)
    state = application.state
    state.openai_serving_chat = _VersionedServing(state.openai_serving_chat)
    state.openai_serving_completion = _VersionedServing(state.openai_serving_completion)
    state.serving_tokenization = _ExactTokenization(state.serving_tokenization, client)
    return application


def import_vllm() -> None:
    """Import what `make_application` needs of vLLM; it takes seconds, and blocks nobody in a thread."""
    for name in (
        "vllm.entrypoints.generate.api_router",
        "vllm.entrypoints.generate.structured_decisions.api_router",
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.scale_out.factories",
        "vllm.entrypoints.serve.exception_handling.register",
        "vllm.v1.engine.exceptions",
    ):
        importlib.import_module(name)
    _routers()


def _routers() -> list[Callable[[FastAPI], None]]:
    from vllm.entrypoints.anthropic.api_router import attach_router as messages
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as chats
    from vllm.entrypoints.openai.completion.api_router import attach_router as completions
    from vllm.entrypoints.openai.responses.api_router import attach_router as responses
    from vllm.entrypoints.serve.tokenize.api_router import attach_router as tokenize

    return [chats, completions, responses, messages, tokenize]


class _VersionedServing:
    """One of vLLM's serving objects, whose choices say which policy versions sampled their tokens.

    They have `policy_versions`, spans `[version, start, end]` over `token_ids`, where those were asked for; the answer
    then has `prompt_continuity`.
    """

    def __init__(self, serving: Any) -> None:
        self._serving = serving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    async def create_chat_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        return self._versioned(request, await self._serving.create_chat_completion(request, raw_request))

    async def create_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        return self._versioned(request, await self._serving.create_completion(request, raw_request))

    def _versioned(self, request: Any, answer: Any) -> Any:
        if not request.return_token_ids:
            return answer
        if hasattr(answer, "choices"):
            exchange = EXCHANGE.get()
            answer.prompt_continuity = exchange.continuity
            versions = exchange.versions()
            for choice in answer.choices:
                choice.policy_versions = versions[choice.index]
        elif hasattr(answer, "__aiter__"):
            return _versioned_events(answer)
        return answer


class _ExactTokenization:
    """vLLM's tokenization, but that a chat has the ids that the model reads when it is asked to continue it.

    Callers that learn the ids of a prompt in this way, as NeMo Gym's model server does, learn the true ones.
    """

    def __init__(self, serving: Any, client: ExactClient) -> None:
        self._serving, self._client = serving, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    async def create_tokenize(self, request: Any, raw_request: Request) -> Any:
        answer = await self._serving.create_tokenize(request, raw_request)
        if hasattr(request, "messages") and hasattr(answer, "tokens"):
            found = self._client.continue_prompt(EXCHANGE.get(), None, token_array(answer.tokens))
            answer.tokens, answer.count = found.ids.tolist(), len(found.ids)
        return answer


async def _versioned_events(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Server-sent events, the last one of each choice with its versions."""
    async for event in events:
        chunk = _last_chunk(event)
        if chunk is None:
            yield event
            continue
        versions = EXCHANGE.get().versions()
        for choice in chunk["choices"]:
            if choice.get("finish_reason") is not None:
                choice["policy_versions"] = versions[choice["index"]]
        yield f"data: {msgspec.json.encode(chunk).decode()}\n\n"


def _last_chunk(event: str) -> dict[str, Any] | None:
    """The chunk of an event if a choice ends with it; None otherwise."""
    data = event.removeprefix("data: ").strip()
    if '"finish_reason":"' not in data:
        return None
    chunk = msgspec.json.decode(data)
    return chunk if isinstance(chunk, dict) and chunk.get("choices") else None


async def _unavailable(_: Request, error: Exception) -> JSONResponse:
    return _error(503, str(error) or type(error).__name__, "ServiceUnavailableError")


async def _nested(_: Request, __: Exception) -> JSONResponse:
    return _error(400, "the request is nested too deeply", "BadRequestError")


def _error(status: int, message: str, kind: str) -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
