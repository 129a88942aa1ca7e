"""Rewards that a task's tests write, and the reward of a task of several steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NoReturn

KEY: Final = "reward"
"""Name of the reward in reward.txt, and of the one that a step's only least reward is compared with."""
TEXT: Final = "reward.txt"
JSON: Final = "reward.json"

_MOST_CHARACTERS: Final = 1 << 20
_MOST_DIGITS: Final = 400
_SHOWN: Final = 60

Strategy = Literal["mean", "final"]


class RewardError(ValueError):
    """There is no reward: a failure of the verifier, and never a reward of 0."""


class MissingReward(RewardError):
    """The tests have written no file, or an empty one."""


class UnreadableReward(RewardError):
    """The tests have written what is no reward."""


def read_reward(text: str | bytes | None, json_text: str | bytes | None) -> dict[str, float]:
    """The rewards that tests have written below /logs/verifier.

    reward.json counts if it is there, even if it is empty, and reward.txt otherwise.

    Args:
        text: Content of reward.txt; None: there is none.
        json_text: Content of reward.json; None: there is none.

    Returns:
        Rewards by name; the number in reward.txt is `reward`. An object without members gives none.

    Raises:
        MissingReward: There is neither, or the one that counts is empty.
        UnreadableReward: It is no finite number, or no object of finite numbers.
    """
    if json_text is not None:
        return _from_json(_decoded(json_text, JSON))
    if text is not None:
        return _from_text(_decoded(text, TEXT))
    raise MissingReward(f"the tests have written neither {JSON} nor {TEXT} in /logs/verifier")


def combine(steps: Sequence[Mapping[str, float] | None], strategy: Strategy | None) -> dict[str, float] | None:
    """The rewards of a task of steps.

    `mean`, the default: for each name the mean over the steps that have rewards; one without the name counts as 0.
    `final`: those of the last step that was played.

    Args:
        steps: Rewards of the steps that were played, in order; None: its verifier has failed.

    Returns:
        Rewards by name; None: no step has any, so the task has failed.
    """
    if strategy == "final":
        return None if not steps or steps[-1] is None else dict(steps[-1])
    known = [rewards for rewards in steps if rewards is not None]
    names = dict.fromkeys(name for rewards in known for name in rewards)
    if not names:
        return None
    return {name: sum(rewards.get(name, 0) for rewards in known) / len(known) for name in names}


def worth(rewards: Mapping[str, float]) -> dict[str, float]:
    """The rewards that count, by name: `reward` alone if it is among them, and all, which are summed, if it is not."""
    return {KEY: rewards[KEY]} if KEY in rewards else dict(rewards)


def shortfall(rewards: Mapping[str, float] | None, least: float | Mapping[str, float] | None) -> str | None:
    """Why the next step does not begin: words about the first reward below its least; None if it begins.

    Args:
        rewards: Of the step that has ended; None: its verifier has failed, which is less than any number.
        least: `min_reward` of the step.
    """
    if least is None:
        return None
    for name, threshold in (least if isinstance(least, Mapping) else {KEY: least}).items():
        actual = (rewards or {}).get(name, -math.inf)
        if actual < threshold:
            return f"{name} is {'missing' if actual == -math.inf else actual}, and min_reward {threshold}"
    return None


def _decoded(content: str | bytes, name: str) -> str:
    if not content:
        raise MissingReward(f"the tests have left {name} empty")
    if len(content) > _MOST_CHARACTERS:
        raise UnreadableReward(f"{name} is longer than {_MOST_CHARACTERS:,} characters: it must be a reward")
    try:
        return content.decode() if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise UnreadableReward(f"{name} is not UTF-8") from error


def _from_text(text: str) -> dict[str, float]:
    try:
        value = float(text)
    except ValueError as error:
        raise UnreadableReward(f"{TEXT}: found {_shown(text)}; it must be one number") from error
    return {KEY: _finite(value, TEXT)}


def _from_json(text: str) -> dict[str, float]:
    try:
        found = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise UnreadableReward(f"{JSON}: not JSON: {str(error) or type(error).__name__}") from error
    if not isinstance(found, dict):
        raise UnreadableReward(f'{JSON}: found {_shown(found)}; it must be an object of numbers: {{"reward": 1.0}}')
    return {name: _finite(value, f"{JSON}: {name}") for name, value in found.items()}


def _integer(digits: str) -> float | int:
    # Python parses thousands of digits slowly; such a number is no finite float anyway.
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


def _finite(value: Any, where: str) -> float:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        _refuse(value, where)
    try:
        number = float(value)
    except OverflowError:
        _refuse(value, where)
    if not math.isfinite(number):
        _refuse(value, where)
    return number


def _refuse(value: Any, where: str) -> NoReturn:
    raise UnreadableReward(f"{where}: found {_shown(value)}; it must be a finite number")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return ascii(value[:_SHOWN])
    return repr(value) if isinstance(value, float) else f"a value of type {type(value).__name__}"
