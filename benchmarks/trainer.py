"""The consumer's side of a run: latency from a group's last line to its batch, and speed of a replay.

Run it: `python -m benchmarks.trainer`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path

from kuberoll.trainer import Rollouts
from kuberoll_api.http_server import serving
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import TrajectoryRecord, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.feed_server import feed_routes
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.run_directory import MANIFEST
from kuberoll_workers.output.storage import DirectoryStorage, open_storage
from kuberoll_workers.telemetry import RolloutMetrics
from tests.output.s3 import S3Server
from tests.output.support import Observed
from tests.trainer.support import WrittenRun, manifest, trajectory

REPEATS = 8
TURNS = 4
# The monotonic clock of Linux is the same in all processes.
CONSUMER = """
import sys, time
from kuberoll.trainer import Rollouts, Workers
location, *workers = sys.argv[1:]
direct = Workers(*workers, token="read" * 8) if workers else None
for batch in Rollouts.open(location, direct=direct).batches(1):
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
        said = Message(
            "assistant", "text " * share, token_array(range(share)), logprobs, turn + 1, [("3", 0, share)], sampled=True
        )
        messages += [seen, said]
    return trajectory(task, rollout, reward=float(rollout % 2), messages=messages)


async def latency(location: str, *, groups: int, tokens: int, direct: bool = False) -> list[float]:
    """Milliseconds from the end of a group's last trajectory to its batch in another process, without the first group.

    In a directory from the return of the journal's sync, in an object store from the trajectory's end: it waits for its
    part, of at most a second here, or of as little as the consumer on the direct path waits for.
    """
    storage = open_storage(location, parts=PartLimits(max_seconds=1.0))
    storage.write(MANIFEST, json.dumps(manifest(groups=groups, repeats=REPEATS)).encode())
    feed = PartFeed()
    async with serving(
        feed_routes(feed, ["read" * 8], RolloutMetrics("benchmark").direct), host="127.0.0.1", port=0
    ) as port:
        consumer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONSUMER, location, *([f"127.0.0.1:{port}"] if direct else [])),
            stdout=asyncio.subprocess.PIPE,
        )
        assert consumer.stdout is not None
        journal = storage.journal(
            "shard-00000", owner="worker-00000-00000000", seconds=Observed(), written=feed.written
        )
        feed.attach([journal], shards=[0])
        found: list[float] = []
        for task in range(groups):
            stored = [journal.add(long_trajectory(task, rollout, tokens))[0] for rollout in range(REPEATS)]
            feed.due()
            if isinstance(storage, DirectoryStorage):
                await asyncio.gather(*stored)
            ended = time.monotonic()
            name, moment = (await consumer.stdout.readline()).split()
            assert int(name) == task
            found.append(1000 * (float(moment) - ended))
            # So that the consumer's looks fall anywhere.
            await asyncio.sleep(random.uniform(0.05, 0.25))
        await journal.close()
        await consumer.wait()
        feed.end()
    # The first has the start of the consumer's process.
    return sorted(found[1:])


def print_latency(where: str, found: list[float], tokens: int) -> None:
    print(
        f"{where}, {len(found)} groups of {REPEATS} × {tokens} tokens: p50 {statistics.median(found):.0f} ms, "
        f"p99 {found[int(0.99 * len(found))]:.0f} ms, most {found[-1]:.0f} ms"
    )


def print_store_latencies(groups: int, tokens: int) -> None:
    """Print `latency` in moto's S3 server on this machine, whose uploads take what those of a real store take, too."""
    import fsspec

    server = S3Server()
    os.environ |= {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        fsspec.filesystem("s3").mkdir("bucket")
        for number, (seconds, direct) in enumerate(itertools.product((0.0, 0.1), (False, True))):
            server.upload_seconds, listings, uploads = seconds, server.listings, len(server.puts)
            run = latency(f"s3://bucket/run-{number}", groups=groups, tokens=tokens, direct=direct)
            way = "the direct path" if direct else "the journal, parts of 1 s"
            more = f", uploads {1000 * seconds:.0f} ms longer" if seconds else ""
            print_latency(f"from a trajectory's end to the batch, S3{more}, {way}", asyncio.run(run), tokens)
            print(f"  {server.listings - listings} listings, {len(server.puts) - uploads} uploads")
    finally:
        server.close()


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
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(latency(directory, groups=options.groups, tokens=options.tokens))
    print_latency("from the journal's sync to the batch, a directory", found, options.tokens)
    print_store_latencies(max(2, options.groups // 4), options.tokens)
    replay(options.replayed, options.tokens)


if __name__ == "__main__":
    main()
