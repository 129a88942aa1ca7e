"""`kuberoll why`, as it is typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kuberoll_workers.commands.why import why
from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.data.incidents import Incident, IncidentLog
from kuberoll_workers.data.record import TurnRecord, encode_line
from tests.analysis.report.runs import dropped, failure, message, store, trajectory


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(why, list(map(str, arguments)))


def incidents() -> list[Incident]:
    log = IncidentLog()
    for number in range(3):
        log.note(
            Cause("ImageUnavailable", Evidence(http_status=503)), "registry.example/task:1: answers 503",
            stage="environment", sequel="tried again", turn=0, at=1_790_000_000.0 + number, seconds=2.0,
        )  # fmt: skip
    log.note(
        Cause("PolicyLost"), "the replica is silent", stage="generation", sequel="sent again", turn=2,
        at=1_790_000_100.0, seconds=4.5, tokens=120,
    )  # fmt: skip
    return log.all


@pytest.fixture
def run(tmp_path: Path) -> str:
    first = replace(failure(3), attempt=0, reason="PolicyUnreachable", seconds=9.0, tokens=40)
    second = replace(failure(3), attempt=1, reason="PolicyUnreachable", evidence={"error": "ECONNREFUSED"}, seconds=1.0)
    return store(
        tmp_path / "run",
        [replace(trajectory(0, 1, rewards=[0.5]), incidents=incidents()), trajectory(1), first, second, dropped(4)],
    )


def test_a_trajectory_that_met_much_and_finished(run: str) -> None:
    done = typed(run, "0/1")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "trajectory 0/1 of puzzle has finished with the reward 0.5 after 1 turn",
        "  14:13:20Z before its first turn: an image could not be fetched 3 times (infrastructure); it was tried "
        "again; it cost 6.0 s",
        "             registry.example/task:1: answers 503",
        "             evidence: HTTP status 503",
        "  14:15:00Z turn 2: the engine's replica was lost (infrastructure); the request was sent again; it cost 4.5 s "
        "and 120 generated tokens",
        "             the replica is silent",
        "So its reward is the policy's doing: its environment ended the episode.",
    ]


def test_a_trajectory_that_failed_twice(run: str) -> None:
    lines = typed(run, "3-0").stdout.splitlines()
    assert "has failed after" in lines[0]
    assert lines[1].startswith("  attempt 1 failed: no engine could be reached: ")
    assert "system error ECONNREFUSED" in lines[3]
    assert lines[-1] == (
        "So it has no reward, which is not a reward of 0: the infrastructure's fault, not the policy's. --resume plays "
        "it again."
    )


def test_others(run: str) -> None:
    assert "nothing went wrong on its way" in typed(run, "1/0").stdout
    assert "enough other samples of its group finished first" in typed(run, "4/0").stdout


def test_what_is_not_there(run: str, tmp_path: Path) -> None:
    assert typed(run, "9/9").exit_code == 1
    assert typed(tmp_path / "nowhere", "0/0").exit_code == 2
    wrong = typed(run, "nine")
    assert wrong.exit_code == 2
    assert "give its task and rollout index, as 17/3" in wrong.stderr


def test_one_under_way(run: str) -> None:
    turns = Path(run) / "turns"
    turns.mkdir()
    records = [
        TurnRecord(
            task_index=7, rollout_index=0, attempt=0, turn=number, messages=[message("assistant", "a", number)],
            reward=0.0, reward_parts={}, metadata=None, stop_strings=None, answer=None, generation_seconds=0.1,
            environment_seconds=0.1, incidents=incidents() if number == 2 else None,
        )
        for number in (1, 2)
    ]  # fmt: skip
    (turns / "shard-00000-000000.jsonl").write_bytes(b"".join(map(encode_line, records)))
    done = typed(run, "7/0")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "trajectory 7/0 has not ended: 2 turns of it are stored"
    assert "an image could not be fetched 3 times" in lines[1]
    assert lines[-1] == "It has no reward yet."


def test_the_whole_run(run: str) -> None:
    lines = typed(run).stdout.splitlines()
    rows = [line.split()[:7] for line in lines[1:-1]]
    assert rows == [
        ["infrastructure", "PolicyUnreachable", "1", "0", "1.0", "0", "3/0"],
        ["infrastructure", "ImageUnavailable", "0", "3", "6.0", "0", "0/1"],
        ["infrastructure", "PolicyLost", "0", "1", "4.5", "120", "0/1"],
    ]
    assert lines[-1] == f"One of them in full: kuberoll why {run} 3/0"


def test_a_run_without_trouble(tmp_path: Path) -> None:
    assert typed(store(tmp_path / "run", [trajectory(0)])).stdout == "nothing went wrong\n"
