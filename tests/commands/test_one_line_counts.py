"""Of several lines of one trajectory every command counts the same one: the rule of docs/reference/run-files.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kuberoll_workers.commands.aggregate import aggregate
from kuberoll_workers.commands.export import export
from kuberoll_workers.commands.report import report
from kuberoll_workers.commands.show import show
from kuberoll_workers.data.record import AnyRecord, FailureRecord, TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.copies import Copies
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.pods.worker import count_stored
from tests.analysis.report.runs import dropped, failure, message, trajectory


def attempt(number: int, text: str, reward: float) -> TrajectoryRecord:
    told = [message("user", "hi", 0), message("assistant", text, 1)]
    record = trajectory(0, messages=told, rewards=[reward])
    record.attempt = number
    return record


FIRST, SECOND = attempt(0, "the first attempt", 0.0), attempt(1, "the second attempt", 1.0)


def stored(directory: Path, lines: Sequence[AnyRecord]) -> str:
    (directory / "shard-00000.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    return str(directory)


def typed(command: Any, *arguments: object) -> str:
    done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def numbers_of_page(run: str) -> dict[str, Any]:
    typed(report, run)
    (data,) = re.findall(r'id="data"[^>]*>(.*?)</script>', (Path(run) / "report.html").read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(data)["numbers"]["all"]
    return found


@pytest.fixture(params=[(FIRST, SECOND), (SECOND, FIRST)], ids=["in order", "out of order"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return stored(tmp_path, [*request.param, trajectory(1)])


def test_aggregate(run: str) -> None:
    found = json.loads(typed(aggregate, run, "--output", "-"))
    assert (found["trajectories"], found["duplicates"]) == (2, 1)
    assert found["environments"]["puzzle"]["fields"]["total_reward"]["mean"] == 1.0


def test_report(run: str) -> None:
    found = numbers_of_page(run)
    assert (found["finished"], found["reward"]["mean"]) == (2, 1.0)


def test_show(run: str) -> None:
    shown = typed(show, run, "--task", 0)
    assert "the second attempt" in shown
    assert "the first attempt" not in shown


def test_export(run: str, tmp_path: Path) -> None:
    typed(export, run, "--to", "openai-chat", "--output", tmp_path / "chats.jsonl")
    chats = (tmp_path / "chats.jsonl").read_text()
    assert (chats.count("\n"), "the second attempt" in chats) == (2, True)


def test_a_pod_that_goes_on(run: str) -> None:
    found = count_stored(DirectoryStorage(Path(run)), 0, 1)
    assert (found.trajectories, found.reward_sum) == (2, 2.0)


@pytest.mark.parametrize("as_table", [False, True])
def test_a_copy(run: str, as_table: bool) -> None:
    if as_table:
        records.to_parquet(DirectoryStorage(Path(run)), "shard-00000")
    lines = list(Copies(run).trajectories("shard-00000"))
    attempts = {item.key: item.attempt for item in (decode_line(line, TrajectoryRecord, where="") for line in lines)}
    assert (len(lines), attempts) == (2, {(0, 0): 1, (1, 0): 0})


def test_a_shard_that_became_parquet(run: str) -> None:
    records.to_parquet(DirectoryStorage(Path(run)), "shard-00000")
    assert {item.key: item.attempt for item in RunFiles(run).trajectories()} == {(0, 0): 1, (1, 0): 0}


def test_a_later_line_that_cannot_be_read_does_not_count(run: str) -> None:
    broken = encode_line(attempt(2, "broken", 9.0)).replace(b'"turn_count"', b'"turns"')
    with (Path(run) / "shard-00000.jsonl").open("ab") as file:
        file.write(broken)
    assert [item.attempt for item in RunFiles(run).trajectories()] == [1, 0]
    assert numbers_of_page(run)["reward"]["mean"] == 1.0


def later(record: Any) -> Any:
    record.attempt = 1
    return record


@pytest.mark.parametrize(
    ("failed", "unwanted", "outcome"),
    [
        (failure(0), later(dropped(0)), "oversampled"),
        (later(failure(0)), dropped(0), "failed"),
        (failure(0), dropped(0), "failed"),
    ],
)
def test_what_did_not_finish_ended_once(failed: FailureRecord, unwanted: Any, outcome: str, tmp_path: Path) -> None:
    run = stored(tmp_path, [trajectory(1)])
    (tmp_path / "failures.jsonl").write_bytes(encode_line(failed))
    (tmp_path / "dropped.jsonl").write_bytes(encode_line(unwanted))
    found = json.loads(typed(aggregate, run, "--output", "-"))["environments"]["puzzle"]
    assert {**found["dropped"], **({"failed": found["failed"]} if found["failed"] else {})} == {outcome: 1}
    assert numbers_of_page(run)["outcomes"] == {"terminated": 1, outcome: 1}
    assert f" {outcome} " in typed(show, run).replace("\n", " ")
