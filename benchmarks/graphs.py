"""Graphs of benchmarks/replays.md, drawn from replays that this script plays: some two minutes on one core.

.venv/bin/python -m benchmarks.graphs
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.figure import Figure

from kuberoll_workers.simulation.engine_model import EngineLimits
from kuberoll_workers.simulation.replay import ReplaySettings, replay
from kuberoll_workers.simulation.report import report_of
from kuberoll_workers.simulation.trace import TraceTrajectory, read_trace

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
IN_FLIGHT: Final = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
FLEETS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
COLORS: Final = {
    "busy": "#2563eb",
    "tail": "#f59e0b",
    "environment": "#10b981",
    "no work": "#9ca3af",
    "admission": "#a855f7",
}


def trace(trajectories: int) -> Sequence[TraceTrajectory]:
    """The trace that `kuberoll bench synthesize` draws by default."""
    kuberoll = Path(sys.executable).with_name("kuberoll")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        command = [kuberoll, "bench", "synthesize", "--trajectories", str(trajectories), "--output", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read_trace(path).trajectories


def play(trajectories: Sequence[TraceTrajectory], **fleet: Any) -> dict[str, Any]:
    """The report of a replay on default engines."""
    settings = ReplaySettings(engine=EngineLimits(), **fleet)
    return report_of(trajectories, settings, replay(trajectories, settings))


def draw_in_flight() -> Figure:
    """One replica: what the number of trajectories in flight does to its time and to its cache."""
    trajectories = trace(2000)
    reports = [play(trajectories, concurrency=count) for count in IN_FLIGHT]
    figure, left = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    left.plot(IN_FLIGHT, [found["makespan_over_bound"] for found in reports], color=COLORS["busy"], marker="o")
    left.set(xlabel="trajectories in flight", ylabel="makespan over the bound", ylim=(0, None))
    left.yaxis.label.set_color(COLORS["busy"])
    left.axhline(1, color=COLORS["busy"], linewidth=0.8, linestyle=":")
    right = left.twinx()
    right.plot(IN_FLIGHT, [100 * found["hit_rate"] for found in reports], color=COLORS["tail"], marker="s")
    right.set(ylabel="prompt tokens found in the cache, %", ylim=(0, 100))
    right.yaxis.label.set_color(COLORS["tail"])
    return figure


def draw_fleets() -> Figure:
    """Where the engines' time goes when a fleet grows, and its work does not."""
    trajectories = trace(2000)
    reports = [play(trajectories, replicas=count, workers=min(count, 16), concurrency=2000) for count in FLEETS]
    figure, axes = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    names, below = [str(count) for count in FLEETS], [0.0] * len(FLEETS)
    for cause, color in COLORS.items():
        shares = [
            100 * (1 - sum(found["idle_share"].values()) if cause == "busy" else found["idle_share"].get(cause, 0.0))
            for found in reports
        ]
        if max(shares) < 0.1:
            continue
        axes.bar(names, shares, bottom=below, color=color, label=cause)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    for name, found in zip(names, reports, strict=True):
        axes.annotate(f"{found['makespan_seconds']:.0f} s", (name, 101), ha="center", va="bottom", fontsize=8)
    axes.set(xlabel="replicas, for 2,000 trajectories in flight", ylabel="engine time, %", ylim=(0, 112))
    axes.legend(ncols=len(COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, fontsize=9)
    return figure


def main() -> None:
    logging.getLogger("kuberoll_workers").setLevel(logging.CRITICAL)
    mpl.use("svg")
    # The same picture from the same numbers.
    mpl.rcParams.update({"svg.hashsalt": "kuberoll", "svg.fonttype": "none", "font.family": "sans-serif"})
    for name, draw in (("performance-in-flight", draw_in_flight), ("performance-fleets", draw_fleets)):
        draw().savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
