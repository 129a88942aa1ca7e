"""EnvironmentReturn: a named tuple of 5 elements, or of 6 with answers."""

from __future__ import annotations

import copy
import pickle

import pytest

from kuberoll_workers.environments import EnvironmentReturn

FIVE = ([{"role": "environment", "content": "x"}], [None], None, [1.0], [True])


def test_old_code_unpacks_five_and_later_code_six() -> None:
    observations, metadata, stops, rewards, terminateds = EnvironmentReturn(*FIVE)
    assert (observations, metadata, stops, rewards, terminateds) == FIVE
    *five, answers = EnvironmentReturn(*FIVE, answers=["4"])
    assert (tuple(five), answers) == (FIVE, ["4"])
    assert len(EnvironmentReturn(*FIVE, answers=None)) == 6
    assert len(EnvironmentReturn(*FIVE, None)) == 6


def test_by_keyword_and_by_name() -> None:
    made = EnvironmentReturn(
        observations=FIVE[0], metadata=FIVE[1], next_stop_strings=FIVE[2], rewards=FIVE[3], terminateds=FIVE[4]
    )
    assert (made == EnvironmentReturn(*FIVE), EnvironmentReturn(*FIVE) == FIVE) == (True, True)
    assert (made.observations, made.metadata, made.next_stop_strings, made.rewards, made.terminateds) == FIVE
    assert made.answers is None
    assert EnvironmentReturn(*FIVE, ["4"]).answers == ["4"]


@pytest.mark.parametrize("made", [EnvironmentReturn(*FIVE), EnvironmentReturn(*FIVE, ["4"])])
def test_like_a_named_tuple(made: EnvironmentReturn) -> None:
    assert made._fields == ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")
    assert list(made._asdict()) == list(made._fields[: len(made)])
    assert EnvironmentReturn._make(made) == made
    assert hash(EnvironmentReturn((), (), None, (), ())) == hash(((), (), None, (), ()))
    assert repr(made).startswith("EnvironmentReturn(observations=[{'role': 'environment', 'content': 'x'}], metadata=")
    assert ("answers=['4']" in repr(made)) == (len(made) == 6)


@pytest.mark.parametrize("made", [EnvironmentReturn(*FIVE), EnvironmentReturn(*FIVE, None)])
def test_copies_and_pickles_keep_their_length(made: EnvironmentReturn) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(made, protocol))
        assert (type(loaded), len(loaded), loaded) == (EnvironmentReturn, len(made), made)
    assert len(copy.deepcopy(made)) == len(copy.copy(made)) == len(made)


def test_replacing_adds_answers_and_knows_its_fields() -> None:
    made = EnvironmentReturn(*FIVE)
    assert made._replace(rewards=[2.0]).rewards == [2.0]
    assert len(made._replace(rewards=[2.0])) == 5
    assert len(made._replace(answers=["4"])) == 6
    with pytest.raises(ValueError, match="reward"):
        made._replace(reward=[2.0])


def test_missing_and_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        EnvironmentReturn(*FIVE[:4])  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        EnvironmentReturn(*FIVE, None, None)  # type: ignore[call-arg]


def test_matching() -> None:
    match EnvironmentReturn(*FIVE):
        case EnvironmentReturn(observations=observations, answers=None):
            assert observations == FIVE[0]
        case _:
            raise AssertionError
