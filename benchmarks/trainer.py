"""The consumer's side of a run: latency from a group's last line to its batch, and speed of a replay.

Run it: `python -m benchmarks.trainer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path

from kuberoll.trainer import Rollouts
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import TrajectoryRecord, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import FileJournal
from tests.output.support import Observed
from tests.trainer.support import WrittenRun, trajectory

REPEATS = 8
TURNS = 4
# The monotonic clock of Linux is the same in all processes.
CONSUMER = """
import sys, time
from kuberoll.trainer import Rollouts
for batch in Rollouts.open(sys.argv[1]).batches(1):
    print(batch.groups[0].key.task_index, time.monotonic(), flush=True)
"""


def long_trajectory(task: int, rollout: int, tokens: int) -> TrajectoryRecord:
    """A trajectory of some turns, half of whose tokens were sampled."""
    share = tokens // (2 * TURNS)
    chance = random.Random(task * REPEATS + rollout)
    messages = []
    for turn in range(TURNS):
        seen = Message("user" if turn == 0 else "environment", "text " * share, token_array(range(share)), turn=turn)
        logprobs = array("f", [-chance.random() for _ in range(share)])
        said = Message("assistant", "text " * share, token_array(range(share)), logprobs, turn + 1, [("3", 0, share)])
        messages += [seen, said]
    return trajectory(task, rollout, reward=float(rollout % 2), messages=messages)


async def latency(groups: int, tokens: int) -> list[float]:
    """Milliseconds from the return of the sync of a group's last line to its batch in another process."""
    with tempfile.TemporaryDirectory() as directory:
        run = WrittenRun(Path(directory) / "run", groups=groups, repeats=REPEATS)
        consumer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONSUMER, str(run.path), stdout=asyncio.subprocess.PIPE
        )
        assert consumer.stdout is not None
        journal = FileJournal(run.path / "shard-00000.jsonl", seconds=Observed())
        written: list[float] = []
        received: list[float] = []
        for task in range(groups):
            for rollout in range(REPEATS):
                await journal.append(long_trajectory(task, rollout, tokens))
            written.append(time.monotonic())
            name, moment = (await consumer.stdout.readline()).split()
            assert int(name) == task
            received.append(float(moment))
            # So that the consumer's looks fall anywhere.
            await asyncio.sleep(random.uniform(0.05, 0.25))
        await journal.close()
        await consumer.wait()
    # The first has the start of the consumer's process.
    return [1000 * (after - before) for before, after in zip(written, received, strict=True)][1:]


def replay(groups: int, tokens: int) -> None:
    """Print the speed of a replay, of JSON lines and of Parquet."""
    with tempfile.TemporaryDirectory() as directory:
        run = WrittenRun(Path(directory) / "run", groups=groups, repeats=REPEATS)
        with (run.path / "shard-00000.jsonl").open("wb") as file:
            for task in range(groups):
                file.writelines(encode_line(long_trajectory(task, rollout, tokens)) for rollout in range(REPEATS))
        for form in ("JSON lines", "Parquet"):
            if form == "Parquet":
                records.to_parquet(run.storage, "shard-00000")
            rollouts = Rollouts.open(str(run.path))
            began, rows = time.process_time(), 0
            for batch in rollouts.batches(16):
                rows += len(batch)
            seconds = time.process_time() - began
            print(
                f"replay of {form}: {rows / seconds:,.0f} rows of {tokens} tokens per CPU second, "
                f"{1e6 * seconds / rows:.0f} µs each; state {len(json.dumps(rollouts.state_dict()))} bytes"
            )
            state = rollouts.state_dict()
            state["read"] = {"files": {}, "parts": {}}
            began = time.process_time()
            resumed = Rollouts.open(str(run.path))
            resumed.load_state_dict(state)
            assert not list(resumed.batches(16))
            seconds = time.process_time() - began
            print(f"  with nothing left, and no place to begin at: {1e6 * seconds / rows:.1f} µs a row")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--replayed", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    found = sorted(asyncio.run(latency(options.groups, options.tokens)))
    print(
        f"from the journal's sync to the batch, {len(found)} groups of {REPEATS} × {options.tokens} tokens: "
        f"p50 {statistics.median(found):.0f} ms, p99 {found[int(0.99 * len(found))]:.0f} ms, most {found[-1]:.0f} ms"
    )
    replay(options.replayed, options.tokens)


if __name__ == "__main__":
    main()
