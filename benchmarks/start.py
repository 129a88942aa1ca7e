"""Seconds from `kuberoll run` to the first trajectory on disk, and from its result to its end: the demo with vLLM.

The engine is the run's own and cold, or one that serves already.

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
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

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
    """Variables with which no engine of the user's own is found, and each line is seen when it is printed."""
    return {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONUNBUFFERED": "1"}


class Times(NamedTuple):
    """When a run was how far, in seconds since its command was started, and what it says of its phases.

    Attributes:
        first: Its first trajectory was on disk.
        result: It printed its result.
        end: Its process had ended.
        phases: The line with the time of each phase.
    """

    first: float
    result: float
    end: float
    phases: str


def measure(checkout: Path, state: Path, output: Path) -> Times:
    """Run the demo once."""
    began = time.perf_counter()
    command = [kuberoll(checkout), "run", MANIFEST, "--output", str(output), "--metrics-port", "0"]
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True, env=environment(state)) as run:
        assert run.stdout is not None
        text = run.stdout

        def read() -> None:
            lines.extend((time.perf_counter() - began, line.rstrip()) for line in text)

        reader = threading.Thread(target=read)
        reader.start()
        shard = output / "shard-00000.jsonl"
        while run.poll() is None and not (shard.exists() and shard.stat().st_size):
            time.sleep(LOOK_SECONDS)
        first = time.perf_counter() - began
        run.wait()
        end = time.perf_counter() - began
        reader.join()
    if run.returncode:
        raise SystemExit("\n".join(line for _, line in lines))
    result, phases = next((seconds, line) for seconds, line in lines if line.startswith("time:"))
    return Times(first, result, end, phases)


def figures(runs: int = 2) -> Iterator[Figure]:
    """Seconds to the first trajectory of the demo with vLLM, and from the result to the end of the process."""
    with tempfile.TemporaryDirectory() as temporary:
        found = [measure(HERE, Path(temporary), Path(temporary) / f"run-{number}") for number in range(runs)]
    first, stopping = [times.first for times in found], [times.end - times.result for times in found]
    yield Figure("seconds_to_first_trajectory", statistics.median(first), "s", goal=20.0)
    yield Figure("seconds_from_result_to_prompt", statistics.median(stopping), "s", goal=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="with an engine of `kuberoll serve`")
    parser.add_argument("--against", type=Path, help="another checkout, with its .venv")
    arguments = parser.parse_args()
    checkouts = [HERE, *([] if arguments.against is None else [arguments.against.resolve()])]
    found: dict[Path, list[Times]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        states = [Path(temporary) / f"state-{index}" for index in range(len(checkouts))]
        if arguments.warm:
            for checkout, state in zip(checkouts, states, strict=True):
                stack.enter_context(serving(checkout, state))
        for number in range(arguments.runs):
            for checkout, state in zip(checkouts, states, strict=True):
                load = os.getloadavg()[0]
                times = measure(checkout, state, state.with_name(f"{state.name}-run-{number}"))
                found[checkout].append(times)
                print(
                    f"{checkout.name}: first {times.first:.1f} s, result {times.result:.1f} s, "
                    f"end {times.end - times.result:.2f} s later, load {load:.1f}; {times.phases}",
                    flush=True,
                )
    for checkout, runs in found.items():
        print(
            f"{checkout.name}: first trajectory after {_spread([times.first for times in runs])}, "
            f"the end {_spread([times.end - times.result for times in runs])} after the result"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
