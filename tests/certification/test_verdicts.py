"""The verdict on a row, by the rewards of its answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.certification.general import ANSWERS
from kuberoll_workers.certification.schedule import rounds
from kuberoll_workers.certification.subjects import Answers
from kuberoll_workers.certification.trials import ECHO, PROMPT, Graded, Outcome, Repeated, Trial, TrialKind
from kuberoll_workers.certification.verdicts import judge

REWARDS = st.sampled_from([0.0, 0.5, 1.0])


def repeated(
    kind: TrialKind, rewards: list[float | None], name: str = "", *, problem: str | None = "broken"
) -> Repeated:
    trial = Trial(kind=kind, name=name or kind)
    return Repeated(trial, [Graded(Outcome(reward=one, problem=problem if one is None else None)) for one in rewards])


def classes(*given: Repeated) -> set[str]:
    return {finding.kind for finding in judge(given).findings}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("solution", [1.0, 1.0]), ("nothing", [0.0, 0.0]), ("attack", [0.0])], set()),
        ([("solution", [0.0, 0.0]), ("nothing", [0.0, 0.0])], {"never_passes"}),
        ([("solution", [1.0, 1.0]), ("nothing", [1.0, 1.0])], {"always_passes"}),
        ([("solution", [1.0, 1.0]), ("nothing", [0.0, 0.0]), ("attack", [1.0])], {"passes_on"}),
        ([("solution", [1.0, 0.0, 1.0]), ("nothing", [0.0, 0.0])], {"flaky"}),
        ([("solution", [1.0, 0.0, 0.0, 0.0]), ("nothing", [0.0] * 4)], {"depends_on_order"}),
        ([("solution", [None, None]), ("nothing", [0.0, 0.0])], {"grader_error"}),
    ],
)
def test_the_class_of_a_finding(given: list[tuple[TrialKind, list[float | None]]], expected: set[str]) -> None:
    assert classes(*(repeated(kind, rewards) for kind, rewards in given)) == expected


def test_a_failure_of_the_network_is_named() -> None:
    failed = repeated("solution", [None], problem="step raised URLError: <urlopen error [Errno -3] Temporary failure")
    assert classes(failed, repeated("nothing", [0.0])) == {"needs_network"}


@pytest.mark.parametrize(
    ("usual", "network", "other", "expected"),
    [
        ([1.0], False, None, ("certified", "not needed", [])),
        ([1.0], True, [1.0], ("certified", "not needed", [])),
        ([1.0], True, [0.0], ("certified", "needed", ["needs_network"])),
        ([1.0], True, [None], ("certified", "needed", ["needs_network"])),
        ([0.0], False, [1.0], ("refused", "needed", ["needs_network"])),
        ([None], False, [1.0], ("refused", "needed", ["needs_network"])),
        ([0.0], False, [0.0], ("refused", None, ["never_passes"])),
        ([0.0], True, [1.0], ("refused", "not needed", ["never_passes"])),
        ([1.0], None, None, ("certified", None, [])),
    ],
)
def test_a_solution_with_and_without_a_network(
    usual: list[float | None], network: bool | None, other: list[float | None] | None, expected: object
) -> None:
    given = [repeated("solution", usual), repeated("nothing", [0.0]), repeated("attack", [0.0])]
    if other is not None:
        trial = Trial(kind="solution", name="solution", network=not network)
        given.append(Repeated(trial, repeated("solution", other).gradings))
    judgement = judge(given, network=network)
    found = [one.kind for one in (*judgement.findings, *judgement.warnings)]
    assert (judgement.verdict, judgement.network, found) == expected


def test_a_network_that_could_not_be_had_refuses_nothing_and_says_nothing() -> None:
    trial = Trial(kind="solution", name="solution", network=True)
    lost = Repeated(trial, [Graded(Outcome(reward=None, trouble="this driver gives no network"))])
    judgement = judge([repeated("solution", [1.0]), repeated("nothing", [0.0]), lost], network=False)
    assert (judgement.verdict, judgement.network, judgement.unproven) == ("certified", "not needed", ())


def test_two_solutions_that_disagree() -> None:
    found = classes(
        repeated("solution", [1.0, 1.0], "truth"),
        repeated("solution", [0.0, 0.0], "worked"),
        repeated("nothing", [0.0]),
    )
    assert found == {"wrong_truth"}


def test_a_grader_that_finds_something_in_the_prompt_is_a_warning_unless_the_prompt_says_the_answer() -> None:
    right, nothing = repeated("solution", [1.0, 1.0]), repeated("nothing", [0.0])
    echo, wrong = repeated("attack", [1.0], ECHO), repeated("attack", [0.0], "wrong")
    judgement = judge([right, nothing, echo, wrong])
    assert (judgement.verdict, [one.kind for one in judgement.warnings]) == ("certified", ["reads_prompt"])
    stated = repeated("attack", [1.0], f"{PROMPT}'s stated answer")
    assert classes(right, nothing, echo, stated, wrong) == {"truth_in_prompt"}


def test_a_machine_that_could_not_be_had_refuses_no_row() -> None:
    trial = Trial(kind="solution", name="solution")
    lost = Repeated(trial, [Graded(Outcome(reward=None, trouble="no sandbox could be started"))] * 2)
    judgement = judge([lost, repeated("nothing", [0.0]), repeated("attack", [None], problem=None)])
    assert (judgement.verdict, judgement.findings) == ("unproven", ())
    assert "no sandbox could be started" in judgement.unproven[0]


def test_without_a_solution_nothing_is_certified() -> None:
    judgement = judge([repeated("nothing", [0.0])])
    assert judgement.verdict == "unproven"
    assert "no solution" in judgement.unproven[0]


@given(reward=REWARDS, count=st.integers(1, 30), kind=st.sampled_from(["solution", "nothing", "attack"]))
def test_equal_rewards_are_never_flaky(reward: float, count: int, kind: TrialKind) -> None:
    assert not classes(repeated(kind, [reward] * count)) & {"flaky", "depends_on_order"}


@given(
    solution=st.lists(REWARDS, min_size=1, max_size=8),
    nothing=st.lists(REWARDS, min_size=1, max_size=8),
    more=st.lists(REWARDS, max_size=8),
)
def test_a_row_that_is_refused_stays_so_with_more_repetitions(
    solution: list[float | None], nothing: list[float | None], more: list[float | None]
) -> None:
    if judge([repeated("solution", solution), repeated("nothing", nothing)]).verdict == "refused":
        again = judge([repeated("solution", solution + more), repeated("nothing", nothing + more)])
        assert again.verdict == "refused"


@given(count=st.integers(1, 5), repetitions=st.integers(1, 8), seed=st.integers(0, 9))
def test_each_row_has_each_answer_in_each_round(count: int, repetitions: int, seed: int) -> None:
    trials = [Trial(kind="nothing", name="nothing"), Trial(kind="solution", name="solution")]
    found = list(rounds([Answers(trials=trials)] * count, repetitions, seed))
    assert len(found) == repetitions
    for number, order in enumerate(found):
        assert sorted(row for row, _ in order) == list(range(count))
        assert {given[0].kind for _, given in order} == {"solution" if number % 2 else "nothing"}


def test_general_attacks_end_with_no_number_that_may_be_right() -> None:
    for name, text in ANSWERS.items():
        numbers = [word.strip(".,:}") for word in text.split() if word.strip(".,:}").replace(".", "").isdigit()]
        assert not numbers or numbers[-1] == "987654.321", name
