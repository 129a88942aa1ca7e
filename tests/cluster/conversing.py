"""Agents that talk with the policy in their session: a function, and the same as a program."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


async def converse(episode: AgentEpisode) -> AgentResult:
    """Ask twice, and tell which variables there are."""
    said = await asyncio.to_thread(_converse, episode.base_url, episode.token, episode.model, list(episode.messages))
    return AgentResult(reward={"answers": len(said)}, metadata=_seen(said))


def main() -> None:
    """The program."""
    episode = json.load(sys.stdin)
    url, token = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    said = _converse(url, token, episode["model"], episode["messages"])
    print(json.dumps({"reward": {"answers": len(said)}, "metadata": _seen(said)}))  # noqa: T201


def _seen(said: list[str]) -> dict[str, Any]:
    tokens = [name for name in os.environ if name.startswith("KUBEROLL") and ("TOKEN" in name or "POLICY" in name)]
    return {"said": said, "tokens": sorted(tokens)}


def _converse(url: str, token: str, model: str, messages: list[Any]) -> list[str]:
    said: list[str] = []
    for _ in range(2):
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        body = json.dumps({"model": model, "messages": messages}).encode()
        request = urllib.request.Request(f"{url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            said.append(json.loads(answer.read())["choices"][0]["message"]["content"])
        messages = [*messages, {"role": "assistant", "content": said[-1]}, {"role": "user", "content": "And?"}]
    return said


if __name__ == "__main__":
    main()
