"""Agents for tests, by their entrypoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextvars import ContextVar
from typing import Any, ClassVar

from openai import APIConnectionError, AsyncOpenAI

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


def client_of(episode: AgentEpisode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.token, max_retries=0, timeout=60)


async def talk(episode: AgentEpisode) -> AgentResult:
    """Ask as often as the row says, and be paid for the number of answers."""
    messages: Any = list(episode.messages)
    async with client_of(episode) as client:
        for turn in range(episode.metadata["turns"]):
            answer = await client.chat.completions.create(model=episode.model, messages=messages)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]
    return AgentResult(reward={"turns": turn + 1.0}, metadata={"said": text}, answer=text)


async def rewrite(episode: AgentEpisode) -> float:
    """Go on from a history of one's own making."""
    async with client_of(episode) as client:
        for text in ("first", "second"):
            messages: Any = [*episode.messages, {"role": "user", "content": text}]
            await client.chat.completions.create(model=episode.model, messages=messages)
    return 1.0


class Meeting:
    """Where agents in the test's own process wait between two calls.

    Attributes:
        urls: Base URLs of those that came.
        reached: Set when one has come.
        over: Set when all may go on.
    """

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.reached, self.over = asyncio.Event(), asyncio.Event()

    async def wait(self, url: str) -> None:
        self.urls.append(url)
        self.reached.set()
        await self.over.wait()


MEETING: ContextVar[Meeting] = ContextVar("MEETING")


async def meet(episode: AgentEpisode) -> float:
    """Ask before the meeting, and after it."""
    messages: Any = list(episode.messages)
    async with client_of(episode) as client:
        await client.chat.completions.create(model=episode.model, messages=messages)
        await MEETING.get().wait(episode.base_url)
        await client.chat.completions.create(model=episode.model, messages=messages)
    return 1.0


async def meet_and_hide(episode: AgentEpisode) -> float:
    """Do the same, and return a reward whatever happens."""
    with contextlib.suppress(APIConnectionError):
        await meet(episode)
    return 1.0


async def refuse(episode: AgentEpisode) -> float:
    raise KeyError("answer")


async def sleep(episode: AgentEpisode) -> float:
    await asyncio.Event().wait()
    return 0.0


async def silent(episode: AgentEpisode) -> float:
    return 1.0


async def confused(episode: AgentEpisode) -> Any:
    async with client_of(episode) as client:
        messages: Any = list(episode.messages)
        await client.chat.completions.create(model=episode.model, messages=messages)
    return "much"


class Phased:
    """Says in its result which phases it went through."""

    closed: ClassVar[list[str]] = []

    async def setup(self, episode: AgentEpisode) -> None:
        self.seen = ["setup", json.dumps(episode.config)]

    async def run(self, episode: AgentEpisode) -> None:
        self.seen.append("run")
        await talk(episode)

    async def score(self, episode: AgentEpisode, result: AgentResult | None) -> AgentResult:
        assert result is None
        return AgentResult(reward=2.0, metadata={"seen": [*self.seen, "score"]})

    async def close(self, episode: AgentEpisode) -> None:
        type(self).closed.append(episode.id)


LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def look_around(episode: AgentEpisode) -> float:
    """Answer the first response's calls of a tool, and stop at the second's."""
    messages: Any = list(episode.messages)
    async with client_of(episode) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=episode.model, messages=messages, tools=[LOOK])
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a wall"})
    return 1.0
