"""Runs to consume, written line by line as workers write them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import AnyRecord, DroppedRecord, TrajectoryRecord, encode_line
from kuberoll_workers.output.run_directory import AGGREGATES, MANIFEST
from kuberoll_workers.output.storage import DirectoryStorage
from tests.output import support

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def manifest(*, groups: int, repeats: int = 2, shards: int = 1, **identity: Any) -> dict[str, Any]:
    """A manifest of a run with one environment, `env`."""
    return {
        "format": 1,
        "job": "job",
        "created": "2026-01-01T00:00:00+00:00",
        "shards": shards,
        "identity": {
            "dataset.repeats": repeats,
            "environments[0].name": "env",
            "environments[0].repeats": None,
            "rollout.groups.oversample": 0,
            "rollout.groups.atomic": False,
            "rollout.groups.wanted": None,
            **identity,
        },
        "inputs": {"rows": groups, "trajectories": groups * repeats, "digest": "d"},
        "versions": {},
        "sampling": PLAIN,
    }


class WrittenRun:
    """A run in a directory."""

    def __init__(self, path: Path, **made: Any) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.storage = DirectoryStorage(path)
        self.manifest = manifest(**made)
        (path / MANIFEST).write_text(json.dumps(self.manifest))

    def write(self, *records: AnyRecord) -> None:
        """Append records to the journals that they belong to."""
        for record in records:
            with (self.path / f"{self.journal_of(record)}.jsonl").open("ab") as file:
                file.write(encode_line(record))

    def journal_of(self, record: AnyRecord) -> str:
        if isinstance(record, TrajectoryRecord):
            return f"shard-{record.task_index % self.manifest['shards']:05d}"
        return "dropped" if isinstance(record, DroppedRecord) else "failures"

    def end(self) -> None:
        """Write what a run writes last."""
        (self.path / AGGREGATES).write_text("{}")


def trajectory(task: int, rollout: int = 0, reward: float = 1.0, **changes: Any) -> TrajectoryRecord:
    """A finished trajectory with ids that name it: prompt, response, observation, response, observation."""
    messages = [
        Message("user", "p", token_array([1, task])),
        Message("assistant", "a", token_array([2, rollout]), array("f", [-0.5, -0.25]), 1, [("3", 0, 2)], sampled=True),
        Message("environment", "o", token_array([5]), turn=1),
        Message("assistant", "b", token_array([6]), array("f", [-1.0]), 2, [("4", 0, 1)], sampled=True),
        Message("environment", "e", token_array([7, 7, 7]), turn=2),
    ]
    return support.record(
        task, rollout, **{"messages": messages, "total_reward": reward, "rewards": [reward], **changes}
    )
