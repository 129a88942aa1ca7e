"""An agent whose calls make branches: answers beside each other, streams, and a history of its own making."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


async def play(episode: AgentEpisode) -> AgentResult:
    """Ask in several ways at once, go on from one of the answers, and then from one that was never given."""
    question: Any = list(episode.messages)
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.token, max_retries=0) as client:

        async def ask(messages: Any) -> str:
            answer = await client.chat.completions.create(model=episode.model, messages=messages)
            return answer.choices[0].message.content or ""

        both = await client.chat.completions.create(model=episode.model, messages=question, n=2)
        stream = await client.chat.completions.create(model=episode.model, messages=question, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        answers = [*(choice.message.content or "" for choice in both.choices), streamed]
        after = [*question, {"role": "assistant", "content": answers[-1]}]
        more = await asyncio.gather(
            *(ask([*after, {"role": "user", "content": f"{word}?"}]) for word in ("And", "So", "But"))
        )
        edited = await ask([*question, {"role": "assistant", "content": "43"}, {"role": "user", "content": "No?"}])
    return AgentResult(reward={"said": 1.0}, metadata={"answers": [*answers, *more, edited]})
