"""A replay against the run that it replays: real vLLM on this machine's CPU.

`kuberoll bench fit` measures what a step costs with a random model of 25 million parameters. Then runs of `kuberoll
run` with this model, groups, several turns, and environments that take a random time are recorded, and replayed with
these costs: one with pairs of samples of short and long prompts, one with few in flight, and one with more in flight
than the cache holds. Makespan and prefix hits are compared.

    .venv/bin/python -m benchmarks.replay [--trajectories 192] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.system import HERE, Size, intervals, make_model
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.simulation.engine_model import EngineLimits
from kuberoll_workers.simulation.recording import record_run
from kuberoll_workers.simulation.replay import ReplaySettings, replay
from kuberoll_workers.simulation.report import report_of

BLOCK = 32
WIDTH, LAYERS = 512, 8
KV_TOKEN_BYTES = 2 * LAYERS * WIDTH * 4
WINDOW = 1024
VOCABULARY = 432
ENGINE = {"dtype": "float32", "max_model_len": WINDOW, "max_num_seqs": 256, "block_size": BLOCK}
_TOKENS = re.compile(r'^kuberoll_tokens_total\{.*kind="(\w+)".*\} (\S+)$', re.MULTILINE)


class Load(NamedTuple):
    """A run.

    Attributes:
        cache: Tokens of the engine's key-value cache.
        samples: Of a prompt.
        words: Of a prompt; of an observation.
        spread: Of a prompt's words, the standard deviation of their logarithm.
        turns: Mean number.
        tokens: Mean of a response.
    """

    name: str
    trajectories: int
    concurrency: int
    cache: int
    samples: int
    words: tuple[int, int]
    spread: float
    turns: float
    tokens: int
    seconds: float


class Ran(NamedTuple):
    """What a run has done: its records, and its prompt tokens and those of them that the engine had cached."""

    records: list[TrajectoryRecord]
    prompted: float
    cached: float


def manifest(model: Path, load: Load) -> dict[str, Any]:
    """The run's job."""
    draw = random.Random(load.name)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    counts = [load.words[0] * draw.lognormvariate(0, load.spread) for _ in range(load.trajectories // load.samples)]
    rows = [{"prompt": " ".join(draw.choices(words, k=min(140, max(4, round(count)))))} for count in counts]
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": load.name},
        "spec": {
            "generation": {
                "model": {"source": str(model)},
                "engineArgs": ENGINE | {"kv_cache_memory_bytes": load.cache * KV_TOKEN_BYTES},
                # Of a random model, so many tokens of its vocabulary end a response after so many on the average. One
                # that reaches the maximum would end its trajectory.
                "sampling": {
                    "maxTokens": 5 * load.tokens,
                    "seed": 1,
                    "stopTokenIds": list(range(100, 100 + round(VOCABULARY / load.tokens))),
                },
            },
            "environments": [
                {
                    "name": "drawn",
                    "entrypoint": "benchmarks.replay_environment:Drawn",
                    "config": {"turns": load.turns, "words": load.words[1], "seconds": load.seconds},
                }
            ],
            "dataset": {"source": {"rows": rows}, "repeats": load.samples},
            "rollout": {"concurrency": load.concurrency},
        },
    }


def run(document: dict[str, Any], output: Path) -> Ran:
    """`kuberoll run`, its trajectories, and what its metrics counted last."""
    job = output.with_suffix(".yaml")
    job.write_text(json.dumps(document))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kuberoll = Path(sys.executable).with_name("kuberoll")
    command = [str(kuberoll), "run", str(job), "--output", str(output), "--metrics-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "XDG_STATE_HOME": str(output.parent)}
    counted: dict[str, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    counted.update({kind: float(value) for kind, value in _TOKENS.findall(answer.read().decode())})
            except OSError:
                continue

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    finally:
        ended.set()
        watching.join()
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    records = [record for record in RunFiles(str(output)).trajectories() if isinstance(record, TrajectoryRecord)]
    return Ran(records, counted.get("prompt", 0.0), counted.get("cached", 0.0))


def costs(model: Path, directory: Path) -> list[float]:
    """Seconds of a step, of a sequence, of a prompt token and of a token of a context, as `kuberoll bench fit` says."""
    kept = directory / "costs.txt"
    if not kept.exists():
        engine = ENGINE | {"kv_cache_memory_bytes": 32_768 * KV_TOKEN_BYTES}
        given = [part for name, value in engine.items() for part in ("-a", f"{name}={value}")]
        command = [str(Path(sys.executable).with_name("kuberoll")), "bench", "fit", str(model), *given]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        print(done.stderr.splitlines()[-1])
        kept.write_text(next(line for line in done.stdout.splitlines() if line.startswith("--set step-ms=")))
    print(kept.read_text())
    milliseconds, *micro, nano = (float(part.partition("=")[2]) for part in kept.read_text().split()[1::2])
    return [milliseconds / 1e3, *(value / 1e6 for value in micro), nano / 1e9]


def compare(found: Sequence[float], ran: Ran, load: Load) -> None:
    """Print what the replay of a run says, next to the run itself."""
    trace = record_run(ran.records).trajectories
    settings = ReplaySettings(
        engine=EngineLimits(
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            kv_cache_tokens=load.cache,
            block_tokens=BLOCK,
            chunked_prefill=False,
            step_seconds=found[0],
            decode_seconds=found[1],
            prefill_seconds=found[2],
            attention_seconds=found[3],
        ),
        concurrency=load.concurrency,
    )
    report = report_of(trace, settings, replay(trace, settings))
    times = intervals(ran.records)
    began = times[0][0]
    makespan = max(ended for record in ran.records for ended in record.timing.ended_at if ended) - began
    waits = [seconds for record in ran.records for seconds in record.timing.generation_seconds]
    rows = (
        ("makespan, s", makespan, report["makespan_seconds"]),
        ("a response, mean s", sum(waits) / len(waits), report["generation_seconds"]["mean"]),
        ("hit rate, %", 100 * ran.cached / max(1.0, ran.prompted), 100 * report["hit_rate"]),
        ("prompt tokens", ran.prompted, report["prompt_tokens"]),
    )
    print(f"{load.name}: {len(trace)} trajectories, {report['turns']} turns, {report['preemptions']} preemptions")
    for name, real, modelled in rows:
        error = 100 * (modelled / real - 1) if real else float("nan")
        print(f"  {name:20} run {real:10.4g}  replay {modelled:10.4g}  {error:+.1f} %")


LOADS = (
    Load("pairs", 128, 32, 32_768, 2, (20, 12), 1.1, 2.0, 30, 0.1),
    Load("fewer", 96, 16, 32_768, 8, (36, 20), 0.4, 4.0, 30, 0.3),
    Load("waves", 192, 96, 12_288, 8, (30, 16), 0.4, 3.5, 50, 0.2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, help="Instead of each run's own number.")
    parser.add_argument("--keep", type=Path, help="A directory for the runs; runs that are there are not made again.")
    parser.add_argument("--runs", nargs="*", default=[load.name for load in LOADS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(exist_ok=True)
        model = directory / "model"
        if not model.exists():
            make_model(model, Size(WIDTH, LAYERS))
        found = costs(model, directory)
        for load in LOADS:
            if load.name not in given.runs:
                continue
            if given.trajectories:
                load = load._replace(trajectories=given.trajectories)
            counts, output = directory / f"{load.name}.json", directory / load.name
            if counts.exists():
                records = [one for one in RunFiles(str(output)).trajectories() if isinstance(one, TrajectoryRecord)]
                ran = Ran(records, *json.loads(counts.read_text()))
            else:
                began = time.perf_counter()
                ran = run(manifest(model, load), output)
                counts.write_text(json.dumps([ran.prompted, ran.cached]))
                print(f"{load.name}: run in {time.perf_counter() - began:.0f} s", flush=True)
            compare(found, ran, load)


if __name__ == "__main__":
    main()
