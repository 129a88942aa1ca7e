"""A trainer in another process that follows a real run, is killed, and goes on from its checkpoint."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kuberoll.trainer import Rollouts, run_workers
from kuberoll_workers.data.record import TrajectoryKey, encode_line
from kuberoll_workers.output.storage import open_storage
from tests.local.support import PATIENCE_SECONDS, WAYS, manifest, running, trajectories
from tests.output.s3 import S3Server, s3, s3_server
from tests.without_torch import without_torch

__all__ = ["s3", "s3_server"]

GROUPS, REPEATS = 24, 4
TRAINER = """
import json, os, sys
from pathlib import Path
from kuberoll.trainer import Rollouts

run, checkpoint, log = sys.argv[1:]
rollouts = Rollouts.open(run, consumer="grpo", allow_simulated=True, timeout=200)
step = 0
if os.path.exists(checkpoint):
    saved = json.loads(Path(checkpoint).read_text())
    step = saved["step"]
    rollouts.load_state_dict(saved["rollouts"])
for batch in rollouts.batches(3, timeout=200):
    step += 1
    with open(log, "a") as file:
        keys = [group.key for group in batch.groups]
        print(json.dumps([step, keys, len(batch), float(batch.advantages.sum())]), file=file)
    # The parent may kill it here, between a batch and its checkpoint.
    print(step, flush=True)
    if sys.stdin.readline() == "":
        break
    new = Path(checkpoint + ".new")
    new.write_text(json.dumps({"step": step, "rollouts": rollouts.state_dict()}))
    new.replace(checkpoint)
"""


def start(*paths: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=without_torch(),
    )


@pytest.mark.parametrize("form", ["JSONL", "Parquet"])
def test_a_trainer_that_is_killed_has_each_group_of_a_run_once(tmp_path: Path, form: str) -> None:
    output, checkpoint, log = tmp_path / "run", tmp_path / "checkpoint", tmp_path / "log"
    job = manifest(
        tmp_path / "job.yaml",
        generation={
            "model": {"source": str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")},
            "engine": "Simulated",
            # Slow enough for the trainer to be ahead of the run.
            "simulated": {"responses": WAYS, "firstTokenSeconds": 0.05},
        },
        dataset={"source": {"generator": {"count": GROUPS // 2}}, "repeats": REPEATS, "epochs": 2, "shuffleSeed": 3},
        rollout={"concurrency": 2},
        workers={"replicas": 2},
        output={"format": form},
    )
    with running(job, "--output", output) as run:
        while_it_runs = 0
        # In each life but the last it is killed after a batch that no checkpoint has.
        for life, batches in enumerate((2, 3, None)):
            trainer = start(output, checkpoint, log)
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            try:
                steps = 0
                while trainer.stdout.readline():
                    steps += 1
                    while_it_runs += run.process.poll() is None
                    if steps == batches:
                        trainer.kill()
                        break
                    print(file=trainer.stdin, flush=True)
                code = trainer.wait(timeout=PATIENCE_SECONDS)
                assert code == (-9 if batches else 0), f"life {life}"
            finally:
                trainer.kill()
                trainer.wait(timeout=PATIENCE_SECONDS)
                trainer.stdin.close()
                trainer.stdout.close()
        assert run.finish() == 0, run.printed()
    # A step that was lost is done again with what follows the checkpoint: the last of each number counts.
    steps_of: dict[int, tuple[list[list[int]], int]] = {}
    lives = [json.loads(line) for line in log.read_text().splitlines()]
    for step, keys, rows, advantages in lives:
        steps_of[step] = keys, rows
        assert abs(advantages) < 1e-3
    assert len(lives) == len(steps_of) + 2
    assert while_it_runs
    had = [tuple(key) for keys, _ in steps_of.values() for key in keys]
    assert len(had) == len(set(had)) == GROUPS
    stored = {(record.task_index, record.rollout_index // REPEATS) for record in trajectories(output)}
    assert set(had) == stored
    assert sum(rows for _, rows in steps_of.values()) == GROUPS * REPEATS
    # Who comes when all is over has the same groups.
    replayed = [
        group for batch in Rollouts.open(str(output), allow_simulated=True).batches(5) for group in batch.groups
    ]
    assert {group.key for group in replayed} == stored


def test_a_run_in_an_object_store_that_is_interrupted_and_resumed_feeds_its_trainer_directly(
    s3: tuple[S3Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"{s3[1]}/run"
    job = manifest(
        tmp_path / "job.yaml",
        dataset={"source": {"generator": {"count": 8}}, "repeats": REPEATS, "epochs": None},
        rollout={"onPolicy": {"maxAhead": 8}},
        workers={"replicas": 2},
        # Nothing comes to the store before the trainer waits for it.
        output={"uri": uri, "parts": {"maxSeconds": 3600}},
    )
    delivered: list[tuple[TrajectoryKey, bytes]] = []
    with running(job) as run:
        metrics = run.until(r"metrics: (\S+)")
        (local,) = (tmp_path / "runs").glob("test-*")
        rollouts = Rollouts.open(uri, allow_simulated=True, timeout=200, direct=run_workers(local))
        batches = rollouts.batches(4, timeout=200)

        def take(count: int) -> None:
            for _ in range(count):
                for group in next(batches).groups:
                    delivered.extend((record.key, encode_line(record)) for record in group.trajectories)

        take(6)
        shown = urllib.request.urlopen(metrics[1], timeout=PATIENCE_SECONDS).read().decode()
        handed = {
            name: float(value) for name, value in re.findall(r'kuberoll_direct_(\w+){rolloutjob="test"} (\S+)', shown)
        }
        assert handed["parts_total"] > 0
        assert handed["bytes_total"] > handed["parts_total"]
        assert handed["waiting_requests"] <= 1
        workers = json.loads((local / "workers.json").read_bytes())
        # On a busy machine the other worker may still start.
        assert 1 <= len(workers["addresses"]) <= 2
        assert Path(workers["tokens"]).stat().st_mode & 0o777 == 0o600
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.printed()
    before = rollouts.counts.direct_parts
    assert before > 1
    with running(job, "--resume") as run:
        take(6)
        assert rollouts.counts.direct_parts > before
        rollouts.stop()
        assert run.finish() == 0, run.printed()
    assert not (local / "workers.json").exists()
    assert len(dict(delivered)) == len(delivered) == 12 * 4 * REPEATS
    storage = open_storage(uri)
    lines = {line for shard in storage.shards() for _, line in storage.lines(shard)}
    assert {line for _, line in delivered} <= lines


def test_a_simulated_engine_serves_what_its_trainer_publishes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = manifest(
        tmp_path / "job.yaml",
        generation={
            "model": {"source": str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")},
            "engine": "Simulated",
            "simulated": {"responses": WAYS},
        },
        dataset={"source": {"generator": {"count": GROUPS}}, "repeats": REPEATS, "epochs": None},
        rollout={"onPolicy": {"maxLag": 1, "onStale": "Drop", "maxAhead": 8}},
        workers={"replicas": 2},
    )
    with running(job, "--output", output) as run:
        rollouts = Rollouts.open(output, allow_simulated=True, timeout=200)
        newest = []
        for batch in rollouts.batches(4):
            sampled = batch.policy_version[batch.loss_mask > 0]
            assert rollouts.version - 1 <= sampled.min() <= sampled.max() <= rollouts.version
            newest.append(sampled.max() == rollouts.version)
            if rollouts.published() == 6:
                break
        rollouts.stop()
        assert run.finish() == 0, run.printed()
    # What begins after a publication has its version.
    assert any(newest[1:])
