"""A trainer in another process that follows a real run, is killed, and goes on from its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll.trainer import Rollouts
from tests.local.support import PATIENCE_SECONDS, WAYS, manifest, running, trajectories
from tests.without_torch import without_torch

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
