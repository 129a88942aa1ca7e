"""The numbers of a run come from its files alone."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.aggregation.columns import _json_metric, own_metrics, plain_metric
from kuberoll_workers.analysis.aggregation.environments import MetricsFailure
from kuberoll_workers.analysis.aggregation.sources import read_contents
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import (
    AnyRecord,
    DroppedRecord,
    FailureRecord,
    RecordError,
    Timing,
    TokenCounts,
    TrajectoryRecord,
    encode_line,
)
from kuberoll_workers.data.stop_reasons import DropReason, StopReason
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.registry import resolve
from kuberoll_workers.output.parquet import write_parquet
from kuberoll_workers.output.run_directory import RunManifest, RunRefused
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from tests.examples import examples


def record(
    task: int,
    rollout: int = 0,
    reward: float = 1.0,
    *,
    name: str = "env",
    answer: str | None = None,
    stop_reason: StopReason = "terminated",
    metadata: dict[str, Any] | None = None,
    parts: dict[str, list[float]] | None = None,
    attempt: int = 0,
) -> TrajectoryRecord:
    return TrajectoryRecord(
        task_index=task,
        rollout_index=rollout,
        task_name=name,
        idx=f"row {task}",
        messages=[
            Message("user", f"question {task}", token_array([1, 2])),
            Message("assistant", f"answer {rollout}", token_array([3]), turn=1, sampled=True),
        ],
        total_reward=reward,
        rewards=[reward],
        stop_reason=stop_reason,
        turn_count=1,
        tokens=TokenCounts(2, 1, 3),
        timing=Timing([0.25, 0.5], [0.125]),
        metadata=metadata,
        seed=1,
        attempt=attempt,
        reward_parts=parts or {},
        answer=answer,
    )


def failure(task: int, rollout: int = 0, *, attempt: int = 0, cause: str = "it broke") -> FailureRecord:
    return FailureRecord(
        task_index=task,
        rollout_index=rollout,
        task_name="env",
        idx=None,
        kind="environment",
        stage="environment",
        cause=cause,
        tries=2,
        attempt=attempt,
        turn_count=0,
        seed=None,
        messages=[],
    )


def dropped(
    task: int, rollout: int, reason: DropReason, *, attempt: int = 0, stop_reason: StopReason | None = None
) -> DroppedRecord:
    return DroppedRecord(
        task_index=task,
        rollout_index=rollout,
        task_name="env",
        idx=None,
        reason=reason,
        stop_reason=stop_reason,
        turn_count=3,
        total_reward=0.25,
        rewards=[0.25],
        tokens=TokenCounts(2, 30, 0),
        messages=[],
        metadata=None,
        seed=None,
        attempt=attempt,
    )


def manifest(**identity: Any) -> RunManifest:
    settings = {
        "environments[0].name": "other",
        "environments[0].repeats": 3,
        "environments[1].name": "env",
        "environments[1].repeats": None,
        "dataset.repeats": 2,
        "rollout.groups.oversample": 1,
        "rollout.groups.wanted": None,
    }
    return RunManifest(
        format=1,
        job="job",
        created="2026-01-01T00:00:00+00:00",
        shards=2,
        identity=settings | identity,
        inputs={"rows": 5, "trajectories": 10, "digest": "abc"},
        versions={},
    )


Files = Mapping[str, Sequence[AnyRecord] | RunManifest]


def stored(directory: Path, files: Files) -> RunFiles:
    directory.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        if isinstance(contents, RunManifest):
            (directory / name).write_bytes(orjson.dumps(contents))
        else:
            (directory / name).write_bytes(b"".join(map(encode_line, contents)))
    return RunFiles(str(directory))


def numbers(found: Aggregates) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(found.encode())
    return document


def tasks_of(found: Aggregates) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.task_lines()]


def outcomes(rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str | None]] | None = None) -> list[Any]:
    return [
        record(task, rollout, reward, answer=None if answers is None else answers[task][rollout])
        for task, group in enumerate(rewards)
        for rollout, reward in enumerate(group)
    ]


def test_tries_of_binary_rewards(tmp_path: Path) -> None:
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])})
    found = numbers(aggregate([run]))["environments"]["env"]
    success = found["success"]
    assert (success["unit"], success["threshold"]) == ("percent", 1.0)
    assert success["pass_at_k"] == {"1": 50.0, "2": pytest.approx(61.11, abs=0.01), "4": pytest.approx(66.67, abs=0.01)}
    assert (success["majority_at_k"], success["no_answer"]) == (None, None)
    assert success["avg_of_n"]["mean"] == 50.0
    assert success["avg_of_n"]["std"] == pytest.approx(statistics.stdev([200 / 3, 100 / 3, 200 / 3, 100 / 3]))
    assert [success["avg_of_n"][name] for name in ("low", "high")] == pytest.approx([25.378, 74.622], abs=0.001)
    assert found["groups"] == {"count": 3, "equal_rewards": 2, "equal_rewards_share": pytest.approx(2 / 3)}


@pytest.mark.parametrize("rewards", [[[0, 0, 1, 0]], [[0, 0], [0, 0]], [[1]], [[1, 1, 0, 1]] * 3])
def test_intervals_of_shares_stay_within_them(tmp_path: Path, rewards: list[list[float]]) -> None:
    """Student's interval of a rare success begins below 0: -2.6 percent of a real run."""
    answers = [["a" if number else None for number in range(len(group))] for group in rewards]
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes(rewards, answers)})
    found = numbers(aggregate([run]))["environments"]["env"]
    shares = [(found["success"]["avg_of_n"], 100), (found["across_repeats"], 1)]
    if found["success"]["no_answer"] is not None:
        shares.append((found["success"]["no_answer"], 100))
    for share, whole in shares:
        assert 0 <= share["low"] <= share["mean"] <= share["high"] <= whole
        assert share["low"] < share["high"]


def test_deviations_by_group_and_of_all(tmp_path: Path) -> None:
    found = aggregate([stored(tmp_path, {"shard-00000.jsonl": outcomes([[0, 1]] * 3)})])
    assert numbers(found)["environments"]["env"]["fields"]["total_reward"]["std"] == 0.5477225575051661
    assert [task["fields"]["total_reward"]["std"] for task in tasks_of(found)] == [0.7071067811865476] * 3


def test_tasks_whose_rewards_are_equal_are_told(tmp_path: Path) -> None:
    files: Files = {"shard-00000.jsonl": outcomes([[1, 1], [0, 1], [2], [3, 3, 3]])}
    found = aggregate([stored(tmp_path, files)])
    assert [task["equal_rewards"] for task in tasks_of(found)] == [True, False, None, True]


def test_every_numeric_field_is_told(tmp_path: Path) -> None:
    records = [
        record(0, 0, 0.5, metadata={"moves": 3, "solved": True, "name": "x", "board": [1], "huge": 123456789}),
        record(0, 1, 1.5, metadata={"moves": 5, "solved": False}, parts={"format": [0.5, 0.25], "right": [1.0]}),
        record(0, 2, 2.5, parts={"format": [0.25]}),
    ]
    shard = tmp_path / "shard-00000.jsonl"
    run = stored(tmp_path, {shard.name: records})
    # Larger than any float; orjson cannot write it, other people's tools can.
    shard.write_bytes(shard.read_bytes().replace(b"123456789", str(10**400).encode()))
    found = numbers(aggregate([run]))["environments"]["env"]
    fields = found["fields"]
    assert list(fields) == [
        "total_reward", "turn_count", "tokens.prompt", "tokens.generated", "tokens.environment", "tokens.total",
        "timing.generation_seconds", "timing.environment_seconds", "metadata.huge", "metadata.moves",
        "metadata.solved", "reward_parts.format", "reward_parts.right",
    ]  # fmt: skip
    assert fields["total_reward"] == {
        "count": 3, "missing": 0, "nonfinite": 0, "mean": 1.5, "std": 1.0, "min": 0.5, "median": 1.5, "max": 2.5,
    }  # fmt: skip
    assert (fields["metadata.moves"]["count"], fields["metadata.moves"]["missing"]) == (2, 1)
    assert (fields["metadata.moves"]["mean"], fields["metadata.solved"]["mean"]) == (4.0, 0.5)
    assert (fields["reward_parts.format"]["max"], fields["reward_parts.right"]["std"]) == (0.75, None)
    assert (fields["metadata.huge"]["count"], fields["metadata.huge"]["nonfinite"]) == (0, 1)
    assert fields["metadata.huge"]["mean"] is None
    assert (fields["timing.generation_seconds"]["mean"], fields["tokens.total"]["max"]) == (0.75, 6.0)
    assert found["totals"] == {
        "turns": 3,
        "tokens": {"prompt": 6, "generated": 3, "environment": 9, "total": 18},
        "seconds": {"generation": 2.25, "environment": 0.375},
    }


def test_rewards_that_are_no_numbers_are_counted_and_leave_the_others_alone(tmp_path: Path) -> None:
    # JSON has no NaN; Parquet has.
    rewards = [math.nan, 0.0, 1.0, math.inf]
    records = [record(0, rollout, reward) for rollout, reward in enumerate(rewards)]
    records[1].reward_parts = {"odd": [math.inf, -math.inf]}
    write_parquet(tmp_path / "shard-00000.parquet", records)
    write_parquet(tmp_path / "shard-00001.parquet", [record(1, 0, math.nan, name="lost")])
    found = aggregate([RunFiles(str(tmp_path))])
    document = numbers(found)["environments"]
    reward = document["env"]["fields"]["total_reward"]
    assert (reward["count"], reward["nonfinite"], reward["mean"]) == (2, 2, 0.5)
    assert document["env"]["success"]["pass_at_k"] == {"1": 50.0, "2": 100.0}
    parts = document["env"]["fields"]["reward_parts.odd"]
    assert (parts["count"], parts["nonfinite"], parts["missing"]) == (0, 1, 3)
    assert (document["lost"]["success"], document["lost"]["fields"]["total_reward"]["mean"]) == (None, None)
    assert [task["pass_at_k"] for task in tasks_of(found)] == [{"1": 50.0, "2": 100.0}, {}]


def test_tries_of_other_rewards_are_the_best_of_them(tmp_path: Path) -> None:
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes([[1, 2, 3, 4], [0, 0, 0, 0.5]])})
    success = numbers(aggregate([run]))["environments"]["env"]["success"]
    assert (success["unit"], success["threshold"]) == ("reward", None)
    best_of_two = [(2 + 3 + 4 + 3 + 4 + 4) / 6, 0.25]
    assert success["pass_at_k"] == pytest.approx({"1": (2.5 + 0.125) / 2, "2": sum(best_of_two) / 2, "4": 2.25})
    success = numbers(aggregate([run], threshold=2.0))["environments"]["env"]["success"]
    assert (success["unit"], success["threshold"]) == ("percent", 2.0)
    assert success["pass_at_k"] == {"1": 37.5, "2": 50.0, "4": 50.0}


def test_votes(tmp_path: Path) -> None:
    answers: list[list[str | None]] = [["a", "a", "b", None], ["c", "d", None, None], [None] * 4]
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], answers)})
    found = aggregate([run])
    success = numbers(found)["environments"]["env"]["success"]
    # Of four: a wins and is right; c and d tie; nobody votes.
    assert success["majority_at_k"]["4"] == pytest.approx(50.0)
    # Of two: [a a] right, [b -] wrong; [c d] a tie, [- -] nothing; nothing.
    assert success["majority_at_k"]["2"] == pytest.approx((50 + 25 + 0) / 3)
    assert success["majority_at_k"]["1"] == success["pass_at_k"]["1"] == 25.0
    assert success["no_answer"]["mean"] == pytest.approx(100 * 7 / 12)
    shares = [100 / 3, 100 / 3, 200 / 3, 100]
    assert success["no_answer"]["std"] == pytest.approx(statistics.stdev(shares))
    assert [task["majority_at_k"] and task["majority_at_k"]["4"] for task in tasks_of(found)] == [100.0, 50.0, None]


def test_tries_go_as_far_as_every_task_s_samples(tmp_path: Path) -> None:
    found = aggregate([stored(tmp_path, {"shard-00000.jsonl": outcomes([[1, 0, 0, 1, 1, 1], [0, 1, 0]])})])
    success = numbers(found)["environments"]["env"]["success"]
    assert list(success["pass_at_k"]) == ["1", "2", "3"]
    # The mean over tasks of their shares; over the first three repeats.
    assert success["pass_at_k"]["1"] == pytest.approx(50.0)
    assert (success["avg_of_n"]["runs"], success["avg_of_n"]["mean"]) == (3, pytest.approx(100 / 3))
    assert [list(task["pass_at_k"]) for task in tasks_of(found)] == [["1", "2", "4", "6"], ["1", "2", "3"]]


def test_repeats_are_ranks_within_their_task(tmp_path: Path) -> None:
    records = [record(0, 4, 1.0), record(0, 9, 2.0), record(1, 0, 3.0), record(2, 1, 8.0), record(2, 7, 4.0)]
    found = numbers(aggregate([stored(tmp_path, {"shard-00000.jsonl": records})]))["environments"]["env"]
    first, second = found["repeats"]
    assert (first["repeat"], first["count"], first["missing"], first["mean"]) == (0, 3, 0, 4.0)
    assert (first["min"], first["p25"], first["median"], first["p75"], first["max"]) == (1.0, 2.0, 3.0, 5.5, 8.0)
    assert first["std"] == pytest.approx(statistics.stdev([1, 3, 8]))
    assert first["standard_error"] == pytest.approx(statistics.stdev([1, 3, 8]) / math.sqrt(3))
    assert (second["count"], second["missing"], second["mean"]) == (2, 1, 3.0)
    across = found["across_repeats"]
    assert (across["runs"], across["mean"], across["standard_error"]) == (2, 3.5, pytest.approx(0.5))
    assert across["high"] - across["mean"] == pytest.approx(0.5 * 12.706204736)


def test_one_repeat_has_no_interval(tmp_path: Path) -> None:
    across = numbers(aggregate([stored(tmp_path, {"shard-00000.jsonl": [record(0, reward=2.0)]})]))["environments"][
        "env"
    ]["across_repeats"]
    assert across == {"runs": 1, "mean": 2.0, "std": None, "standard_error": None, "low": None, "high": None}


def test_what_failed_and_was_finished_later_did_not_fail(tmp_path: Path) -> None:
    failures = [
        failure(0, 0),
        failure(3, 0, cause="first"),
        failure(3, 0, attempt=1, cause="last"),
        failure(3, 1, cause="last"),
        failure(5, 0),
    ]
    drops = [dropped(5, 0, "oversampled", attempt=1)]
    run = stored(tmp_path, {"shard-00000.jsonl": [record(0)], "failures.jsonl": failures, "dropped.jsonl": drops})
    found = aggregate([run])
    document = numbers(found)
    environment = document["environments"]["env"]
    assert (document["failed"], environment["failed"], environment["trajectories"]) == (2, 2, 1)
    assert environment["failures"] == {"environment (environment): last": 2}
    assert environment["fields"]["total_reward"]["mean"] == 1.0
    assert [(task["task_index"], task["trajectories"], task["failed"]) for task in tasks_of(found)] == [
        (0, 1, 0),
        (3, 0, 2),
    ]


def test_causes_are_told_up_to_a_number(tmp_path: Path) -> None:
    failures = [failure(0, number, cause=f"cause {number:03d}") for number in range(60)]
    found = aggregate([stored(tmp_path, {"shard-00000.jsonl": [], "failures.jsonl": failures})])
    environment = numbers(found)["environments"]["env"]
    assert (environment["failed"], environment["failures_of_other_causes"]) == (60, 10)
    assert list(environment["failures"]) == [f"environment (environment): cause {number:03d}" for number in range(50)]


def test_kept_against_dropped(tmp_path: Path) -> None:
    drops = [
        dropped(0, 1, "oversampled"),
        dropped(0, 0, "oversampled"),  # kept in the end
        dropped(1, 0, "filtered", stop_reason="terminated"),
        dropped(1, 0, "filtered", stop_reason="terminated"),
    ]
    found = aggregate([stored(tmp_path, {"shard-00000.jsonl": [record(0)], "dropped.jsonl": drops})])
    assert numbers(found)["tail"] == {
        "kept": {"trajectories": 1, "mean_turns": 1.0, "mean_generated_tokens": 1.0, "mean_total_reward": 1.0},
        "dropped": {
            name: {"trajectories": 1, "mean_turns": 3.0, "mean_generated_tokens": 30.0, "mean_total_reward": 0.25}
            for name in ("filtered", "oversampled")
        },
        "unfinished": 1,
    }
    assert numbers(found)["environments"]["env"]["dropped"] == {"filtered": 1, "oversampled": 1}
    assert found.tail.given_up == 1


def test_what_the_manifest_expects(tmp_path: Path) -> None:
    records = [record(0, 0), record(0, 1), record(1, 2), record(2, 0), record(2, 5)]
    files: Files = {
        "manifest.json": manifest(),
        "shard-00000.jsonl": records,
        "failures.jsonl": [failure(4, 1)],
        "dropped.jsonl": [dropped(6, 0, "filtered"), dropped(6, 1, "filtered")],
    }
    found = aggregate([stored(tmp_path, files)])
    document = numbers(found)
    assert list(document["environments"]) == ["other", "env"]
    assert (document["job"], document["planned"], document["missing"]) == ("job", 10, 3)
    assert document["format"] == 2
    assert (document["environments"]["other"]["trajectories"], document["environments"]["other"]["missing"]) == (0, 0)
    assert document["environments"]["other"]["success"] is None
    # Groups are of 2, of 3 begun: task 2 has two groups, because a row of the dataset came twice.
    assert [(task["task_index"], task["expected"], task["missing"]) for task in tasks_of(found)] == [
        (0, 2, 0),
        (1, 2, 1),
        (2, 4, 2),
        (4, 2, 2),
    ]
    environment = document["environments"]["env"]
    assert (environment["tasks"], environment["expected"], environment["missing"]) == (4, 10, 5)


def test_a_run_that_stops_early_plans_no_number(tmp_path: Path) -> None:
    files: Files = {"manifest.json": manifest(**{"rollout.groups.wanted": 1}), "shard-00000.jsonl": [record(0)]}
    document = numbers(aggregate([stored(tmp_path, files)]))
    assert (document["planned"], document["missing"]) == (None, None)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    found = aggregate([stored(tmp_path, {"manifest.json": manifest()})])
    assert numbers(found)["environments"]["env"]["fields"]["total_reward"]["mean"] is None
    assert (found.trajectories, list(found.task_lines())) == (0, [])


def test_parts_of_a_run_are_merged_and_what_is_in_two_counts_once(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", {"manifest.json": manifest(), "shard-00000.jsonl": [record(0), record(0, 1, 0.0)]})
    later = dataclasses.replace(manifest(), created="later", shards=9)
    two = stored(
        tmp_path / "two",
        {"manifest.json": later, "shard-00001.jsonl": [record(0, 1, 0.0), record(1)], "failures.jsonl": [failure(0)]},
    )
    found = aggregate([one, two])
    assert (found.trajectories, found.duplicates) == (3, 1)
    assert numbers(found)["failed"] == 0
    assert aggregate([two, one]).encode() == found.encode()


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", {"manifest.json": manifest()})
    two = stored(tmp_path / "two", {"manifest.json": manifest(**{"dataset.repeats": 4})})
    bare = stored(tmp_path / "bare", {"shard-00000.jsonl": [record(0)]})
    other = stored(tmp_path / "other", {"shard-00000.jsonl": [record(0, 1, name="chess")]})
    with pytest.raises(RunRefused, match=r"different runs(.|\n)*dataset\.repeats: was 2, is 4"):
        aggregate([one, two])
    with pytest.raises(RunRefused, match=r"bare has no manifest\.json"):
        aggregate([one, bare])
    with pytest.raises(RecordError, match="task 0 has trajectories of the environments 'chess' and 'env'"):
        aggregate([bare, other])


def test_what_is_no_trajectory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = stored(tmp_path, {"shard-00000.jsonl": [record(0)]})
    with (tmp_path / "shard-00000.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert aggregate([run]).trajectories == 1
    assert caplog.text.count("shard-00000.jsonl:2: not a TrajectoryRecord") == 1
    line = encode_line(record(123456789)).replace(b"123456789", str(2**70).encode(), 1)
    (tmp_path / "shard-00000.jsonl").write_bytes(line)
    assert aggregate([run]).trajectories == 0
    assert caplog.text.count("shard-00000.jsonl:1: not a TrajectoryRecord") == 1


RECORDS = st.builds(
    record,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.7, 1.0, -3.25]),
    answer=st.sampled_from([None, "a", "b"]),
    stop_reason=st.sampled_from(["terminated", "truncated", "max_turns"]),
    metadata=st.none() | st.dictionaries(st.sampled_from("xyz"), st.floats(-5, 5) | st.booleans() | st.text()),
    parts=st.dictionaries(st.sampled_from("pq"), st.lists(st.floats(-1, 1), max_size=3)),
    attempt=st.integers(0, 1),
)
ATTEMPTS = st.integers(0, 2)
CAUSES = st.sampled_from(["one", "two"])
REASONS = st.sampled_from(["oversampled", "filtered"])
FAILURES = st.builds(failure, st.integers(0, 5), st.integers(0, 3), attempt=ATTEMPTS, cause=CAUSES)
DROPPED = st.builds(dropped, st.integers(0, 5), st.integers(0, 3), REASONS, attempt=ATTEMPTS)


@settings(max_examples=examples(60))
@given(
    records=st.lists(RECORDS, max_size=30),
    failures=st.lists(FAILURES, max_size=8),
    drops=st.lists(DROPPED, max_size=8),
    shuffle=st.randoms(use_true_random=False),
)
def test_the_order_of_lines_and_shards_changes_no_byte(
    records: list[TrajectoryRecord],
    failures: list[FailureRecord],
    drops: list[DroppedRecord],
    shuffle: random.Random,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def written() -> tuple[bytes, list[bytes]]:
        for lines in (records, failures, drops):
            shuffle.shuffle(lines)
        cut = shuffle.randint(0, len(records))
        run = stored(
            tmp_path_factory.mktemp("run"),
            {
                "manifest.json": manifest(),
                "shard-00000.jsonl": records[:cut],
                "shard-00001.jsonl": records[cut:],
                "failures.jsonl": failures,
                "dropped.jsonl": drops,
            },
        )
        found = aggregate([run])
        return found.encode(), list(found.task_lines())

    first = written()
    assert written() == first
    # What was told of the tasks adds up to what was told of them all.
    document, tasks = json.loads(first[0]), [json.loads(line) for line in first[1]]
    assert sum(task["trajectories"] for task in tasks) == document["trajectories"] == len({r.key for r in records})
    assert sum(task["failed"] for task in tasks) == document["failed"]
    assert document["duplicates"] == len(records) - document["trajectories"]


def test_files_are_written_beside_the_run(tmp_path: Path) -> None:
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes([[1, 0], [0, 0]])})
    found = aggregate([run])
    assert found.write_beside(run) == [str(tmp_path / "aggregate_metrics.json"), str(tmp_path / "task_metrics.jsonl")]
    assert (tmp_path / "aggregate_metrics.json").read_bytes() == found.encode()
    assert (tmp_path / "task_metrics.jsonl").read_bytes() == b"".join(found.task_lines())


def test_tasks_of_one_trajectory_have_no_file_of_their_own(tmp_path: Path) -> None:
    run = stored(tmp_path, {"shard-00000.jsonl": outcomes([[1], [0]])})
    assert aggregate([run]).write_beside(run) == [str(tmp_path / "aggregate_metrics.json")]
    assert not (tmp_path / "task_metrics.jsonl").exists()


def test_an_object_store_and_a_directory_are_parts_like_any_others(tmp_path: Path) -> None:
    location = f"memory://{tmp_path.name}"
    store = open_storage(location)
    for number in range(2):
        store.write(f"shard-00001/part-{number}.jsonl", encode_line(record(1, number)))
    here, there = stored(tmp_path, {"shard-00000.jsonl": [record(0)]}), RunFiles(location)
    found = aggregate([there, here])
    assert found.trajectories == 3
    assert found.encode() == aggregate([here, there]).encode()
    assert found.write_beside(there) == [f"{location}/aggregate_metrics.json", f"{location}/task_metrics.jsonl"]
    assert store.read("task_metrics.jsonl") == b"".join(found.task_lines())


@pytest.mark.slow
def test_many_tasks_are_told_in_lots(tmp_path: Path) -> None:
    found = aggregate([stored(tmp_path, {"shard-00000.jsonl": [record(task, 0, task % 7) for task in range(9000)]})])
    assert [task["fields"]["total_reward"]["mean"] for task in tasks_of(found)] == [task % 7 for task in range(9000)]


class Counted(EnvironmentInterface):
    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        raise NotImplementedError

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        assert {len(column) for column in batch.values()} == {len(batch["total_reward"])}
        batch["total_reward"] = [reward * 2 for reward in batch["total_reward"]]
        rows = list(batch["idx"])
        del batch["idx"]
        assert "idx" not in batch
        return batch, {
            "rows": rows,
            "solved": sum(batch["total_reward"]),
            "questions": [log[0]["content"] for log in batch["message_log"]],
            "moves": [state and state["moves"] for state in batch["extra_env_info"]],
        }


def test_an_environment_s_own_metrics(tmp_path: Path) -> None:
    files: Files = {
        "shard-00000.jsonl": [record(1, metadata={"moves": 7}), record(0), record(0), record(3, name="mine")],
        "shard-00001.jsonl": [record(2, 0, 0.0), record(0, 1), record(0, 0, attempt=1, metadata={"moves": 9})],
    }
    run = stored(tmp_path, files)
    found = numbers(aggregate([run], make=lambda name: Counted()))["environments"]
    assert found["env"]["environment_metrics"] == {
        "rows": ["row 0", "row 0", "row 1", "row 2"],
        "solved": 6.0,
        "questions": ["question 0", "question 0", "question 1", "question 2"],
        "moves": [9, None, 7, None],
    }
    assert found["mine"]["environment_metrics"]["questions"] == ["question 3"]
    assert numbers(aggregate([run]))["environments"]["env"]["environment_metrics"] is None


def test_a_class_of_nemo_rl_finds_its_tensors(tmp_path: Path) -> None:
    counting = resolve(entrypoint="tests.environments.ray_counting:CountingWords")
    records = [record(0), record(1, 0, 0.0), record(2)]
    run = stored(tmp_path, {"shard-00000.jsonl": records})
    # Its constructor would start Ray's workers.
    found = numbers(aggregate([run], make=lambda name: object.__new__(counting)))["environments"]
    generated = sum(item.tokens.generated + item.tokens.environment for item in records)
    assert found["env"]["environment_metrics"] == {
        "words": 2.0, "total": 2.0, "prompts": 3, "generated": generated,
    }  # fmt: skip


def test_an_environment_s_own_metrics_cannot_spoil_the_others(tmp_path: Path) -> None:
    class Broken(Counted):
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            raise KeyError("accuracy")

    class Exotic(Counted):
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            return batch, {"pass": numpy.float32(0.5), "by": {1: object}, "nothing": math.nan}

    def make(name: str) -> EnvironmentInterface:
        if name == "absent":
            raise ModuleNotFoundError("no module named chess")
        if name == "elsewhere":
            error = RuntimeError("it failed in its own process")
            error.traceback = Traceback((), "as that process printed it")  # type: ignore[attr-defined]
            raise error
        return {"broken": Broken, "exotic": Exotic, "env": Counted}[name]()

    names = ["broken", "exotic", "env", "absent", "elsewhere"]
    run = stored(tmp_path, {"shard-00000.jsonl": [record(task, name=name) for task, name in enumerate(names)]})
    found = numbers(aggregate([run], make=make, environments=names))["environments"]
    assert {name: item["trajectories"] for name, item in found.items()} == dict.fromkeys(names, 1)
    assert found["broken"]["environment_metrics"]["error"].endswith("raised KeyError: 'accuracy'")
    assert 'raise KeyError("accuracy")' in found["broken"]["environment_metrics"]["traceback"]
    exotic = found["exotic"]["environment_metrics"]
    assert (exotic["pass"], exotic["nothing"]) == (0.5, None)
    assert found["env"]["environment_metrics"]["solved"] == 2.0
    assert "no module named chess" in found["absent"]["environment_metrics"]["error"]
    assert 'raise ModuleNotFoundError("no module named chess")' in found["absent"]["environment_metrics"]["traceback"]
    assert found["elsewhere"]["environment_metrics"]["traceback"] == "as that process printed it"


def test_an_environment_reads_and_changes_its_columns_like_a_batch(tmp_path: Path) -> None:
    class Reading(Counted):
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            names, size = list(batch), len(batch)
            batch["mine"] = [1]
            del batch["total_reward"]
            return batch, {
                "names": names,
                "size": size,
                "mine": batch["mine"],
                "after": len(batch),
                "gone": "total_reward" in batch,
            }

    run = stored(tmp_path, {"shard-00000.jsonl": [record(0)]})
    metrics = numbers(aggregate([run], make=lambda name: Reading()))["environments"]["env"]["environment_metrics"]
    assert "total_reward" in metrics["names"]
    assert metrics["size"] == metrics["after"] == len(metrics["names"])
    assert (metrics["mine"], metrics["gone"]) == ([1], False)


def test_an_environment_that_quits_is_told(tmp_path: Path) -> None:
    class Quitting(Counted):
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            raise SystemExit(3)

    run = stored(tmp_path, {"shard-00000.jsonl": [record(0)]})
    found = numbers(aggregate([run], make=lambda name: Quitting()))["environments"]["env"]["environment_metrics"]
    assert found["error"] == "global_post_process_and_metrics called sys.exit(3)"
    assert "raise SystemExit(3)" in found["traceback"]


def test_a_run_that_changes_under_the_reader_is_told(tmp_path: Path) -> None:
    class Late(Counted):
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            stored(tmp_path, {"shard-00000.jsonl": [record(5)]})
            return batch, {"states": batch["extra_env_info"]}

    run = stored(tmp_path, {"shard-00000.jsonl": [record(0)]})
    found = numbers(aggregate([run], make=lambda name: Late()))["environments"]["env"]
    assert "changed while it was read" in found["environment_metrics"]["error"]
    assert found["trajectories"] == 1


def test_an_environment_s_own_metrics_have_a_time_limit(tmp_path: Path) -> None:
    released = threading.Event()

    class Endless:
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            released.wait()
            return batch, {"late": 1}

    class Quick:
        def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
            return batch, {"count": len(batch["total_reward"])}

    run = stored(tmp_path, {"shard-00000.jsonl": [record(0, name="a"), record(1, name="b")]})
    environments: dict[str, Any] = {"a": Endless(), "b": Quick()}
    try:
        found = own_metrics(read_contents([run]), lambda name: environments[name], seconds=0.05)
        # It does not keep the process from ending either.
        assert [thread.daemon for thread in threading.enumerate() if thread.name == "kuberoll-metrics"] == [True]
    finally:
        released.set()
    error = "global_post_process_and_metrics took longer than 0.05 s and was abandoned"
    assert found == {"a": MetricsFailure(error=error), "b": {"count": 1}}


def test_metrics_of_any_library_become_json() -> None:
    assert plain_metric(numpy.float32(0.5)) == 0.5
    assert plain_metric(numpy.arange(2)) == [0, 1]
    assert plain_metric({1}) == "{1}"


def test_what_a_complete_run_misses_is_nothing(tmp_path: Path) -> None:
    for planned in (2, 1):
        document = manifest()
        document.inputs["trajectories"] = planned
        files: Files = {"manifest.json": document, "shard-00000.jsonl": [record(0), record(0, 1)]}
        found = aggregate([stored(tmp_path / str(planned), files)])
        assert (found.planned, found.missing) == (planned, 0)


def test_names_of_metrics_become_text() -> None:
    assert _json_metric((1, 0.5)) == ("1", 0.5)


def test_metrics_that_json_cannot_hold_are_named_by_their_escaped_names() -> None:
    name, reason = _json_metric(("half\ud800", 1))
    assert (name, reason.startswith("JSON cannot represent it: ")) == ("half\\ud800", True)
    name, reason = _json_metric(("plain", "\ud800"))
    assert (name, reason.startswith("JSON cannot represent it: ")) == ("plain", True)


def described(count: int, value: float | None, deviation: float | None = None, **others: Any) -> dict[str, Any]:
    """The statistics of a field that has one value."""
    same = {"mean": value, "std": deviation, "min": value, "median": value, "max": value}
    return {"count": count, "missing": 0, "nonfinite": 0, **same, **others}


def of_fields(count: int, deviation: float | None, **reward: Any) -> dict[str, Any]:
    """The fields of `record`s."""
    values = {
        "turn_count": 1, "tokens.prompt": 2, "tokens.generated": 1, "tokens.environment": 3, "tokens.total": 6,
        "timing.generation_seconds": 0.75, "timing.environment_seconds": 0.125,
    }  # fmt: skip
    return {
        "total_reward": described(count, 1.0, deviation, **reward),
        **{name: described(count, value, deviation) for name, value in values.items()},
    }


def test_the_documents_as_they_are_stored(tmp_path: Path) -> None:
    """Two tasks: one whole, one of which a trajectory failed; docs/reference/aggregates.md defines each number."""
    files: Files = {
        "manifest.json": manifest(),
        "shard-00000.jsonl": [record(0, 0, 1.0), record(0, 1, 0.0), record(1, 2, 1.0)],
        "failures.jsonl": [failure(1, 3)],
        "dropped.jsonl": [dropped(6, 0, "filtered")],
    }
    found = aggregate([stored(tmp_path, files)])
    document = numbers(found)
    empty, whole = document["environments"].pop("other"), document["environments"].pop("env")
    assert document == {
        "format": 2, "job": "job", "trajectories": 3, "planned": 10, "missing": 6, "failed": 1, "unscored": 0,
        "duplicates": 0,
        "environments": {},
        "tail": {
            "kept": {
                "trajectories": 3, "mean_turns": 1.0, "mean_generated_tokens": 1.0,
                "mean_total_reward": pytest.approx(2 / 3),
            },
            "dropped": {
                "filtered": {
                    "trajectories": 1, "mean_turns": 3.0, "mean_generated_tokens": 30.0, "mean_total_reward": 0.25,
                }
            },
            "unfinished": 1,
        },
    }  # fmt: skip
    nothing = {"runs": 0, "mean": None, "std": None, "standard_error": None, "low": None, "high": None}
    assert {name: value for name, value in empty.items() if name != "fields"} == {
        "trajectories": 0, "tasks": 0, "expected": 0, "missing": 0, "failed": 0, "failures": {},
        "failures_of_other_causes": 0, "dropped": {}, "stop_reasons": {},
        "totals": {
            "turns": 0, "tokens": {"prompt": 0, "generated": 0, "environment": 0, "total": 0},
            "seconds": {"generation": 0.0, "environment": 0.0},
        },
        "groups": {"count": 0, "equal_rewards": 0, "equal_rewards_share": None},
        "success": None, "across_repeats": nothing, "repeats": [], "environment_metrics": None, "removal": None,
    }  # fmt: skip
    assert set(map(str, empty["fields"].values())) == {str(described(0, None))}
    across, repeats = whole.pop("across_repeats"), whole.pop("repeats")
    # tests/analysis/test_removal.py has the rest of it.
    assert whole.pop("removal")["removed"] == 1
    assert (across["runs"], across["mean"], across["std"], across["standard_error"]) == (
        2, 0.5, pytest.approx(math.sqrt(0.5)), pytest.approx(0.5),
    )  # fmt: skip
    values = {"min": 1.0, "p25": 1.0, "median": 1.0, "p75": 1.0, "max": 1.0}
    assert repeats == [
        {"repeat": 0, "count": 2, "missing": 0, "mean": 1.0, "std": 0.0, "standard_error": 0.0, **values},
        {
            "repeat": 1, "count": 1, "missing": 1, "mean": 0.0, "std": None, "standard_error": None,
            **dict.fromkeys(values, 0.0),
        },
    ]  # fmt: skip
    spread = {"mean": pytest.approx(2 / 3), "std": pytest.approx(math.sqrt(1 / 3)), "min": 0.0}
    assert whole == {
        "trajectories": 3, "tasks": 2, "expected": 6, "missing": 3, "failed": 1,
        "failures": {"environment (environment): it broke": 1}, "failures_of_other_causes": 0,
        "dropped": {"filtered": 1}, "stop_reasons": {"terminated": 3},
        "totals": {
            "turns": 3, "tokens": {"prompt": 6, "generated": 3, "environment": 9, "total": 18},
            "seconds": {"generation": 2.25, "environment": 0.375},
        },
        "groups": {"count": 1, "equal_rewards": 0, "equal_rewards_share": 0.0},
        "success": {
            "unit": "percent", "threshold": 1.0, "pass_at_k": {"1": 75.0}, "majority_at_k": None,
            "avg_of_n": {
                **nothing, "runs": 1, "mean": 100.0, "low": pytest.approx(34.238, abs=0.001), "high": 100.0,
            },
            "no_answer": None,
        },
        "fields": of_fields(3, 0.0, **spread), "environment_metrics": None,
    }  # fmt: skip
    half = {"mean": 0.5, "std": pytest.approx(math.sqrt(0.5)), "min": 0.0, "median": 0.5}
    assert tasks_of(found) == [
        {
            "environment": "env", "task_index": 0, "trajectories": 2, "expected": 2, "missing": 0, "failed": 0,
            "stop_reasons": {"terminated": 2}, "equal_rewards": False, "pass_at_k": {"1": 50.0, "2": 100.0},
            "majority_at_k": None, "fields": of_fields(2, 0.0, **half),
        },
        {
            "environment": "env", "task_index": 1, "trajectories": 1, "expected": 4, "missing": 3, "failed": 1,
            "stop_reasons": {"terminated": 1}, "equal_rewards": None, "pass_at_k": {"1": 100.0},
            "majority_at_k": None, "fields": of_fields(1, None),
        },
    ]  # fmt: skip
