"""An agent's episode: what it is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kuberoll_workers.data.plain import repr_of
from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.outcome import StepInvalid

Rewards = float | Mapping[str, float]
"""A reward, or named ones, whose sum is the reward."""


class InvalidResult(StepInvalid):
    """The agent returned something that is no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """What an agent is given.

    Attributes:
        id: Name of the episode, unique in its run for each attempt.
        messages: The row's prompt, as chat messages; empty if the row has none.
        metadata: The row's metadata.
        tools: Tools that the row declares, in OpenAI's form.
        config: The environment's `config`.
        seed: Seed of the trajectory; None: its choices are left to the engine.
        base_url: Base URL for clients of OpenAI's API, ending in `/v1`.
        anthropic_base_url: Base URL for clients of Anthropic's API.
        token: API key for both. It opens this episode's session only.
        model: Name of the model for both.
        state: What the phases of an episode leave for one another; any objects.
    """

    id: str
    messages: Sequence[ChatMessage]
    metadata: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] | None
    config: Mapping[str, Any]
    seed: int | None
    base_url: str
    anthropic_base_url: str
    token: str = field(repr=False)
    model: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What an agent returns.

    Attributes:
        reward: The trajectory's reward, or named ones.
        metadata: State of the trajectory at its end; None: the row's metadata.
        answer: The answer, for reports.
    """

    reward: Rewards
    metadata: Metadata = None
    answer: str | None = None


_FIELDS: Final = frozenset({"reward", "metadata", "answer"})


def result_of(returned: Any, method: str) -> AgentResult:
    """The result in what a phase returned: an AgentResult, a reward, or named rewards.

    Args:
        method: What returned it, for errors.

    Raises:
        InvalidResult: It is none.
    """
    if isinstance(returned, AgentResult):
        return returned
    if isinstance(returned, bool | int | float):
        return AgentResult(reward=float(returned))
    if isinstance(returned, Mapping) and returned and all(_is_number(value) for value in returned.values()):
        return AgentResult(reward={str(name): float(value) for name, value in returned.items()})
    raise InvalidResult(
        f"{method} returned {repr_of(returned)}; it must return a reward, named rewards ({{name: number}}) or an "
        "AgentResult"
    )


def result_from_json(value: Any, source: str) -> AgentResult:
    """The result in what a program wrote: a number, or an object with `reward`, and maybe `metadata` and `answer`.

    Args:
        source: Where it was found, for errors.

    Raises:
        InvalidResult: It is none.
    """
    if not isinstance(value, dict) or "reward" not in value:
        value = {"reward": value}
    reward, unknown = value["reward"], sorted(map(str, value.keys() - _FIELDS))
    if unknown:
        raise InvalidResult(f"{source} has the unknown fields {', '.join(unknown)}; put them into metadata")
    if not _is_number(reward) and not (isinstance(reward, dict) and reward and all(map(_is_number, reward.values()))):
        raise InvalidResult(f"{source} has the reward {repr_of(reward)}; it must be a number, or {{name: number}}")
    metadata, answer = value.get("metadata"), value.get("answer")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidResult(f"{source} has the metadata {repr_of(metadata)}; it must be an object")
    return AgentResult(reward=reward, metadata=metadata, answer=None if answer is None else str(answer))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
