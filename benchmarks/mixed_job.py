"""Seconds that turns wait for their environments beside two that crash and hang, and beside the same two when sound.

The job of `tests/local/mixed_job.py`: eight environments of three isolation kinds. Both forms of it run in turns:

    .venv/bin/python -m benchmarks.mixed_job --runs 3
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy

from tests.local.mixed_job import mixed_job
from tests.local.support import run_to_end, trajectories


def seconds_by_environment(directory: Path, *, faults: bool) -> dict[str, list[float]]:
    """Seconds of each turn of the trajectories that finished."""
    output = directory / "out"
    code, text = run_to_end(mixed_job(directory, faults=faults), "--output", output, "--metrics-port", "0")
    if code:
        raise SystemExit(text)
    seconds: dict[str, list[float]] = defaultdict(list)
    for record in trajectories(output):
        seconds[record.task_name].extend(record.timing.environment_seconds)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    totals: dict[bool, dict[str, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
    for _ in range(arguments.runs):
        for faults, total in totals.items():
            with tempfile.TemporaryDirectory() as directory:
                for name, seconds in seconds_by_environment(Path(directory), faults=faults).items():
                    total[name].extend(seconds)
    print(f"{'':12}{'median, ms':>24}{'99th percentile, ms':>24}")
    print(f"{'':12}{'sound':>12}{'faults':>12}{'sound':>12}{'faults':>12}")
    for name in sorted(totals[False]):
        values = [
            1000 * numpy.percentile(totals[faults][name], percent) for percent in (50, 99) for faults in (False, True)
        ]
        print(f"{name:12}" + "".join(f"{value:12.1f}" for value in values))


if __name__ == "__main__":
    main()
