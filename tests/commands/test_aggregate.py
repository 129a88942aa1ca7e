"""What `kuberoll aggregate` prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kuberoll_workers.commands.aggregate import aggregate
from kuberoll_workers.commands.export import export
from kuberoll_workers.commands.report import report
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import Timing, TokenCounts, TrajectoryRecord, encode_line

JOB = """
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata: {name: job}
spec:
  generation: {model: {source: model}}
  environments:
    - {name: unused, type: math}
    - {name: env, entrypoint: "counting:Counting"}
  dataset: {source: {rows: [{messages: [{role: user, content: hi}], task_name: env}]}}
"""
COUNTING = """
class Counting:
    def __init__(self, config): ...
    def step(self, logs, metadata): ...
    def global_post_process_and_metrics(self, batch):
        return batch, {"solved": sum(batch["total_reward"]), "asked": batch["message_log"][0][0]["content"]}
"""


def shard(directory: Path, rewards: list[list[float]], name: str = "env") -> str:
    directory.mkdir(exist_ok=True)
    with (directory / "shard-00000.jsonl").open("wb") as file:
        for task, group in enumerate(rewards):
            for rollout, reward in enumerate(group):
                record = TrajectoryRecord(
                    task_index=task,
                    rollout_index=rollout,
                    task_name=name,
                    idx=task,
                    messages=[Message("user", "hi", token_array([1, 2]))],
                    total_reward=reward,
                    rewards=[reward],
                    stop_reason="max_turns",
                    turn_count=1,
                    tokens=TokenCounts(2, 7, 0),
                    timing=Timing([0.5], [0.25]),
                    metadata=None,
                    seed=None,
                    attempt=0,
                )
                file.write(encode_line(record))
    return str(directory)


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(aggregate, [str(word) for word in words])


def test_the_table_and_the_files(tmp_path: Path) -> None:
    place = shard(tmp_path / "run", [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    done = command(place)
    assert done.exit_code == 0, done.output
    cells = ("env", "12", "0.500", "0.25 to 0.75", "pass@1 50.0%", "pass@4 66.7%", "84", "env: max_turns 12")
    assert all(cell in done.stdout for cell in cells), done.stdout
    assert done.stdout.splitlines()[-2:] == [
        f"  {place}/aggregate_metrics.json",
        f"  {place}/task_metrics.jsonl",
    ]
    assert json.loads((tmp_path / "run" / "aggregate_metrics.json").read_bytes())["trajectories"] == 12
    assert len((tmp_path / "run" / "task_metrics.jsonl").read_bytes().splitlines()) == 3


def test_output_elsewhere(tmp_path: Path) -> None:
    place = shard(tmp_path / "run", [[1]])
    assert command(place, "--output", tmp_path / "new" / "numbers.json").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["shard-00000.jsonl"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["numbers-tasks.jsonl", "numbers.json"]
    printed = command(place, "--output", "-")
    assert printed.stdout_bytes == (tmp_path / "new" / "numbers.json").read_bytes()
    assert "pass@1 100.0%" in printed.stderr


def test_the_environments_own_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "counting", raising=False)
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "job.yaml").write_text(JOB)
    place = shard(tmp_path / "run", [[1, 0.5]])
    done = command(place, "--manifest", tmp_path / "job.yaml", "--success-threshold", "0.25")
    assert done.exit_code == 0, done.output
    assert "env: solved 1.5, asked hi" in done.stdout
    found = json.loads((tmp_path / "run" / "aggregate_metrics.json").read_bytes())["environments"]
    assert list(found) == ["unused", "env"]
    assert found["env"]["environment_metrics"] == {"solved": 1.5, "asked": "hi"}
    assert found["env"]["success"]["pass_at_k"] == {"1": 100.0, "2": 100.0}
    # What the manifest does not know is told, and nothing else is lost.
    other = command(shard(tmp_path / "other", [[1]], name="chess"), "--manifest", tmp_path / "job.yaml")
    assert other.exit_code == 0
    assert "has no environment 'chess'" in other.stdout


def test_rewards_that_are_no_successes(tmp_path: Path) -> None:
    assert "best@2 0.75" in command(shard(tmp_path / "run", [[0.75, -1]])).stdout


def test_what_is_no_run_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = command(tmp_path)
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "give the output directory of a run" in nothing.stderr
    broken = Path(shard(tmp_path / "broken", [[1]]))
    with (broken / "shard-00000.jsonl").open("ab") as file:
        file.write(b"[]\n")
    told = command(broken)
    # The line is set aside, with its place; the shard is not refused.
    assert told.exit_code == 0
    assert "shard-00000.jsonl:2: not a TrajectoryRecord" in caplog.text
    assert (broken / "aggregate_metrics.json").exists()
    other = command(shard(tmp_path / "run", [[1]]), "--manifest", tmp_path / "absent.yaml")
    assert (other.exit_code, "absent.yaml" in other.stderr) == (2, True)
    one, two = shard(tmp_path / "one", [[1]]), shard(tmp_path / "two", [[1, 1]], name="chess")
    assert "aggregate each run by itself" in command(one, two).stderr


def test_no_finished_trajectory(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").touch()
    done = command(tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "aggregate_metrics.json").read_bytes())["environments"] == {}


def test_foreign_names_are_no_markup_and_move_no_cursor(tmp_path: Path) -> None:
    result = command(shard(tmp_path / "run", [[1.0]], name="[/x] \x1b[2J"))
    assert result.exit_code == 0, result.output
    assert "[/x] ␛[2J" in result.output
    assert "\x1b[2J" not in result.output


@pytest.mark.parametrize("index", [2**63, 10**30])
def test_a_line_with_an_index_beyond_64_bits_is_set_aside(
    index: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(shard(tmp_path / "run", [[1.0]])) / "shard-00000.jsonl"
    path.write_text(path.read_text().replace('"task_index":0', f'"task_index":{index}'))
    for called in (aggregate, report, export):
        words = ["--to", "trl"] if called is export else []
        result = CliRunner().invoke(called, [str(tmp_path / "run"), *words])
        # Nothing is left that could be exported.
        assert result.exit_code == (2 if called is export else 0), result.output
    # Once, however often it is read.
    assert caplog.text.count("shard-00000.jsonl:1: not a TrajectoryRecord") == 1
