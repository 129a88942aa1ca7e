"""What the built-in environments share: reading the policy's reply, and one episode's answer to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kuberoll_workers.environments.interface import ChatMessage, EnvironmentReturn, UnusableRow


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to one episode.

    Attributes:
        observation: Text that follows the policy's reply as it is, without a chat template.
        metadata: The new episode state.
        stop_strings: Of the next generation; None where the episode ended.
        answer: The policy's final answer, for majority voting.
    """

    observation: str
    metadata: dict[str, Any]
    reward: float = 0.0
    terminated: bool = False
    stop_strings: tuple[str, ...] | None = None
    answer: str | None = None


def batch_of(turns: Sequence[Turn]) -> EnvironmentReturn:
    """The batched form of several episodes' turns."""
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": turn.observation} for turn in turns],
        metadata=[turn.metadata for turn in turns],
        next_stop_strings=[None if turn.stop_strings is None else list(turn.stop_strings) for turn in turns],
        rewards=[turn.reward for turn in turns],
        terminateds=[turn.terminated for turn in turns],
        answers=[turn.answer for turn in turns],
    )


def reply_of(log: Sequence[ChatMessage]) -> str:
    """The policy's newest text; empty where there is none."""
    content = log[-1].get("content") if log else None
    return content if isinstance(content, str) else ""


class Tagged(NamedTuple):
    """`<name>body</name>`, found in a text."""

    name: str
    body: str


def first_tagged(text: str, names: Iterable[str]) -> Tagged | None:
    """The first complete tag of a text, the body stripped; None where no tag is complete.

    Text before and after it is ignored: a policy may think aloud, and the last token of a generation may run past
    the stop string. Where a tag is opened twice before it is closed, the inner one counts.
    """
    closings = [(text.find(f"</{name}>"), name) for name in names]
    end, name = min((found for found in closings if found[0] >= 0), default=(-1, ""))
    opening = f"<{name}>"
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return Tagged(name, text[start + len(opening) : end].strip()) if start >= 0 else None


def quoted(text: str, limit: int = 24) -> str:
    """A policy's own words for an error message to it: short, on one line."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= limit else f"{flat[: limit - 3]}...")


def count_of(metadata: Mapping[str, Any], key: str) -> int:
    """A counter of an episode's state; 0 where the dataset did not set it.

    Raises:
        UnusableRow: It is not a count.
    """
    value = metadata.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnusableRow(f"metadata.{key}: found {value!r}; it must be a whole number, 0 or more")
    return value


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None
