"""The request by which the loop starts an agent: the state that the step of an `AgentEnvironment` is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.interface import ChatMessage


class AgentRequest(msgspec.Struct, kw_only=True, frozen=True):
    """An episode for an agent, without the messages.

    Attributes:
        id: Name of the episode.
        metadata, tools, seed: As in `AgentEpisode`.
        base_url, anthropic_base_url, token, model: Of its session.
    """

    id: str
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    seed: int | None
    base_url: str
    anthropic_base_url: str
    token: str
    model: str

    def encode(self) -> dict[str, Any]:
        """The request as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def episode(self, messages: Sequence[ChatMessage], config: Mapping[str, Any]) -> AgentEpisode:
        """What the agent is given.

        Args:
            messages: The row's prompt.
            config: The environment's `config`.
        """
        return AgentEpisode(
            id=self.id,
            messages=messages,
            metadata=self.metadata,
            tools=self.tools,
            config=config,
            seed=self.seed,
            base_url=self.base_url,
            anthropic_base_url=self.anthropic_base_url,
            token=self.token,
            model=self.model,
        )

    @classmethod
    def decode(cls, plain: dict[str, Any]) -> AgentRequest:
        """The request of `encode`."""
        return msgspec.convert(plain, cls)
