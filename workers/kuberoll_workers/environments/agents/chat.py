"""A session's chat API, as agents of KubeRoll's own ask it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from kuberoll_workers.environments.agents.commands import AgentFailed
from kuberoll_workers.environments.agents.episode import AgentEpisode

# What a session says when its budget is used up, which is the end of the trajectory and no error.
_SPENT: Final = ("spec.rollout.maxTurns", "maximum context length")
_SHOWN: Final = 1000


def chat_client() -> aiohttp.ClientSession:
    """A client for `completion`, without a time limit of its own: whoever calls has one."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))


async def completion(
    http: aiohttp.ClientSession, episode: AgentEpisode, body: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The policy's answer to a request of OpenAI's chat API; None: its budget of calls or tokens is used up.

    Args:
        body: Fields of the request, without `model`.

    Raises:
        AgentFailed: The policy cannot be asked.
    """
    headers = {"Authorization": f"Bearer {episode.token}"}
    request = {"model": episode.model, **body}
    try:
        async with http.post(f"{episode.base_url}/chat/completions", json=request, headers=headers) as response:
            text = await response.text()
            if response.status == 200:
                answer: dict[str, Any] = json.loads(text)
                return answer
            if response.status == 400 and any(words in text for words in _SPENT):
                return None
            raise AgentFailed(f"the policy answered {response.status}: {text[:_SHOWN]}")
    except (aiohttp.ClientError, ValueError) as error:
        raise AgentFailed(f"the policy cannot be asked: {type(error).__name__}: {error}") from error
