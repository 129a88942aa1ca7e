"""A judge behind HTTP: compares the two fenced answers of the prompt, and fails as it is told to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_PART = re.compile(r"^BEGIN ([0-9a-f]{16})\n(.*?)\nEND \1$", re.MULTILINE | re.DOTALL)


def parts_of(prompt: str) -> list[str]:
    """Texts of a prompt that are between fences, by the rule that the system message states."""
    return [match[2] for match in _PART.finditer(prompt)]


def equality(prompt: str) -> str:
    """The verdict of a judge that compares letters: the last part with the one before it."""
    first, second = parts_of(prompt)[-2:]
    same = first.strip().casefold().rstrip(".") == second.strip().casefold().rstrip(".")
    return "They say the same.\n[[A=B]]" if same else "These differ.\n[[A!=B]]"


@dataclass
class Judge:
    """A judge.

    Attributes:
        answer: The text that it writes to a prompt; or a response to send.
        refusals: Responses that are sent first, before anything is judged.
        requests: Bodies of the requests that were judged, and their headers.
        most: Greatest number of requests at the same time.
        together: Nothing is answered before so many requests have been there at the same time.
    """

    answer: Callable[[str], Any] = equality
    refusals: list[Any] = field(default_factory=list)
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    models: Any = field(default_factory=lambda: {"data": [{"id": "the-judge"}]})
    finish: str = "stop"
    together: int = 0
    now: int = 0
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    most: int = 0

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for body, _ in self.requests]

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response(self.models)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            body = await request.json()
            if self.most >= self.together:
                self._enough.set()
            await self._enough.wait()
            if self.refusals:
                refused: web.StreamResponse = self.refusals.pop(0)
                return refused
            self.requests.append((body, dict(request.headers)))
            said = self.answer(body["messages"][-1]["content"])
            if isinstance(said, web.StreamResponse):
                return said
            choice = {"message": {"role": "assistant", "content": said}, "finish_reason": self.finish}
            return web.json_response({"choices": [choice]})
        finally:
            self.now -= 1


@asynccontextmanager
async def serving(judge: Judge) -> AsyncIterator[str]:
    """Serve a judge on a free port; yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", judge.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def as_json(verdict: str) -> str:
    return json.dumps({"reason": "so it is", "verdict": verdict})
