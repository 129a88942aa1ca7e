"""Errors of a person's own environment in real runs: summary, files, log and `kuberoll show` name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kuberoll_workers.commands.show import show
from tests.local.support import external_generation, manifest, run_to_end

GUESS = """\
class Guess:
    def __init__(self, config):
        self.bonus = config["bonus"]

    def step(self, logs, metadata):
        rewards = [self.grade(log[-1]["content"], state) for log, state in zip(logs, metadata)]
        n = len(rewards)
        return [{"role": "user", "content": ""}] * n, [None] * n, None, rewards, [True] * n

    def grade(self, response, state):
        return float(response == state["answer"])

    def generate_dataset(self, count, seed):
        return [{"prompt": self.prompts[number]} for number in range(count)]

    def global_post_process_and_metrics(self, batch):
        return batch, {"solved": sum(batch["total_reward"]) / 0}
"""


@pytest.fixture
def generation() -> Iterator[dict[str, Any]]:
    with external_generation() as served:
        yield served


@pytest.fixture(params=["Inline", "Process"])
def guess(request: pytest.FixtureRequest, generation: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The spec of a job whose environment fails in `grade` for two rows of three."""
    (tmp_path / "guess.py").write_text(GUESS)
    rows = [
        {"prompt": "a", "idx": "row-a", "metadata": {"answer": "1"}},
        {"prompt": "b", "idx": "row-b", "metadata": {"answers": "1"}},
        {"prompt": "c", "idx": "row-c", "metadata": {"answers": "2"}},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"name": "guess", "entrypoint": "guess:Guess", "config": {"bonus": 1}, "isolation": request.param}
    return {
        "environments": [environment],
        "dataset": {"source": {"uri": "data.jsonl"}, "repeats": 2},
        "generation": generation,
    }


def test_a_step_that_raises(guess: dict[str, Any], tmp_path: Path) -> None:
    job, output = manifest(tmp_path / "job.yaml", **guess), tmp_path / "out"
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
    assert code == 1, text
    assert text.count("4 trajectories failed in environment guess: step raised KeyError: 'answer'\n") == 1
    assert 'guess.py:11 in grade\n      return float(response == state["answer"])\n' in text
    stored = [json.loads(line) for line in (output / "failures.jsonl").read_text().splitlines()]
    assert {(record["idx"], record["row"]) for record in stored} == {
        ("row-b", f"{tmp_path / 'data.jsonl'}:2"), ("row-c", f"{tmp_path / 'data.jsonl'}:3"),
    }  # fmt: skip
    assert f"first: task {stored[0]['task_index']}, rollout " in text
    assert f'data.jsonl:{stored[0]["task_index"] + 1}, idx "{stored[0]["idx"]}"\n' in text
    assert f"kuberoll show {output} --failed" in text
    for record in stored:
        assert [(Path(frame["file"]).name, frame["line"], frame["function"]) for frame in record["frames"]] == [
            ("guess.py", 6, "step"), ("guess.py", 11, "grade"),
        ]  # fmt: skip
        assert record["traceback"].endswith("KeyError: 'answer'\n")
    # Once for all failures of the cause.
    assert (output / "logs" / "worker-0.log").read_text().count("KeyError: 'answer'\n") == 2
    assert (output / "logs" / "worker-0.log").read_text().count("Traceback (most recent call last)") == 1

    failed = CliRunner().invoke(show, [str(output), "--failed"]).output
    assert failed.count("Traceback (most recent call last)") == 1
    assert 'metadata: {"answers":' in failed
    key = ["--task", str(stored[0]["task_index"]), "--rollout", str(stored[0]["rollout_index"])]
    one = CliRunner().invoke(show, [str(output), *key]).output
    for part in (f'idx          "{stored[0]["idx"]}"', 'metadata     {"answers":', 'guess.py", line 11, in grade'):
        assert part in one

    assert "its own metrics are missing: global_post_process_and_metrics raised ZeroDivisionError" in text
    assert 'guess.py:17 in global_post_process_and_metrics\n      return batch, {"solved"' in text
    metrics = json.loads((output / "aggregate_metrics.json").read_text())["environments"]["guess"]
    assert metrics["environment_metrics"]["traceback"].endswith("ZeroDivisionError: float division by zero\n")


def test_a_constructor_that_raises(guess: dict[str, Any], tmp_path: Path) -> None:
    guess["environments"][0]["config"] = {}
    code, text = run_to_end(manifest(tmp_path / "job.yaml", **guess), "--output", tmp_path / "out")
    assert code == 2, text
    assert "spec.environments[0] (guess): environment 'guess': its constructor raised KeyError: 'bonus'\n" in text
    assert 'guess.py:3 in __init__\n    self.bonus = config["bonus"]' in text


def test_a_generator_that_raises(guess: dict[str, Any], tmp_path: Path) -> None:
    guess["dataset"] = {"source": {"generator": {"count": 3}}}
    code, text = run_to_end(manifest(tmp_path / "job.yaml", **guess), "--output", tmp_path / "out")
    assert code == 2, text
    assert "generate_dataset raised AttributeError: 'Guess' object has no attribute 'prompts'" in text
    assert "guess.py:14 in generate_dataset\n" in text
