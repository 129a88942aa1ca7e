"""Records to store."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, Timing, TokenCounts, TrajectoryRecord, TurnRecord
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.store import ResultStore


class Observed:
    """A metric that counts its observations."""

    def __init__(self) -> None:
        self.count = self.failures = 0

    def observe(self, amount: float) -> None:
        assert amount >= 0
        self.count += 1

    def failed(self) -> None:
        self.failures += 1


def store_at(place: Path, **changes: Any) -> ResultStore:
    """A store of one shard in a directory."""
    fields: dict[str, Any] = {
        "shards": [0],
        "shard_count": 1,
        "repeats": {"env": 1},
        "turns": place,
        "seconds": Observed(),
        "stored": lambda _: None,
    }
    return ResultStore(DirectoryStorage(place), **{**fields, **changes})


def record(task_index: int, rollout_index: int = 0, **changes: Any) -> TrajectoryRecord:
    assistant = Message(
        "assistant", "é", token_array([3, 4]), array("f", [-0.1, -1.5]), 1, (("v1", 0, 2),), sampled=True
    )
    fields: dict[str, Any] = {
        "task_index": task_index,
        "rollout_index": rollout_index,
        "task_name": "env",
        "idx": {"any": ["json", 1]},
        "messages": [Message("user", "hi", token_array([1, 2])), assistant],
        "total_reward": 1.0,
        "rewards": [1.0],
        "stop_reason": "terminated",
        "turn_count": 1,
        "tokens": TokenCounts(2, 2, 0),
        "timing": Timing([0.5], [0.25]),
        "metadata": {"state": None},
        "seed": 2**63 - 1,
        "attempt": 0,
    }
    return TrajectoryRecord(**{**fields, **changes})


def failure(task_index: int, rollout_index: int = 0, **changes: Any) -> FailureRecord:
    fields: dict[str, Any] = {
        "task_index": task_index,
        "rollout_index": rollout_index,
        "task_name": "env",
        "idx": None,
        "kind": "infrastructure",
        "stage": "generation",
        "cause": "gone",
        "tries": 3,
        "attempt": 0,
        "turn_count": 0,
        "seed": 1,
        "messages": [],
    }
    return FailureRecord(**{**fields, **changes})


def dropped(task_index: int, rollout_index: int = 0, **changes: Any) -> DroppedRecord:
    fields: dict[str, Any] = {
        "task_index": task_index,
        "rollout_index": rollout_index,
        "task_name": "env",
        "idx": None,
        "reason": "oversampled",
        "stop_reason": None,
        "turn_count": 1,
        "total_reward": 0.0,
        "rewards": [0.0],
        "tokens": TokenCounts(2, 2, 0),
        "messages": [],
        "metadata": None,
        "seed": 1,
        "attempt": 0,
    }
    return DroppedRecord(**{**fields, **changes})


def turn(task_index: int) -> TurnRecord:
    return TurnRecord(
        task_index=task_index,
        rollout_index=0,
        attempt=0,
        turn=1,
        messages=[
            Message("assistant", "x", token_array([3]), turn=1, sampled=True),
            Message("environment", "y", token_array([4])),
        ],
        reward=1.0,
        reward_parts={},
        metadata=None,
        stop_strings=None,
        answer=None,
        generation_seconds=0.0,
        environment_seconds=0.0,
        stop_reason=None,
        token_source="engine",
    )
