"""Shared parts of the built-in environments: parsing of the policy's reply, and the answer to one episode."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kuberoll_workers.data.messages import TRUNCATED
from kuberoll_workers.data.thoughts import answer_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Metadata,
    UnusableRow,
)


class Reply(str):
    """What a response says after its thoughts; empty if they never end.

    Attributes:
        truncated: True if it was cut off at its length limit, so that its last line, and a part of it that was not
            closed, are no answers.
        response: The whole response, for foreign code that reads thoughts itself; empty if they never end.
    """

    truncated: bool
    response: str

    def __new__(cls, text: str = "", *, truncated: bool = False, response: str | None = None) -> Self:
        made = super().__new__(cls, text)
        made.truncated = truncated
        made.response = text if response is None else response
        return made


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to one episode.

    Attributes:
        observation: Text that is appended to the policy's reply unchanged, without a chat template.
        metadata: The new episode state.
        stop_strings: Stop strings of the next generation; None at the end of the episode.
        answer: The policy's final answer, for majority voting.
    """

    observation: str
    metadata: dict[str, Any]
    reward: float = 0.0
    terminated: bool = False
    stop_strings: tuple[str, ...] | None = None
    answer: str | None = None


def batch_of(turns: Sequence[Turn]) -> EnvironmentReturn:
    """Batched form of the turns of several episodes."""
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": turn.observation} for turn in turns],
        metadata=[turn.metadata for turn in turns],
        next_stop_strings=[None if turn.stop_strings is None else list(turn.stop_strings) for turn in turns],
        rewards=[turn.reward for turn in turns],
        terminateds=[turn.terminated for turn in turns],
        answers=[turn.answer for turn in turns],
    )


class TurnEnvironment(EnvironmentInterface):
    """Base of environments that answer each episode of a batch by itself."""

    @abc.abstractmethod
    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """Answer one reply of the policy.

        Args:
            reply: What the policy's newest response says after its thoughts.
            state: The episode's metadata; must not be changed in place.

        Raises:
            UnusableRow: The row's metadata is wrong.
        """

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        """Take a turn in each episode; see `turn`."""
        pairs = zip(message_log_batch, metadata, strict=True)
        return batch_of([self.turn(reply_of(log), state or {}) for log, state in pairs])


class GradedEnvironment(TurnEnvironment):
    """Base of environments with a single turn, whose response is right or wrong."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy`."""
        states = [state or {} for state in batch["extra_env_info"]]
        correct = mean([float(bool(state.get("correct"))) for state in states])
        return batch, {"episodes": len(states), **({} if correct is None else {"accuracy": correct})}


def grade(correct: bool, state: Mapping[str, Any], answer: str | None) -> Turn:
    """The only turn of an episode: reward 1 or 0, and `metadata.correct`."""
    return Turn(
        observation="\nCorrect.\n" if correct else "\nWrong.\n",
        metadata={**state, "correct": correct},
        reward=1.0 if correct else 0.0,
        terminated=True,
        answer=answer,
    )


def reply_of(log: Sequence[ChatMessage]) -> Reply:
    """What the policy's newest response says after its thoughts; empty if there is none."""
    if not log:
        return Reply()
    text = answer_of(log[-1])
    return Reply(text, truncated=log[-1].get(TRUNCATED) is True, response=log[-1]["content"] if text else "")


class Tagged(NamedTuple):
    """A tag `<name>body</name>` in a text."""

    name: str
    body: str


def first_tagged(text: str, names: Iterable[str]) -> Tagged | None:
    """The first complete tag of a text, with a stripped body; None if no tag is complete.

    Text before and after the tag is ignored: a policy may think aloud, and the last token of a generation may run past
    the stop string. If a tag is opened twice before it is closed, the inner one counts.
    """
    closings = [(text.find(f"</{name}>"), name) for name in names]
    end, name = min((found for found in closings if found[0] >= 0), default=(-1, ""))
    opening = f"<{name}>"
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return Tagged(name, text[start + len(opening) : end].strip()) if start >= 0 else None


def quoted(text: str, limit: int = 24) -> str:
    """The policy's own text for an error message to it: shortened, on one line."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= limit else f"{flat[: limit - 3]}...")


def count_of(metadata: Mapping[str, Any], key: str) -> int:
    """Counter in an episode's state; 0 if the dataset did not set it.

    Raises:
        UnusableRow: It is not a whole number of at least 0.
    """
    value = metadata.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnusableRow(f"metadata.{key}: found {value!r}; it must be a whole number, 0 or more")
    return value


def mean(values: Sequence[float]) -> float | None:
    """Mean of the values; None if there are none."""
    return sum(values) / len(values) if values else None
