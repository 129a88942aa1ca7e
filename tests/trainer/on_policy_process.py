"""A run's workers, or its trainer, in a process of its own that may be killed at any moment.

`python -m tests.trainer.on_policy_process workers DIRECTORY` and `… trainer DIRECTORY`. Weights are a number in a file,
which the workers' simulated engine loads and acknowledges in another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from kuberoll.trainer import Rollouts
from tests.trainer.on_policy import PacedRun, job

GROUPS, STEPS, MAX_LAG = 4, 40, 1


def write(path: Path, text: str) -> None:
    """Replace a file."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


async def work(directory: Path) -> None:
    """Run the workers until the trainer stops them."""
    run = PacedRun(directory / "run", job(shards=2, rollout={"onPolicy": {"maxLag": MAX_LAG, "maxAhead": 24}}))

    loaded = asyncio.Event()

    async def load() -> None:
        served = -1
        while True:
            try:
                wanted = int((directory / "wanted").read_text())
            except FileNotFoundError:
                wanted = 0
            if wanted != served:
                await run.engine.load_weights(None, str(wanted))
                served = wanted
                write(directory / "served", str(served))
                loaded.set()
            await asyncio.sleep(0.002)

    loading = asyncio.ensure_future(load())
    # A new engine has the newest weights before its first request.
    await loaded.wait()
    async with run:
        assert await run.ended()
    loading.cancel()


def train(directory: Path) -> None:
    """Take groups and publish weights, with a checkpoint after each step."""
    rollouts = Rollouts.open(str(directory / "run"), consumer="grpo", allow_simulated=True, timeout=60)
    checkpoint, step = directory / "checkpoint", 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        step = saved["step"]
        rollouts.load_state_dict(saved["rollouts"])
        publish(directory, rollouts)
    for batch in rollouts.batches(GROUPS, timeout=60):
        step += 1
        taken = [[*group.key, rollouts.version] for group in batch.groups]
        with (directory / "taken").open("a") as file:
            print(json.dumps([step, taken]), file=file)
        publish(directory, rollouts)
        write(checkpoint, json.dumps({"step": step, "rollouts": rollouts.state_dict()}))
        if step >= STEPS:
            rollouts.stop()
            return


def publish(directory: Path, rollouts: Rollouts) -> None:
    """Have the engine load the next version."""
    version = rollouts.version + 1
    write(directory / "wanted", str(version))
    while (directory / "served").read_text() != str(version):
        time.sleep(0.001)
    rollouts.published(version)


if __name__ == "__main__":
    role, place = sys.argv[1], Path(sys.argv[2])
    if role == "workers":
        asyncio.run(work(place))
    else:
        train(place)
