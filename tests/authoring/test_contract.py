"""The contract passes for what is right, and each fault is found by the check that is for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kuberoll_workers.authoring import CHECKS, ContractBroken, Result, check_environment
from kuberoll_workers.authoring.contract import run_contract
from kuberoll_workers.authoring.subject import Subject
from kuberoll_workers.environments import BUILT_INS
from kuberoll_workers.environments.process_access import ProcessAccess
from tests.authoring import broken
from tests.environments.support import SERVED

ENTRYPOINTS = "tests.authoring.broken"


def failures(environment: Any, **options: Any) -> dict[str, Result]:
    with pytest.raises(ContractBroken) as raised:
        check_environment(environment, **options)
    return {result.check: result for result in raised.value.results if result.status == "failed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        # Its programs take a minute.
        pytest.param(name, marks=pytest.mark.long if name == "code_execution" else ())
        for name in sorted(set(BUILT_INS) - SERVED)
    ],
)
def test_the_built_ins_pass(name: str) -> None:
    results = {result.check: result.status for result in check_environment(name)}
    # No other one scores groups.
    assert results.keys() == CHECKS.keys() - {"groups"}
    expected = {"generator", "replay", "closing"} if name == "string_match" else {"replay", "closing"}
    assert {check for check, status in results.items() if status == "skipped"} == expected


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        # A process of an environment takes seconds to start, and is the same for all.
        pytest.param(name, marks=() if name in ("sliding_puzzle", "string_match") else pytest.mark.long)
        for name in sorted(set(BUILT_INS) - SERVED)
    ],
)
def test_the_built_ins_pass_in_a_process(name: str) -> None:
    # Programs of code_execution are watched by way of /proc.
    readable = ["/proc"] if name == "code_execution" else []
    subject = Subject.of_class(name, isolation="Process", timeout=120)
    subject = dataclasses.replace(subject, access=ProcessAccess(readable=readable))
    results = {result.check: result for result in run_contract(subject)}
    assert not [result for result in results.values() if result.status == "failed"]
    assert results["scoring"].status == "ok"
    assert results["inputs"].status == results["metrics"].status == "skipped"


def test_an_environment_that_speaks_as_an_assistant_passes_and_is_told_what_that_means() -> None:
    row = {"prompt": "Which number?", "metadata": {"number": 3}}
    results = {result.check: result for result in check_environment(broken.Opponent, rows=[row], skip=["scoring"])}
    assert results["returns"].status == "ok"
    assert "observations of the role assistant are context, and never learned from" in results["returns"].note
    assert "columns are named reward1, reward2" in results["returns"].note


@pytest.mark.parametrize("config", [{"size": 2, "maxMoves": 1}, {"rows": 2, "cols": 5}, {"shuffleMoves": 1}])
def test_puzzles_of_other_configs_pass(config: dict[str, Any]) -> None:
    check_environment("sliding_puzzle", config)


@pytest.mark.parametrize("config", [{"slippery": True}, {"rows": 1, "cols": 2, "maxMoves": 1}, {"holes": 1}])
def test_grid_worlds_of_other_configs_pass(config: dict[str, Any]) -> None:
    check_environment("grid_world", config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"score": "State"}, {"maxQueries": 0}])
def test_databases_of_other_configs_pass(config: dict[str, Any]) -> None:
    check_environment("sqlite", config)


@pytest.mark.parametrize("config", [{"maxCalls": 1}, {"steps": 4, "maxOperand": 9, "operators": ["/"]}])
def test_calculators_of_other_configs_pass(config: dict[str, Any]) -> None:
    check_environment("calculator", config)


@pytest.mark.parametrize("mode", ["exact", "regex", "jsonSchema"])
@pytest.mark.parametrize("part", ["response", "lastLine", "tag", "boxed", "codeBlock"])
def test_string_matches_of_all_modes_pass(mode: str, part: str) -> None:
    results = check_environment("string_match", {"mode": mode, "part": part})
    assert {result.check: result.status for result in results}["scoring"] == "ok"


@pytest.mark.parametrize("environment", [broken.Counting, broken.Corridor])
def test_a_good_environment_passes(environment: Any) -> None:
    skipped = {result.check for result in check_environment(environment) if result.status == "skipped"}
    assert skipped == ({"rows", "replay", "closing"} if environment is broken.Counting else {"rows", "state"})


@pytest.mark.parametrize("isolation", ["Inline", pytest.param("Process", marks=pytest.mark.processes)])
def test_a_good_environment_that_scores_groups_passes(isolation: str) -> None:
    results = {result.check: result for result in check_environment(f"{ENTRYPOINTS}:Ranked", isolation=isolation)}
    assert (results["groups"].status, results["creation"].note.rpartition(", ")[2]) == ("ok", "score_group")


@pytest.mark.processes
def test_a_good_environment_with_episodes_passes_in_a_process() -> None:
    results = {result.check: result for result in check_environment(f"{ENTRYPOINTS}:Corridor", isolation="Process")}
    assert {check for check, result in results.items() if result.status == "skipped"} == {
        "rows",
        "inputs",
        "metrics",
        "state",
    }


FAULTS: dict[Any, tuple[set[str], str]] = {
    broken.FailingConstructor: ({"creation"}, "its constructor raised KeyError: 'rewards'"),
    broken.UnknownRecovery: ({"creation"}, "recovery is 'later'; it must be one of"),
    broken.RandomRows: ({"generator"}, "generate_dataset(6, 0) returned another row 0 the second time"),
    broken.FewRows: ({"generator"}, "generate_dataset(6, 0) returned 3 rows"),
    broken.RowsWithoutPrompt: ({"generator"}, "generated row 0"),
    broken.FailingGenerator: ({"generator"}, "generate_dataset raised FileNotFoundError: words.txt"),
    broken.RefusesItsRows: ({"rows"}, "metadata.solution: found nothing; it must be a text"),
    broken.MarksRows: ({"rows"}, "check_row changed the metadata: "),
    broken.ShortRewards: ({"returns"}, "rewards"),
    broken.NanReward: ({"returns"}, "nan"),
    broken.TextFromReset: ({"returns"}, "reset returned str 'go' for episode 0"),
    broken.FailingStep: ({"returns"}, "step raised KeyError: 'answer'"),
    broken.ExpectsWords: ({"nonsense"}, "step raised IndexError: list index out of range (empty; also white space)"),
    broken.BlamesTheRow: ({"nonsense"}, "there is no response (empty)"),
    broken.Clock: ({"determinism"}, "the second time, turn 1"),
    broken.GlobalRandom: ({"determinism"}, "the reward is"),
    broken.NamedStart: ({"determinism"}, "two episodes of the same seed begin differently"),
    broken.HiddenState: ({"batches", "state"}, "in one batch"),
    broken.ForgetsAtTheEnd: ({"state"}, "another instance cannot go on from the metadata: step raised KeyError"),
    broken.SetInMetadata: ({"plain"}, "metadata.seen is"),
    broken.FirstOfBatch: ({"batches"}, "in one batch"),
    broken.Crossed: ({"batches"}, "in one batch"),
    broken.ChangesMetadata: ({"inputs"}, "step changed the metadata: "),
    broken.ChangesMessages: ({"inputs"}, "step changed the messages: "),
    broken.RandomWalk: ({"determinism"}, "the second time"),
    broken.SharedSteps: ({"batches", "replay"}, "side by side"),
    broken.NeverFrees: ({"closing"}, "self.left has 8 more items after its episodes were closed"),
    broken.NoClose: ({"closing"}, "there is reset but no close"),
    broken.ClosesOnce: ({"closing"}, "close raised KeyError"),
    broken.ShortScores: ({"groups"}, "what score_group returned has 0 elements for 1 trajectories"),
    broken.DrawnScores: ({"groups"}, "score_group scored the same group otherwise the second time: GroupScore("),
    broken.CountedScores: ({"groups"}, "score_group scored the same group otherwise the second time"),
    broken.AcceptsEverything: ({"scoring"}, "1 of 2 cases"),
    broken.WrongCases: ({"scoring"}, "scoring_cases[0].responses: it must be a list"),
    broken.DividesByNone: ({"metrics"}, "raised ZeroDivisionError: division by zero, with 0 trajectories"),
}
"""The checks that a fault must fail, and words of the message of the first."""


@pytest.mark.parametrize("environment", FAULTS, ids=lambda environment: environment.__name__)
def test_a_fault_is_found_by_its_check(environment: Any) -> None:
    checks, text = FAULTS[environment]
    found = failures(environment)
    assert found.keys() == checks
    assert text in found[min(checks)].note
