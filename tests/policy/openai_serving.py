"""The OpenAI-compatible routes over an engine in this process, by a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from openai import AsyncOpenAI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.openai_api import OpenAIRoutes
from kuberoll_workers.serving.sessions.routes import SessionRoutes

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"

# As the tiny policy's own, but that messages have an end, as those of most models have.
_WITH_ENDS = (
    "{{ '<|begin|>' }}{% for tool in tools or [] %}{{ tool['function']['name'] + ';' }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_with_ends(directory: Path) -> Path:
    """The tiny policy's tokenizer, with a template that closes its messages and writes tools and calls."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, directory / name)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(_WITH_ENDS)
    return directory


def application(routes: OpenAIRoutes, engine: Engine, *, key: str | None = None) -> ASGIApp:
    sessions = SessionRoutes(routes, replica="replica-1", address=_nowhere)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            await JSONResponse({"error": {"message": "who are you?"}}, status_code=401)(scope, receive, send)
            return
        path = request.url.path.rstrip("/")
        if path in ("/healthz", "/info"):
            # What a router asks of a replica.
            await Response(msgspec.json.encode(engine.info()))(scope, receive, send)
            return
        response = await sessions.handle(request, path) or await routes.handle(request, path)
        if response is None:
            response = JSONResponse({"error": {"message": "there is no such route"}}, status_code=404)
        await response(scope, receive, send)

    return app


@asynccontextmanager
async def serving_openai(
    engine: Engine,
    *,
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    key: str | None = None,
) -> AsyncIterator[str]:
    """Serve a started engine's model as `tiny`; its base URL, without `/v1`.

    Args:
        key: API key that requests need; None: none.
    """
    routes = OpenAIRoutes(
        engine,
        model_name="tiny",
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        chat_template=chat_template,
        template_variables=template_variables,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application(routes, engine, key=key), lifespan="off", log_level="error", timeout_keep_alive=600
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()


async def _nowhere() -> None:
    """The address of a replica that has none of its own."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # They are the test runner's.
        yield


@asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
