"""The request by which the loop starts an agent: the state that the step of an `AgentEnvironment` is given."""

from __future__ import annotations

from typing import Any

import msgspec


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

    @classmethod
    def decode(cls, plain: dict[str, Any]) -> AgentRequest:
        """The request of `encode`."""
        return msgspec.convert(plain, cls)
