"""A run that is killed, at any moment and however often, ends as if nothing had been."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.collection import records
from kuberoll_workers.collection.storage import open_storage
from kuberoll_workers.data.record import Timing, TrajectoryKey, encode_line
from tests.collection import crashing
from tests.collection.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

KILLS = int(os.environ.get("KUBEROLL_KILLS", "24"))
TASKS = 400
LONGEST_LIFE_SECONDS = 0.8


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children that have everything imported already; forked from a process that has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.collection.crashing"])
    return context


def digests(location: str) -> dict[TrajectoryKey, str]:
    """What was stored, without what no two runs share: how long it took. Every line is checked, none may be twice."""
    storage = open_storage(location)
    found: dict[TrajectoryKey, str] = {}
    for shard in storage.shards():
        for record in records.trajectories(storage, shard):
            assert record.key not in found
            record.timing = Timing([], [])
            found[record.key] = hashlib.sha256(encode_line(record)).hexdigest()
    return found


def killed(
    processes: ForkServerContext, arguments: tuple[Any, ...], *, kills: int, draw: random.Random, longest: float
) -> int:
    """Run to the end, killed at random moments on the way; how often it was killed."""
    count = 0
    while True:
        child = processes.Process(target=crashing.run, args=arguments)
        child.start()
        # The moments are what is tested, and none of them is waited for.
        child.join(draw.uniform(0.0, longest) if count < kills else None)
        if child.exitcode is not None:
            assert child.exitcode == 0
            return count
        child.kill()
        child.join()
        assert child.exitcode == -9
        count += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["JSONL", "Parquet"])
def test_killed_again_and_again(processes: ForkServerContext, tmp_path: Path, format: str) -> None:
    job = crashing.job(
        TASKS, rollout={"concurrency": 16}, dataset={"source": {"generator": {"count": TASKS}}, "repeats": 4}
    )
    job["spec"]["output"] = {"format": format}
    (tmp_path / "whole").mkdir()
    crashing.run(job, str(tmp_path / "whole"), None, 0.0)
    expected = digests(str(tmp_path / "whole"))
    assert set(expected) == {TrajectoryKey(task, rollout) for task in range(TASKS) for rollout in range(4)}

    draw, left, runs = random.Random(f"kuberoll {format}"), KILLS // 2, 0
    while left > 0:
        output = tmp_path / f"killed-{runs}"
        output.mkdir()
        arguments = (job, str(output), str(output), 0.03)
        left -= killed(processes, arguments, kills=left, draw=draw, longest=LONGEST_LIFE_SECONDS)
        assert digests(str(output)) == expected
        assert not (output / "turns").exists()
        runs += 1


def test_killed_while_writing_to_an_object_store(
    processes: ForkServerContext, s3: tuple[S3Server, str], tmp_path: Path
) -> None:
    job = crashing.job(40, rollout={"concurrency": 8}, output={"parts": {"maxSeconds": 0.05, "maxBytes": 20_000}})
    (tmp_path / "whole").mkdir()
    crashing.run(job, str(tmp_path / "whole"), None, 0.0)
    # The processes are forked from one that is older than the server.
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = (job, f"{s3[1]}/run", str(tmp_path), 0.03, environment)
    assert killed(processes, arguments, kills=5, draw=random.Random("s3"), longest=2.5) > 0
    assert digests(f"{s3[1]}/run") == digests(str(tmp_path / "whole"))
