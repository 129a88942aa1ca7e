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

from kuberoll_workers.data.record import Timing, TrajectoryKey, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from tests.output import crashing
from tests.output.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

KILLS = int(os.environ.get("KUBEROLL_KILLS", "24"))
TASKS = 400
LONGEST_LIFE_SECONDS = 0.8

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children that have everything imported already; forked from a process that has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.output.crashing"])
    return context


def digests(location: str) -> dict[TrajectoryKey, str]:
    """What was stored, without times and interruptions. Every line is checked, and none may be twice."""
    storage = open_storage(location)
    found: dict[TrajectoryKey, str] = {}
    for shard in storage.shards():
        for record in records.trajectories(storage, shard):
            assert record.key not in found
            record.timing = Timing([], [])
            record.incidents = None
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
@pytest.mark.parametrize("format", ["JSONL", pytest.param("Parquet", marks=pytest.mark.long)])
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
    job = crashing.job(40, rollout={"concurrency": 8}, output={"parts": {"maxSeconds": 0.05}})
    (tmp_path / "whole").mkdir()
    crashing.run(job, str(tmp_path / "whole"), None, 0.0)
    # The processes are forked from one that is older than the server.
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    arguments = (job, f"{s3[1]}/run", str(tmp_path), 0.03, environment)
    assert killed(processes, arguments, kills=5, draw=random.Random("s3"), longest=2.5) > 0
    assert digests(f"{s3[1]}/run") == digests(str(tmp_path / "whole"))


SHORT_POINTS = 6


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("format", "every"),
    [
        ("JSONL", False),
        ("Parquet", False),
        pytest.param("JSONL", True, marks=pytest.mark.long),
        pytest.param("Parquet", True, marks=pytest.mark.long),
    ],
)
def test_a_crash_before_any_touch_of_a_file_loses_and_doubles_nothing(
    processes: ForkServerContext, tmp_path: Path, format: str, every: bool
) -> None:
    job = crashing.job(6, rollout={"concurrency": 4}, output={"format": format})

    def run(output: Path, *, points: Path | None = None, crash_at: int | None = None) -> int | None:
        output.mkdir(exist_ok=True)
        arguments = (job, str(output), str(tmp_path / "stored"), points and str(points), crash_at)
        child = processes.Process(target=crashing.run_whole, args=arguments)
        child.start()
        child.join()
        return child.exitcode

    assert run(tmp_path / "whole", points=tmp_path / "points") == 0
    expected = digests(str(tmp_path / "whole"))
    assert len(expected) == 24
    files = {path.name for path in (tmp_path / "whole").iterdir()}
    count = int((tmp_path / "points").read_text())
    assert count > 40
    chosen = range(count) if every else sorted(random.Random(f"points {format}").sample(range(count), SHORT_POINTS))
    crashed = 0
    for point in chosen:
        output = tmp_path / f"run-{point}"
        (tmp_path / "stored").unlink(missing_ok=True)
        code = run(output, points=tmp_path / "points", crash_at=point)
        # Writes are put together as they come: a run may have fewer moments than the first.
        assert code in (0, crashing.CRASHED)
        crashed += code == crashing.CRASHED
        stored = tmp_path / "stored"
        acknowledged = (
            [TrajectoryKey(*map(int, line.split())) for line in stored.read_text().splitlines()]
            if stored.exists()
            else []
        )
        state = RunFiles(str(output)) if acknowledged else None
        found = {record.key for record in state.trajectories()} if state is not None else set()
        assert set(acknowledged) <= found, point
        assert run(output) == 0, point
        assert digests(str(output)) == expected, point
        # Not a file that was begun is left.
        assert {path.name for path in output.iterdir()} == files, point
    assert crashed > len(chosen) // 2
