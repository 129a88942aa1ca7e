"""All figures that the project watches: one table, and `benchmarks/results/latest.json`.

    .venv/bin/python -m benchmarks.run                       # make bench
    .venv/bin/python -m benchmarks.run --compare COMMIT      # make bench COMPARE=COMMIT

With `--compare` both commits are measured in turns, each by its own benchmarks and with the packages of this virtual
environment, and what differs by more than each differs from itself is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure

HERE = Path(__file__).parents[1]
RESULTS = HERE / "benchmarks" / "results" / "latest.json"

SUITES: Final = ("rollout_loop", "tail", "in_flight", "transport", "start", "system", "sandboxes")
"""Modules with a function `figures`, each measured in a process of its own."""

_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"some of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--compare", metavar="COMMIT", help="measure this commit, too, in turns")
    parser.add_argument("--suite", help=argparse.SUPPRESS)
    parser.add_argument("--written", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.suite is not None:
        found = list(importlib.import_module(f"benchmarks.{given.suite}").figures())
        given.written.write_text(json.dumps([dataclasses.asdict(figure) for figure in found]))
        return
    unknown = sorted(set(given.suites) - set(SUITES))
    if unknown:
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}")
    suites = given.suites or SUITES
    if given.compare is not None:
        compare(suites, given.compare)
        return
    figures = [figure for suite in suites for figure in measure(suite, HERE, Path(sys.executable))]
    print_table(figures)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(as_json(figures), indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(HERE)}")


def measure(suite: str, checkout: Path, python: Path) -> list[Figure]:
    """The figures of one suite, of a checkout and an interpreter that imports it."""
    print(f"--- {suite}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory) / "figures.json"
        command = [str(python), "-m", "benchmarks.run", "--suite", suite, "--written", str(written)]
        subprocess.run(command, cwd=checkout, check=True)
        return [Figure(**values) for values in json.loads(written.read_text())]


def make_environment(checkout: Path) -> Path:
    """Make a virtual environment that has the sources of a checkout and the packages of this one; return its Python."""
    place = checkout / ".venv"
    venv.create(place, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    sources = [str(checkout / part) for part in ("crds", "operator", "workers")]
    # Names are found where they come first: in this order.
    lines = [*sources, f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"]
    (Path(packages) / "checkout.pth").write_text("\n".join(lines) + "\n")
    python, command = place / "bin" / "python", Path(sys.executable).with_name("kuberoll")
    _, _, program = command.read_text().partition("\n")
    own = python.with_name("kuberoll")
    own.write_text(f"#!{python}\n{program}")
    own.chmod(0o755)
    return python


def as_json(figures: Sequence[Figure]) -> dict[str, Any]:
    """What is written: the machine, the commit, and each figure by its name."""
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[1],
            "python": platform.python_version(),
        },
        "commit": commit(),
        "figures": {
            figure.name: {name: getattr(figure, name) for name in ("value", "unit", "baseline", "bound", "goal")}
            for figure in figures
        },
    }


def cpu_name() -> str:
    """The processor, as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of this checkout, with a mark if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def print_table(figures: Sequence[Figure]) -> None:
    """The figures, with what they are compared with."""
    print(f"{'figure':40} {'value':>10} {'unit':6} {'baseline':>10} {'bound':>8} {'goal':>8}")
    for figure in figures:
        compared = [
            "" if number is None else f"{number:.4g}" for number in (figure.baseline, figure.bound, figure.goal)
        ]
        mark = {True: "reached", False: "missed", None: ""}[figure.is_reached]
        print(
            f"{figure.name:40} {figure.value:10.4g} {figure.unit:6} {compared[0]:>10} {compared[1]:>8} "
            f"{compared[2]:>8} {mark}"
        )


def compare(suites: Sequence[str], other: str) -> None:
    """Measure this checkout and another commit in turns, and print what differs."""
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Path(temporary) / "other"
        subprocess.run(["git", "worktree", "add", "--detach", str(checkout), other], cwd=HERE, check=True)
        try:
            if not (checkout / "benchmarks" / "run.py").exists():
                raise SystemExit(f"{other} has no benchmarks/run.py: it is older than make bench")
            sides = ((HERE, Path(sys.executable)), (checkout, make_environment(checkout)))
            values: dict[str, tuple[list[float], list[float]]] = {}
            for _ in range(_ROUNDS):
                for suite in suites:
                    for side, (place, python) in enumerate(sides):
                        for figure in measure(suite, place, python):
                            values.setdefault(figure.name, ([], []))[side].append(figure.value)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], cwd=HERE, check=True)
    print(f"{'figure':40} {'here':>10} {other[:12]:>12} {'change':>8}")
    for name, (mine, theirs) in values.items():
        if not (mine and theirs):
            print(f"{name:40} {'only here' if mine else 'only there':>10}")
            continue
        one, two = statistics.median(mine), statistics.median(theirs)
        # Beyond noise: the ranges of the two do not touch.
        apart = min(mine) > max(theirs) or max(mine) < min(theirs)
        print(f"{name:40} {one:10.4g} {two:12.4g} {100 * (one / two - 1):7.1f} % {'differs' if apart else ''}")


if __name__ == "__main__":
    main()
