"""A calculator, whose two functions are the tools of the agents in this directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult

Number = Annotated[int, Field(ge=0, le=999)]

INSTRUCTIONS = "Calculate with the tools. Answer with the number alone."
MAX_CALLS = 4  # of the policy, in one episode


def add(a: Number, b: Number) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: Number, b: Number) -> int:
    """Multiply two numbers."""
    return a * b


def tool_choice(episode: AgentEpisode) -> str:
    """Whether the policy may answer at first (`auto`), or must call a tool (`required`)."""
    return str(episode.config.get("toolChoice", "auto"))


def result(episode: AgentEpisode, answer: object) -> AgentResult:
    """1 for the right number; None: the agent has given none."""
    said = "" if answer is None else str(answer).strip()
    return AgentResult(reward=float(said == str(episode.metadata["ground_truth"])), answer=said)
