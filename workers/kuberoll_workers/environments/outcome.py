"""One trajectory's part of what a batched environment step returned, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.environments.interface import Metadata


class EnvironmentFault(Exception):
    """An environment did not do its part."""


class StepRaised(EnvironmentFault):
    """The environment's `step` raised, or its process died."""


class StepTimedOut(EnvironmentFault):
    """The environment's `step` took longer than its time limit."""


class StepInvalid(EnvironmentFault):
    """The environment's `step` returned something that is not an EnvironmentReturn for its inputs."""


class RowFault(EnvironmentFault):
    """The environment said that the dataset's row is wrong (`UnusableRow`): another try cannot mend it."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step means for one trajectory.

    Attributes:
        role, content: The observation; an empty content adds no tokens.
        metadata: The new episode state; None keeps the old one.
        stop_strings: Of the next generation; None clears them.
        reward: Of this turn: the sum of `reward_parts` where rewards are named.
    """

    role: str
    content: str
    metadata: Metadata
    stop_strings: tuple[str, ...] | None
    reward: float
    terminated: bool
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None


def split_return(returned: Any, size: int) -> list[StepOutcome]:
    """Check a batched EnvironmentReturn (5 or 6 fields, or any tuple of that form) and split it by trajectory.

    Args:
        returned: What `step` returned.
        size: Number of trajectories that were stepped.

    Raises:
        StepInvalid: Names the field, and the element where one is wrong.
    """
    if not isinstance(returned, tuple) or len(returned) not in (5, 6):
        raise StepInvalid(
            f"step returned {_describe(returned)}; it must return an EnvironmentReturn (observations, metadata, "
            "next_stop_strings, rewards, terminateds and, optionally, answers)"
        )
    observations = _column("observations", returned[0], size)
    metadata = _column("metadata", returned[1], size, optional=True)
    stop_strings = _column("next_stop_strings", returned[2], size, optional=True)
    parts = _reward_parts(returned[3], size)
    terminateds = _column("terminateds", returned[4], size)
    answers = _column("answers", returned[5] if len(returned) == 6 else None, size, optional=True)
    return [
        _outcome(
            index,
            observations[index],
            metadata[index],
            stop_strings[index],
            {name: values[index] for name, values in parts.items()},
            terminateds[index],
            answers[index],
        )
        for index in range(size)
    ]


SCALAR = ""
"""Name under which an unnamed reward travels inside this module."""


def _outcome(
    index: int, observation: Any, metadata: Any, stops: Any, rewards: dict[str, Any], terminated: Any, answer: Any
) -> StepOutcome:
    if not isinstance(observation, Mapping) or not isinstance(observation.get("content"), str):
        raise StepInvalid(f"observations[{index}] is {_describe(observation)}; it must be a role and a content (text)")
    if metadata is not None and not isinstance(metadata, dict):
        raise StepInvalid(f"metadata[{index}] is {_describe(metadata)}; it must be an object or None")
    if stops is not None and not (_is_list(stops) and all(isinstance(stop, str) and stop for stop in stops)):
        raise StepInvalid(f"next_stop_strings[{index}] is {_describe(stops)}; it must be a list of texts or None")
    numbers = {name: _number(index, name, value) for name, value in rewards.items()}
    return StepOutcome(
        role=str(observation.get("role", "environment")),
        content=observation["content"],
        metadata=metadata,
        stop_strings=tuple(stops) if stops else None,
        reward=sum(numbers.values()),
        terminated=_flag(index, terminated),
        reward_parts={} if SCALAR in numbers else numbers,
        answer=None if answer is None else str(answer),
    )


def _plain(value: Any) -> Any:
    """Arrays, tensors and their elements, of any library, as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


def _flag(index: int, value: Any) -> bool:
    # 0 and 1 are how numeric tensors say it.
    plain = _plain(value)
    if not isinstance(plain, bool | int | float) or plain not in (0, 1):
        raise StepInvalid(f"terminateds[{index}] is {_describe(value)}; it must be a boolean")
    return bool(plain)


def _column(name: str, values: Any, size: int, *, optional: bool = False) -> Sequence[Any]:
    if values is None and optional:
        return [None] * size
    plain = _plain(values)
    if isinstance(plain, str) or not isinstance(plain, Sequence):
        raise StepInvalid(f"{name} is {_describe(values)}; it must hold one element per trajectory")
    if len(plain) != size:
        raise StepInvalid(f"{name} has {len(plain)} elements for {size} trajectories")
    return plain


def _reward_parts(rewards: Any, size: int) -> dict[str, Sequence[Any]]:
    if isinstance(rewards, Mapping):
        if not rewards:
            raise StepInvalid("rewards is an empty dict; it must name at least one reward")
        return {str(name): _column(f"rewards[{name!r}]", values, size) for name, values in rewards.items()}
    column = [_plain(reward) for reward in _column("rewards", rewards, size)]
    widths = {len(row) if _is_list(row) else None for row in column}
    if widths <= {None}:
        return {SCALAR: column}
    (width, *others) = widths
    if others or not width:
        raise StepInvalid("rewards has rows of different lengths; each trajectory needs the same number of rewards")
    # A matrix, one column for each of several rewards: NeMo RL's names for these.
    return {f"reward{number + 1}": [row[number] for row in column] for number in range(width)}


def _number(index: int, name: str, value: Any) -> float:
    where = f"rewards[{index}]" if name == SCALAR else f"rewards[{name!r}][{index}]"
    try:
        number = float(_plain(value))
    except (TypeError, ValueError, OverflowError):
        raise StepInvalid(f"{where} is {_describe(value)}; it must be a number") from None
    if not math.isfinite(number):
        raise StepInvalid(f"{where} is {number}; a reward must be finite")
    return number


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
