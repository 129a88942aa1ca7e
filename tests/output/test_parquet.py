"""The columns of a shard's Parquet file, as others read them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet

from kuberoll_workers.data.record import RecordError, encode_line
from kuberoll_workers.output.parquet import read_parquet, write_parquet
from tests.output.support import record


def test_the_columns_are_those_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    parts = {"format": [0.5], "right": [1.0]}
    given = record(3, 1, reward_parts=parts, answer="42")
    write_parquet(path, iter([given]))
    (row,) = pyarrow.parquet.read_table(path).to_pylist()
    assert set(row) == {
        "task_index", "rollout_index", "task_name", "idx", "messages", "total_reward", "rewards", "stop_reason",
        "turn_count", "tokens", "timing", "metadata", "seed", "attempt", "reward_parts", "answer", "token_source",
    }  # fmt: skip
    assert (row["task_index"], row["rollout_index"], row["task_name"]) == (3, 1, "env")
    assert (row["total_reward"], row["rewards"], row["stop_reason"], row["turn_count"]) == (1.0, [1.0], "terminated", 1)
    assert row["tokens"] == {"prompt": 2, "generated": 2, "environment": 0}
    assert row["timing"] == {"generation_seconds": [0.5], "environment_seconds": [0.25]}
    assert [(part["name"], part["values"]) for part in row["reward_parts"]] == list(parts.items())
    assert (row["answer"], row["seed"], row["attempt"], row["token_source"]) == ("42", 2**63 - 1, 0, "engine")
    user, assistant = row["messages"]
    assert (user["role"], user["content"], user["token_ids"], user["logprobs"]) == ("user", "hi", [1, 2], None)
    assert (assistant["role"], assistant["content"], assistant["turn"]) == ("assistant", "é", 1)
    assert (assistant["token_ids"], len(assistant["logprobs"]), assistant["truncated"]) == ([3, 4], 2, False)
    assert assistant["policy_versions"] == [{"version": "v1", "start": 0, "end": 2}]
    unreadable: list[RecordError] = []
    (read,) = read_parquet(path, where="x", unreadable=unreadable.append)
    assert unreadable == []
    assert encode_line(read) == encode_line(given)
