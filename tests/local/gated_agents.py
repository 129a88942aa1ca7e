"""Agents that write down each of their episodes, and wait at a gate before they end; also a program."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai

from kuberoll_workers.environments.agents import AgentEpisode


async def play(episode: AgentEpisode) -> float:
    """Ask once, pass the gate, and ask again."""
    note(episode.config, episode.metadata)
    messages: Any = list(episode.messages)
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.token) as client:
        for number in range(2):
            answer = await client.chat.completions.create(model=episode.model, messages=messages)
            if number == 0:
                await client._client.get(f"{episode.config['gate']}/{episode.metadata['name']}", timeout=600)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    return 1.0


def note(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write down that an episode begins."""
    with (Path(config["directory"]) / "episodes").open("a") as file:
        file.write(f"{os.getpid()}|{metadata['name']}\n")


def main() -> None:
    """The same as a program, with one call."""
    episode = json.load(sys.stdin)
    note(episode["config"], episode["metadata"])
    with openai.OpenAI() as client:
        client.chat.completions.create(model=episode["model"], messages=episode["messages"])
    with urllib.request.urlopen(f"{episode['config']['gate']}/{episode['metadata']['name']}", timeout=600):
        print(json.dumps({"reward": 1.0}))  # noqa: T201


if __name__ == "__main__":
    main()
