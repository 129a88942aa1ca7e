"""What environments may return, and what they may not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch

from kuberoll_workers.environments.interface import EnvironmentReturn, EpisodeStart
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    StepInvalid,
    StepOutcome,
    check_outcome,
    split_starts,
)
from kuberoll_workers.environments.outcome import split_return as split


def split_return(value: Any, size: int) -> list[StepOutcome]:
    """The outcomes, where none of them is a fault; else the first fault."""
    outcomes = split(value, size)
    for item in outcomes:
        if isinstance(item, EnvironmentFault):
            raise item
    return [item for item in outcomes if isinstance(item, StepOutcome)]


def returned(**changes: Any) -> EnvironmentReturn:
    made = EnvironmentReturn(
        [{"role": "environment", "content": "a"}, {"role": "tool", "content": ""}],
        [{"n": 1}, None],
        [["x"], None],
        [1.0, 0.5],
        [True, False],
    )
    return made._replace(**changes)


@pytest.mark.parametrize(
    "form", [tuple, lambda made: made, lambda made: (*made, None), lambda made: (*made, ["1", None])]
)
def test_five_or_six_elements(form: Any) -> None:
    first, second = split_return(form(returned()), 2)
    assert (first.role, first.content, first.metadata, first.stop_strings) == ("environment", "a", {"n": 1}, ("x",))
    assert (second.role, second.metadata, second.stop_strings, second.reward) == ("tool", None, None, 0.5)
    assert (first.terminated, second.terminated) == (True, False)


def test_none_as_a_whole_keeps_all_states_and_clears_all_stop_strings() -> None:
    for outcome in split_return(returned(metadata=None, next_stop_strings=None), 2):
        assert (outcome.metadata, outcome.stop_strings) == (None, None)


@pytest.mark.parametrize(
    ("rewards", "terminateds"),
    [
        (torch.tensor([1.0, 0.5]), torch.tensor([True, False])),
        (numpy.array([1.0, 0.5]), numpy.array([1, 0])),
        ([torch.tensor(1.0), torch.tensor(0.5)], [torch.tensor(True), torch.tensor(False)]),
        ([True, numpy.float32(0.5)], [numpy.bool_(True), 0.0]),
    ],
)
def test_numbers_of_any_library(rewards: Any, terminateds: Any) -> None:
    outcomes = split_return(returned(rewards=rewards, terminateds=terminateds), 2)
    assert [(outcome.reward, outcome.terminated) for outcome in outcomes] == [(1.0, True), (0.5, False)]


@pytest.mark.parametrize(
    "rewards",
    [
        {"right": torch.tensor([1.0, 0.0]), "short": [0.25, 0.5]},
        torch.tensor([[1.0, 0.25], [0.0, 0.5]]),
        [torch.tensor([1.0, 0.25]), [0.0, 0.5]],
    ],
)
def test_several_rewards_keep_their_parts(rewards: Any) -> None:
    first, second = split_return(returned(rewards=rewards), 2)
    names = ("right", "short") if isinstance(rewards, dict) else ("reward1", "reward2")
    assert first.reward_parts == dict(zip(names, (1.0, 0.25), strict=True))
    assert (first.reward, second.reward) == (1.25, 0.5)


@pytest.mark.parametrize("role", ["assistant", "user", "Player 1", "spieler_ü", "white", "npc:guard", "x" * 64, "7"])
def test_a_role_is_any_name(role: str) -> None:
    first, _ = split_return(returned(observations=[{"role": role, "content": "x"}] * 2), 2)
    assert isinstance(first, StepOutcome)
    assert first.role == role
    check_outcome(first)
    (start,) = split_starts([EpisodeStart(messages=[{"role": role, "content": "x"}])], 1)
    assert isinstance(start, EpisodeStart)
    with pytest.raises(StepInvalid, match=r"observation\.role"):
        check_outcome(dataclasses.replace(first, role=f"{role}\n"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards": [1.0]}, "rewards has 1 elements for 2 trajectories"),
        ({"rewards": [1.0, float("nan")]}, r"rewards\[1\] is nan"),
        ({"rewards": [1.0, None]}, r"rewards\[1\] is NoneType"),
        ({"rewards": 1.0}, "rewards is float 1.0"),
        ({"rewards": {}}, "empty dict"),
        ({"rewards": [[1.0], [1.0, 2.0]]}, "rows of different lengths"),
        ({"rewards": [[], []]}, "rows of different lengths"),
        ({"rewards": [1.0, [1.0]]}, "rows of different lengths"),
        ({"rewards": {"right": [[1.0], [2.0]]}}, r"rewards\['right'\]\[0\] is list"),
        ({"terminateds": [True, None]}, r"terminateds\[1\] is NoneType None; it must be a boolean"),
        ({"terminateds": [True, "no"]}, r"terminateds\[1\]"),
        ({"terminateds": [True, 2]}, r"terminateds\[1\]"),
        ({"terminateds": [True, float("nan")]}, r"terminateds\[1\]"),
        ({"next_stop_strings": [5, None]}, r"next_stop_strings\[0\] is int 5"),
        ({"next_stop_strings": ["x", None]}, r"next_stop_strings\[0\] is str 'x'"),
        ({"metadata": [1, None]}, r"metadata\[0\] is int 1"),
        ({"observations": [{"role": "environment"}, {"content": "x"}]}, r"observations\[0\]"),
        ({"answers": ["1"]}, "answers has 1 elements for 2"),
        *(
            ({"observations": [{"role": role, "content": "x"}] * 2}, r"observations\[0\]\.role (is|has|holds) .+")
            for role in (
                "",
                " ",
                "wizard<|im_end|>\n\0",
                "a\nb",
                "user\t",
                "[INST]",
                "</s>",
                "a|b",
                "x" * 65,
                "a\u200bb",
                "a\x1b",
                "\ud800",
                7,
                None,
                " user",
                "user:",
            )
        ),
        ({"observations": [[{"content": "x"}, {"role": "", "content": "x"}]] * 2}, r"observations\[0\]\[1\]\.role"),
    ],
)
def test_nonsense_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StepInvalid, match=said):
        split_return(returned(**changes), 2)
