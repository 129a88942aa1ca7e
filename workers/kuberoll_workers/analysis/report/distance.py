"""Distance of a run from its bound, and where the time between went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kuberoll_workers.analysis.report.throughput import Stretch, Throughput
from kuberoll_workers.data.text import duration

_FULL_SPEED_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Seconds of a run, and the bound that no schedule of the same turns could better, if these took as long.

    All responses are generated at full speed at best: at the rate of tokens that a tenth of the time reached in which
    there were any. And no run is shorter than its slowest trajectory, whose turns follow each other, with all that
    they waited for. docs/explanation/performance.md has the definition.

    Attributes:
        seconds: In which trajectories were in progress; pauses do not count.
        work_seconds: That all tokens take at full speed, where nothing counts as faster than that.
        longest_seconds: That the slowest trajectory waited for its responses and its environment.
        tail_seconds: Lost to full speed after the last trajectory had begun.
        environment_seconds: Lost before that in the share of the trajectories that waited for their environment.
        other_seconds: The rest: fewer trajectories in flight, long prompts, weights, a cold cache.
    """

    seconds: float
    work_seconds: float
    longest_seconds: float
    tail_seconds: float
    environment_seconds: float
    other_seconds: float

    @property
    def bound_seconds(self) -> float:
        """The bound."""
        return min(self.seconds, max(self.work_seconds, self.longest_seconds))

    @property
    def over_bound(self) -> float:
        """The run's time in multiples of the bound, from 1."""
        return self.seconds / self.bound_seconds

    def as_json(self) -> dict[str, Any]:
        """Form in which the page has it."""
        names = ("seconds", "work_seconds", "longest_seconds", "tail_seconds", "environment_seconds", "other_seconds")
        return {"over_bound": round(self.over_bound, 4), **{name: round(getattr(self, name), 3) for name in names}}


def distance(throughput: Throughput) -> Distance | None:
    """The distance of the run whose finished trajectories were added; None if no times or no tokens are known."""
    stretches = throughput.stretches(throughput.environments)
    if throughput.last_begin is None or not any(stretch.generated > 0 for stretch in stretches):
        return None
    widths = np.concatenate([np.diff(stretch.bounds) for stretch in stretches])
    rates = np.concatenate([stretch.tokens for stretch in stretches])
    full = _full_speed(rates, widths)
    lost = np.maximum(0.0, 1 - rates / full) * widths
    starts = np.concatenate([stretch.bounds[:-1] for stretch in stretches])
    in_tail = np.clip((starts + widths - throughput.last_begin) / widths, 0.0, 1.0)
    waiting = _shares(stretches)
    before = lost * (1 - in_tail)
    seconds = math.fsum(widths.tolist())
    return Distance(
        seconds=seconds,
        work_seconds=seconds - math.fsum(lost.tolist()),
        longest_seconds=throughput.longest_seconds,
        tail_seconds=math.fsum((lost * in_tail).tolist()),
        environment_seconds=math.fsum((before * waiting).tolist()),
        other_seconds=math.fsum((before * (1 - waiting)).tolist()),
    )


def distance_text(distance: Distance) -> str:
    """How far the run was from its bound, and where that time went."""
    lost = {
        "tail": distance.tail_seconds,
        "environments": distance.environment_seconds,
        "other causes": distance.other_seconds,
    }
    least = min(0.05, distance.seconds / 20)
    causes = ", ".join(f"{name} {duration(seconds)}" for name, seconds in lost.items() if seconds >= least)
    return (
        f"schedule: {duration(distance.seconds)}, {distance.over_bound:.2f} × the bound: at full speed "
        f"{duration(distance.work_seconds)}, the longest trajectory {duration(distance.longest_seconds)}"
        f"{f'; lost: {causes}' if causes else ''}"
    )


def _full_speed(rates: Any, widths: Any) -> float:
    """The rate that a tenth of the time with tokens reached."""
    order = np.argsort(-rates)
    reached = np.cumsum(np.where(rates > 0, widths, 0.0)[order])
    return float(rates[order][np.searchsorted(reached, _FULL_SPEED_SHARE * reached[-1])])


def _shares(stretches: Sequence[Stretch]) -> Any:
    """Of the trajectories of each interval, the share that waited for their environment."""
    busy = np.concatenate([stretch.busy for stretch in stretches])
    stepping = np.concatenate([stretch.stepping for stretch in stretches])
    return np.divide(stepping, busy, out=np.zeros_like(busy), where=busy > 0).clip(0.0, 1.0)
