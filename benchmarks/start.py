"""Seconds from `kuberoll run` to the first trajectory on disk: the demo with vLLM, cold or with an engine that serves.

Elapsed time, so the machine should have nothing else to do; the load is printed with each run. With `--against`, runs
of another checkout are made in turns with those of this one:

    .venv/bin/python -m benchmarks.start --runs 5 --against ../main
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.figures import Figure

HERE = Path(__file__).parents[1]
MANIFEST = "examples/sliding-puzzle/rolloutjob.yaml"
LOOK_SECONDS = 0.005


def kuberoll(checkout: Path) -> str:
    return str(checkout / ".venv" / "bin" / "kuberoll")


@contextmanager
def serving(checkout: Path, state: Path) -> Iterator[None]:
    """`kuberoll serve` for the demo."""
    command = [kuberoll(checkout), "serve", MANIFEST]
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True, env=environment(state)) as engine:
        assert engine.stdout is not None
        try:
            for line in engine.stdout:
                if line.startswith("Ctrl-C"):
                    break
            yield
        finally:
            engine.send_signal(signal.SIGINT)


def environment(state: Path) -> dict[str, str]:
    """Variables with which no engine of the user's own is found."""
    return {**os.environ, "XDG_STATE_HOME": str(state)}


def first_trajectory(checkout: Path, state: Path, output: Path) -> tuple[float, float, str]:
    """Seconds to the first trajectory, those to the end, and the line with the time of each phase."""
    began = time.perf_counter()
    command = [kuberoll(checkout), "run", MANIFEST, "--output", str(output), "--metrics-port", "0"]
    with (
        tempfile.TemporaryFile("w+") as text,
        subprocess.Popen(command, cwd=checkout, stdout=text, env=environment(state)) as run,
    ):
        shard = output / "shard-00000.jsonl"
        while run.poll() is None and not (shard.exists() and shard.stat().st_size):
            time.sleep(LOOK_SECONDS)
        first = time.perf_counter() - began
        run.wait()
        end = time.perf_counter() - began
        text.seek(0)
        lines = text.read().splitlines()
    if run.returncode:
        raise SystemExit("\n".join(lines))
    return first, end, next(line for line in lines if line.startswith("time:"))


def figures(runs: int = 2) -> Iterator[Figure]:
    """Seconds to the first trajectory of the demo with vLLM, and from the result to the end of the process."""
    first, stopping = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(runs):
            began, end, phases = first_trajectory(HERE, Path(temporary), Path(temporary) / f"run-{number}")
            first.append(began)
            stopping.append(end - float(phases.rpartition("total ")[2].split()[0]))
    yield Figure("seconds_to_first_trajectory", statistics.median(first), "s", goal=20.0)
    yield Figure("seconds_from_result_to_prompt", statistics.median(stopping), "s", goal=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="with an engine of `kuberoll serve`")
    parser.add_argument("--against", type=Path, help="another checkout, with its .venv")
    arguments = parser.parse_args()
    checkouts = [HERE, *([] if arguments.against is None else [arguments.against.resolve()])]
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        states = [Path(temporary) / f"state-{index}" for index in range(len(checkouts))]
        if arguments.warm:
            for checkout, state in zip(checkouts, states, strict=True):
                stack.enter_context(serving(checkout, state))
        for number in range(arguments.runs):
            for checkout, state in zip(checkouts, states, strict=True):
                load = os.getloadavg()[0]
                first, end, phases = first_trajectory(checkout, state, state.with_name(f"{state.name}-run-{number}"))
                seconds[checkout].append(first)
                print(f"{checkout.name}: first {first:.1f} s, end {end:.1f} s, load {load:.1f}; {phases}", flush=True)
    for checkout, values in seconds.items():
        low, median, high = min(values), statistics.median(values), max(values)
        print(f"{checkout.name}: first trajectory after {median:.1f} s ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
