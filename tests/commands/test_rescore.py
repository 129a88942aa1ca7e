"""`kuberoll rescore`, as it is typed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.commands.rescore import rescore
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import Timing, TokenCounts, TrajectoryRecord, encode_line
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.output.run_directory import MANIFEST, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.worker.environments import environment_factory
from tests.local.support import manifest

CONFIG = {"size": 2, "maxMoves": 3}
WAYS = ("up", "down", "left", "right")
SCORING = """
import random
from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment

class Doubled(SlidingPuzzleEnvironment):
    def step(self, logs, metadata):
        returned = super().step(logs, metadata)
        return returned._replace(rewards=[2 * reward + 0.5 for reward in returned.rewards])

class Peeking(SlidingPuzzleEnvironment):
    def __init__(self, config):
        config = dict(config)
        self.path = config.pop("peek")
        super().__init__(config)

    def look(self):
        try:
            return open(self.path).read(1) != ""
        except OSError:
            return False

    def generate_dataset(self, count, seed):
        if self.look():
            raise ValueError("the run can be read while rows are made")
        return super().generate_dataset(count, seed)

    def step(self, logs, metadata):
        returned = super().step(logs, metadata)
        return returned._replace(rewards=[float(self.look()) for _ in logs])

class Moody(SlidingPuzzleEnvironment):
    def step(self, logs, metadata):
        returned = super().step(logs, metadata)
        return returned._replace(rewards=[random.random() for _ in logs])
"""


def played(row: dict[str, Any], task_index: int, rollout_index: int) -> TrajectoryRecord:
    """A puzzle in which the same move is made again and again, as the loop stores it."""
    environment, state = SlidingPuzzleEnvironment(CONFIG), row["metadata"]
    messages = [Message(said["role"], said["content"], token_array([1])) for said in row["messages"]]
    log, rewards, over = list(row["messages"]), [], False
    while not over:
        text = f"<action>{WAYS[rollout_index]}</action>"
        log.append({"role": "assistant", "content": text})
        returned = environment.step([log], [state])
        observation, state = returned.observations[0]["content"], (returned.metadata or [None])[0]
        over = returned.terminateds[0]
        rewards.append(returned.rewards[0])
        log.append({"role": "environment", "content": observation})
        messages.append(Message("assistant", text, token_array([2, 3]), [-0.5, -1.0], len(rewards), sampled=True))
        messages.append(Message("environment", observation, token_array([4]), None, len(rewards)))
    turns = len(rewards)
    return TrajectoryRecord(
        task_index=task_index, rollout_index=rollout_index, task_name="puzzle", idx=row["idx"], messages=messages,
        total_reward=float(sum(rewards)), rewards=rewards, stop_reason="terminated", turn_count=turns,
        tokens=TokenCounts(1, 2 * turns, turns), timing=Timing([0.0] * turns, [0.0] * turns), metadata=state, seed=1,
        attempt=0,
    )  # fmt: skip


def job_file(path: Path, **environment: Any) -> Path:
    given = {"name": "puzzle", "config": CONFIG, **(environment or {"type": "sliding_puzzle"})}
    return manifest(path, environments=[given], dataset={"source": {"generator": {"count": 5}}, "repeats": 4})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of 20 puzzles and, beside it, its manifest and a module of other scorings."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "scoring", raising=False)
    (tmp_path / "scoring.py").write_text(SCORING)
    directory = tmp_path / "run"
    directory.mkdir()
    job = load_job(job_file(tmp_path / "job.yaml"))
    rows = SlidingPuzzleEnvironment(CONFIG).generate_dataset(5, 0)
    records = [played(row, number, index) for number, row in enumerate(rows) for index in range(4)]
    (directory / "shard-00000.jsonl").write_bytes(b"".join(map(encode_line, records)))
    inputs = scan(job, base=tmp_path, environment=environment_factory(job)).as_json()
    (directory / MANIFEST).write_bytes(msgspec.json.encode(new_manifest(job, shards=1, inputs=inputs)))
    return directory


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(rescore, list(map(str, arguments)), catch_exceptions=False)


def row_of(result: Result) -> list[str]:
    return next(line.split() for line in result.output.splitlines() if line.strip().startswith("puzzle "))


def test_the_manifest_of_the_run_changes_nothing(run: Path, tmp_path: Path) -> None:
    result = typed(run, "--manifest", tmp_path / "job.yaml")
    assert result.exit_code == 0, result.output
    name, count, old, new, *rest = row_of(result)
    assert (name, count, rest) == ("puzzle", "20", ["0", "0", "0"])
    assert old == new
    output = tmp_path / "run-rescored"
    assert json.loads((output / "aggregate_metrics.json").read_text())["environments"]["puzzle"]["trajectories"] == 20
    assert json.loads((output / MANIFEST).read_text())["rescored_from"]["location"] == str(run)
    again = typed(run, "--manifest", tmp_path / "job.yaml")
    assert (again.exit_code, "--resume" in again.output) == (2, True)
    resumed = typed(run, "--manifest", tmp_path / "job.yaml", "--resume")
    assert (resumed.exit_code, "20 were rescored earlier" in resumed.output) == (0, True)


def test_another_scoring_of_the_user_s_own(run: Path, tmp_path: Path) -> None:
    before = (run / "shard-00000.jsonl").read_bytes()
    job = job_file(tmp_path / "doubled.yaml", entrypoint="scoring:Doubled")
    result = typed(run, "--manifest", job, "--output", tmp_path / "doubled")
    assert result.exit_code == 0, result.output
    assert row_of(result)[4:] == ["20", "0", "0"]
    old = {record.key: record for record in RunFiles(str(run)).trajectories()}
    for record in RunFiles(str(tmp_path / "doubled")).trajectories():
        assert record.rewards == [2 * reward + 0.5 for reward in old[record.key].rewards]
        assert record.total_reward == sum(record.rewards)
    assert (run / "shard-00000.jsonl").read_bytes() == before


def test_a_scoring_that_draws_changes_nothing(run: Path, tmp_path: Path) -> None:
    job = job_file(tmp_path / "moody.yaml", entrypoint="scoring:Moody")
    result = typed(run, "--manifest", job, "--output", tmp_path / "moody")
    assert result.exit_code == 0, result.output
    assert row_of(result)[4:] == ["0", "20", "0"]
    assert "20 left unchanged, of an unscorable environment" in result.output
    assert "replayed twice: the reward of turn 1 is" in result.output


def test_what_cannot_be_rescored(run: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    for arguments, words in (
        ([run, "--manifest", job, "--set", "spec.dataset.source.generator.count=6"], "5 rows then, 6 now"),
        ([run, "--manifest", job, "--output", run], "never changed"),
        ([run, "--manifest", job, "--environment", "maths"], "environments are puzzle"),
        ([tmp_path / "no", "--manifest", job], "give the output directory of a run"),
        ([run, "--manifest", tmp_path / "none.yaml"], "none.yaml"),
        ([run, "--manifest", job, "--set", "spec.environments[0].type=chess"], "chess"),
    ):
        result = typed(*arguments)
        assert (result.exit_code, words in result.output) == (2, True), result.output
    assert not (tmp_path / "run-rescored").exists()
    more = typed(run, "--manifest", job, "--set", "spec.dataset.source.generator.count=6", "--force")
    assert more.exit_code == 0, more.output
    assert row_of(more)[4:] == ["0", "0", "0"]


@pytest.mark.slow
@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
def test_environments_in_processes_do_not_read_the_run(run: Path, tmp_path: Path) -> None:
    peeking = {"entrypoint": "scoring:Peeking", "isolation": "Process"}
    job = job_file(tmp_path / "job.yaml", **peeking)
    document = json.loads(job.read_text())
    document["spec"]["environments"][0]["config"]["peek"] = str(run / "shard-00000.jsonl")
    job.write_text(json.dumps(document))
    result = typed(run, "--manifest", job, "--force")
    assert result.exit_code == 0, result.output
    assert row_of(result)[3] == "0.000"


def test_of_two_attempts_the_one_that_counts_is_rescored(run: Path, tmp_path: Path) -> None:
    shard = run / "shard-00000.jsonl"
    row = SlidingPuzzleEnvironment(CONFIG).generate_dataset(5, 0)[0]
    later = dataclasses.replace(played(row, 0, 1), rollout_index=0, attempt=1)
    shard.write_bytes(shard.read_bytes() + encode_line(later))
    result = typed(run, "--manifest", tmp_path / "job.yaml")
    assert (result.exit_code, row_of(result)[1]) == (0, "20"), result.output
    found = {record.key: record for record in RunFiles(str(tmp_path / "run-rescored")).trajectories()}
    assert (found[later.key].attempt, found[later.key].messages[1].content) == (1, "<action>down</action>")
