"""The numbers of a run come from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

from kuberoll_workers.collection.aggregate import encode_summaries, summarize
from kuberoll_workers.data.record import FailureRecord, encode_line
from kuberoll_workers.rollouts.tail import TailReport
from tests.collection.test_journal import record


class Counted:
    def global_post_process_and_metrics(self, batch: dict[str, list[Any]]) -> tuple[Any, dict[str, Any]]:
        assert {len(values) for values in batch.values()} == {len(batch["total_reward"])}
        return batch, {"solved": sum(batch["total_reward"])}


def failure(task_index: int, rollout_index: int = 0, attempt: int = 0) -> FailureRecord:
    return FailureRecord(
        task_index=task_index,
        rollout_index=rollout_index,
        task_name="env",
        idx=None,
        kind="environment",
        stage="environment",
        cause="it broke",
        tries=2,
        attempt=attempt,
        turn_count=0,
        seed=None,
        messages=[],
    )


def test_summary(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_bytes(b"".join(encode_line(record(0, index)) for index in range(3)))
    other = record(1)
    other.total_reward, other.stop_reason = -1.0, "max_turns"
    (tmp_path / "shard-00001.jsonl").write_bytes(encode_line(other))
    # Given up twice, and once more but finished on a later attempt.
    lines = [failure(2), failure(2, attempt=1), failure(0, 1)]
    (tmp_path / "failures.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    summaries = summarize(tmp_path, ["env", "unused"], lambda name: Counted())  # type: ignore[arg-type,return-value]
    summary = summaries["env"]
    assert (summary.trajectories, summary.failed) == (4, 1)
    assert summary.mean_reward == 0.5
    assert dict(summary.stop_reasons) == {"terminated": 3, "max_turns": 1}
    assert dict(summary.failures) == {"environment (environment): it broke": 1}
    assert (summary.generated_tokens, summary.prompt_tokens, summary.turns) == (8, 8, 4)
    assert summary.metrics == {"solved": 2.0}
    assert summaries["unused"].mean_reward is None
    stored = json.loads(encode_summaries("job", summaries, TailReport()))
    assert stored["environments"]["env"]["reward"] == {"mean": 0.5, "min": -1.0, "max": 1.0}


def test_a_trajectory_stored_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_bytes(encode_line(record(0)) * 2)
    assert summarize(tmp_path, ["env"], lambda name: Counted())["env"].trajectories == 1  # type: ignore[arg-type,return-value]


def test_an_environment_s_own_metrics_cannot_spoil_the_others(tmp_path: Path) -> None:
    class Broken:
        def global_post_process_and_metrics(self, batch: dict[str, list[Any]]) -> tuple[Any, dict[str, Any]]:
            raise KeyError("accuracy")

    class Exotic:
        def global_post_process_and_metrics(self, batch: dict[str, list[Any]]) -> tuple[Any, dict[str, Any]]:
            return batch, {"pass": numpy.float32(0.5), "by": {1: object}}

    (tmp_path / "shard-00000.jsonl").write_bytes(encode_line(record(0)))
    for environment, words in ((Broken(), b"raised KeyError: 'accuracy'"), (Exotic(), b'"pass": 0.5')):
        summaries = summarize(tmp_path, ["env"], lambda name, made=environment: made)  # type: ignore[misc]
        assert summaries["env"].trajectories == 1
        assert words in encode_summaries("job", summaries, TailReport())
