"""Traces: what is written is read, faults are named with file, line and field, and nothing is overwritten."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import FailureRecord, Timing, TokenCounts, TrajectoryRecord
from kuberoll_workers.simulation.recording import record_run
from kuberoll_workers.simulation.synthesis import Distribution, Recipe, synthesize
from kuberoll_workers.simulation.trace import TraceError, TraceTrajectory, Turn, read_trace, write_trace

HEADER = '{"kuberoll_trace":1,"trajectories":1,"origin":"test"}\n'
LINE = '{"group":0,"sample":0,"environment":"math","prompt":10,"turns":[[5,3,0.5,0.25],[2,0,0.1,0.0]]}\n'


def trajectory(group: int = 0, sample: int = 0, *, prompt: int = 10) -> TraceTrajectory:
    turns = (Turn(5, 3, 0.5, 0.25), Turn(2, 0, 0.1, 0.0))
    return TraceTrajectory(group=group, sample=sample, environment="math", prompt=prompt, turns=turns)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    given_trajectories = [trajectory(0, 0), trajectory(0, 1), trajectory(7, 0)]
    write_trace(tmp_path / name, given_trajectories, origin="test")
    found = read_trace(tmp_path / name)
    assert list(found.trajectories) == given_trajectories
    assert found.origin == "test"
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="exists"):
        write_trace(path, [trajectory()], origin="test")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace.jsonl:1: not the header"),
        (LINE, r"trace.jsonl:1: not the header"),
        ('{"kuberoll_trace":2,"trajectories":0}\n', r"trace.jsonl:1: kuberoll_trace: found version 2"),
        ('{"kuberoll_trace":2,"runs":[]}\n', r"trace.jsonl:1: kuberoll_trace: found version 2"),
        (HEADER + LINE + "\n", r"trace.jsonl:3: the line is empty; remove it"),
        (HEADER, "found 0 trajectories; the header announces 1"),
        (HEADER + LINE[:-20], r"trace.jsonl:2: "),
        (HEADER + LINE.replace("[5,", "[-5,"), r"trace.jsonl:2: .*\$\.turns\[0\]\[0\]"),
        (HEADER + LINE.replace("0.25", '"x"'), r"trace.jsonl:2: .*\$\.turns\[0\]\[3\]"),
        (HEADER + LINE.replace('"prompt":10', '"prompt":0'), r"trace.jsonl:2: .*\$\.prompt"),
        (HEADER + LINE.replace('"prompt":10', '"text":"secret"'), r"trace.jsonl:2: .*text"),
        (HEADER + LINE + LINE, r"trace.jsonl:3: group 0, sample 0 is in line 2 already"),
        (
            HEADER + LINE + LINE.replace('"sample":0', '"sample":1').replace("10", "11"),
            r"trace.jsonl:3: prompt: found 11; the group's is 10, in line 2",
        ),
    ],
)
def test_a_fault_is_named_with_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_compressed_trace_that_is_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    write_trace(path, [trajectory(group) for group in range(100)], origin="test")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TraceError, match=r"trace.jsonl.zst: not a whole Zstandard file"):
        read_trace(path)
    path.write_text("plain")
    with pytest.raises(TraceError, match=r"trace.jsonl.zst: not a whole Zstandard file"):
        read_trace(path)


def test_a_compressed_trace_of_another_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    write_trace(path, [trajectory()], origin="test")
    with pytest.raises(TraceError, match=r"its name ends with .zst"):
        read_trace(path.rename(tmp_path / "trace.jsonl"))


def test_a_trace_in_a_directory_that_is_not_there_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"traces/trace.jsonl: there is no directory .*traces"):
        write_trace(tmp_path / "traces" / "trace.jsonl", [trajectory()], origin="test")


def record(rollout: int) -> TrajectoryRecord:
    return TrajectoryRecord(
        task_index=3,
        rollout_index=rollout,
        task_name="math",
        idx=None,
        messages=[
            Message("user", "secret", [1, 2, 3]),
            Message("assistant", "secret", [4, 5], turn=1, sampled=True),
            Message("tool", "", [], turn=1),
            Message("tool", "secret", [6, 7, 8, 9], turn=1),
            Message("assistant", "secret", [10], turn=2, sampled=True),
            Message("environment", "", [], turn=2),
        ],
        total_reward=1.0,
        rewards=[0.0, 1.0],
        stop_reason="terminated",
        turn_count=2,
        tokens=TokenCounts(3, 3, 4),
        timing=Timing([0.5, 0.25], [0.125, 0.0]),
        metadata={"secret": "secret"},
        seed=1,
        attempt=0,
    )


def test_a_recording_has_lengths_and_times_and_no_text(tmp_path: Path) -> None:
    failed = FailureRecord(
        task_index=4, rollout_index=0, task_name="math", idx=None, kind="data", stage="x", cause="secret", tries=1,
        attempt=0, turn_count=0, seed=None, messages=[], metadata=None,
    )  # fmt: skip
    found = record_run([record(1), failed, record(0)])
    turns = (Turn(2, 4, 0.5, 0.125), Turn(1, 0, 0.25, 0.0))
    assert found.trajectories == [
        TraceTrajectory(group=3, sample=sample, environment="math", prompt=3, turns=turns) for sample in (0, 1)
    ]
    assert found.left_out == {"failed or dropped": 1}
    path = tmp_path / "trace.jsonl"
    write_trace(path, found.trajectories, origin="test")
    assert "secret" not in path.read_text()
    assert json.loads(path.read_text().splitlines()[1])["turns"] == [[2, 4, 0.5, 0.125], [1, 0, 0.25, 0.0]]


def recipe(**changes: object) -> Recipe:
    values = {
        "trajectories": 60,
        "group_size": 4,
        "turns": Distribution.parse("lognormal:3:1"),
        "prompt": Distribution.parse("lognormal:100:1"),
        "generated": Distribution.parse("pareto:50:1.1"),
        "observed": Distribution.parse("exponential:30"),
        "environment_seconds": Distribution.parse("0.5"),
        "most_tokens": 2000,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


def test_the_same_seed_draws_the_same_trace() -> None:
    assert synthesize(recipe(seed=3)) == synthesize(recipe(seed=3))
    assert synthesize(recipe(seed=3)) != synthesize(recipe(seed=4))


@given(st.integers(0, 1000), st.integers(2, 500))
def test_no_trajectory_exceeds_its_bounds_and_each_can_be_read(seed: int, most: int) -> None:
    for item in synthesize(recipe(seed=seed, most_tokens=most, most_turns=7)):
        assert 2 <= item.length <= most
        assert len(item.turns) <= 7
        assert all(turn.generated >= 1 for turn in item.turns)


@pytest.mark.parametrize("text", ["lognormal:200:1", "pareto:200:1.5", "exponential:200", "200"])
def test_a_distribution_has_its_median(text: str) -> None:
    draw, distribution = random.Random(1), Distribution.parse(text)
    assert median(distribution.draw(draw) for _ in range(20_001)) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("text", ["lognormal:1e308:300", "pareto:1:1e-300", "exponential:1e308"])
def test_the_heaviest_tails_keep_to_the_bounds(text: str) -> None:
    heavy = Distribution.parse(text)
    for item in synthesize(recipe(turns=heavy, generated=heavy, environment_seconds=heavy, most_turns=7)):
        assert 2 <= item.length <= 2000
        assert len(item.turns) <= 7


@pytest.mark.parametrize(
    "text", ["normal:3", "lognormal", "lognormal:x", "5:3:2:1", "exponential:3:1", "pareto:3:0", "-1", "nan"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="found"):
        Distribution.parse(text)


@pytest.mark.parametrize("name", ["trajectories", "group_size", "most_turns", "most_tokens"])
def test_a_recipe_of_nothing_names_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        synthesize(recipe(**{name: 0}))
