"""An artificial policy for agents in sandboxes: a session has one call, and an agent takes as long as its row says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup, prompt_messages
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.policy.agent_sessions import (
    AgentSession,
    ClosedSession,
    SessionMessage,
    SessionPath,
    SessionSettings,
    SessionTiming,
)
from tests.rollouts.fakes import CharacterTokenizer, ScriptedPolicy

TOML = """
schema_version = "1.4"
[task]
name = "kuberoll/wait"
[environment]
docker_image = "{image}"
network_mode = "no-network"
"""
"""A task of one machine without a network, in an image."""
ENTRYPOINT = f"{__name__}:wait"


class ArtificialPolicy(ScriptedPolicy):
    """Sessions of which each has sampled one token.

    Attributes:
        opened: Names of the sessions, in the order in which they were opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    async def open_session(self, session_id: str, settings: SessionSettings) -> AgentSession:
        self.opened.append(session_id)
        return AgentSession(id=session_id, url="", openai_base_url="", anthropic_base_url="", token="", model="policy")

    @asynccontextmanager
    async def attend_session(self, session: AgentSession) -> AsyncIterator[None]:
        yield

    async def close_session(self, session: AgentSession) -> ClosedSession:
        now = time.time()
        read = SessionMessage(role="context", content="do", token_ids=[100, 111])
        said = SessionMessage(role="assistant", content="x", token_ids=[120], logprobs=[-0.5], learn=True)
        timing = SessionTiming(generation_seconds=[0.0], ended_at=[now])
        return ClosedSession(opened_at=now, calls=1, trajectories=[SessionPath(messages=[read, said], timing=timing)])


async def wait(episode: AgentEpisode) -> None:
    """The agent: it waits for as long as its row says, and does what that wants in its sandbox."""
    await asyncio.sleep(episode.metadata["seconds"])
    await episode.state["sandbox"].exec(episode.metadata.get("command", "true"), user="0")


def groups_of(row: dict[str, Any], seconds: list[list[float]], name: str = "env") -> list[SampleGroup]:
    """Groups of samples of one task.

    Args:
        row: Of a task.
        seconds: How long each sample of each group takes.
    """
    tokenizer = CharacterTokenizer()
    ids = tokenizer.render_chat(row["messages"])
    found = []
    for index, ones in enumerate(seconds):
        samples = tuple(
            Sample(
                prompt=Prompt(
                    task_index=index,
                    task_name=name,
                    idx=f"row-{index}",
                    messages=tuple(prompt_messages(row["messages"], ids)),
                    token_ids=ids,
                    metadata={**row["metadata"], "seconds": one},
                    stop_strings=None,
                    sampling={},
                ),
                rollout_index=number,
                seed=number,
            )
            for number, one in enumerate(ones)
        )
        found.append(SampleGroup(samples=samples, keep=len(samples)))
    return found
