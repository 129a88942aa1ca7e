"""Workers and their trainer, killed in turns: each group is taken once, and none is too old."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kuberoll_workers.output.records import shard_name, trajectories
from kuberoll_workers.output.storage import DirectoryStorage
from tests.trainer.on_policy_process import GROUPS, MAX_LAG, STEPS
from tests.without_torch import without_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KILLS = 10


def start(role: str, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.on_policy_process", role, str(directory)], env=without_torch()
    )


def steps_of(directory: Path) -> int:
    try:
        return len((directory / "taken").read_text().splitlines())
    except FileNotFoundError:
        return 0


def test_workers_and_trainer_that_are_killed_in_turns(tmp_path: Path) -> None:
    chance = random.Random(18)
    roles = ("workers", "trainer")
    processes = {role: start(role, tmp_path) for role in roles}
    try:
        for kill in range(KILLS):
            role = roles[kill % 2]
            # Between two steps, anywhere: after some more of them, and a moment.
            until = steps_of(tmp_path) + chance.randint(1, 3)
            while steps_of(tmp_path) < until:
                assert all(process.poll() is None for process in processes.values()), "one ended by itself"
                time.sleep(0.002)
            for _ in range(chance.randint(0, 50_000)):
                pass
            processes[role].kill()
            processes[role].wait(timeout=60)
            processes[role] = start(role, tmp_path)
        for process in processes.values():
            assert process.wait(timeout=200) == 0
    finally:
        for process in processes.values():
            process.kill()
            process.wait(timeout=60)
    # A step that was lost with its trainer is done again: the last of each number counts.
    steps = dict(map(json.loads, (tmp_path / "taken").read_text().splitlines()))
    assert sorted(steps) == list(range(1, STEPS + 1))
    taken = {(task, number): version for groups in steps.values() for task, number, version in groups}
    assert len(taken) == STEPS * GROUPS
    # What the journals say of them.
    storage = DirectoryStorage(tmp_path / "run")
    seen = dict.fromkeys(taken, 0)
    for shard in range(2):
        for record in trajectories(storage, shard_name(shard)):
            key = record.task_index, record.rollout_index // 3
            if key not in taken:
                continue
            seen[key] += 1
            versions = [int(name) for message in record.messages for name, *_ in message.policy_versions or ()]
            assert 0 <= taken[key] - min(versions) <= MAX_LAG
    assert set(seen.values()) == {3}
