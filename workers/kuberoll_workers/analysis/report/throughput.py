"""Throughput of a run over time: turns, tokens and busy trajectories, from the times of all turns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kuberoll_workers.analysis.statistics import Floats, Integers
from kuberoll_workers.data.record import TrajectoryRecord

_MOST_POINTS = 240
_MOST_PAUSES = 20
_MOST_BINS = 4096
_FINEST = 1 / 64
"""Width of the bins at the start, in seconds; a power of two, so that times fall exactly on bounds."""
_BUFFER = 1 << 15
_SHORTEST = 1e-3
"""Least duration of a generation in seconds, so that its rate is finite."""

# Columns of a bin. All but the last describe functions of time by their changes of slope: the sum of the changes, and
# the sum of the changes times their moments, from which the integral at any bound follows exactly.
_TOKENS, _TOKEN_MOMENTS, _BUSY, _BUSY_MOMENTS, _STEPPING, _STEPPING_MOMENTS, _TURNS = range(7)
_COLUMNS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A period without a pause.

    Attributes:
        start: Unix time of its start.
        end: Unix time of its end.
        seconds: Width of its intervals; the last one may be shorter.
        turns, tokens: Means per second of each interval.
        busy: Mean number of trajectories that waited for a response or for an environment.
        stepping: Mean number of those that waited for an environment.
    """

    start: float
    end: float
    seconds: float
    turns: Floats
    tokens: Floats
    busy: Floats
    stepping: Floats

    @property
    def bounds(self) -> Floats:
        """Unix times of the starts of the intervals, and of the end."""
        return np.append(self.start + self.seconds * np.arange(len(self.tokens)), self.end)

    @property
    def generated(self) -> float:
        """Number of tokens."""
        return float(np.sum(self.tokens * np.diff(self.bounds)))

    def as_json(self) -> dict[str, Any]:
        """Form in which the page has it."""
        return {
            "start": self.start,
            "end": self.end,
            "seconds": self.seconds,
            **{name: [float(f"{value:.4g}") for value in getattr(self, name)] for name in ("turns", "tokens", "busy")},
        }


class Throughput:
    """Collects the turns of finished trajectories in any order, in bounded memory.

    A response's tokens count evenly over its generation, and a turn at its end. Bins become wider as the run gets
    longer; pauses, such as between an interruption and its resumption, take no bins.

    Attributes:
        longest_seconds: Time that the slowest trajectory waited for its responses and its environment.
        last_begin: Unix time at which the last trajectory began to generate; None if no times are known.
    """

    def __init__(self) -> None:
        self._width = _FINEST
        self._origin: float | None = None
        self._bins: dict[str, dict[int, Floats]] = {}
        self._buffers: dict[str, array[float]] = {}
        self.longest_seconds = 0.0
        self.last_begin: float | None = None

    def add(self, record: TrajectoryRecord) -> None:
        """Add the turns of a trajectory whose end is known."""
        timing = record.timing
        ends = timing.ended_at
        if not ends:
            return
        own = sum(timing.generation_seconds) + sum(timing.environment_seconds)
        self.longest_seconds = max(self.longest_seconds, own)
        if ends[0] is not None:
            began = ends[0] - timing.generation_seconds[0] - timing.environment_seconds[0]
            self.last_begin = began if self.last_begin is None else max(began, self.last_begin)
        tokens = [0] * record.turn_count
        for message in record.messages:
            if message.sampled and message.turn <= record.turn_count:
                tokens[message.turn - 1] += len(message.token_ids)
        buffer = self._buffers.setdefault(record.task_name, array("d"))
        for ended, generation, environment, count in zip(
            ends, timing.generation_seconds, timing.environment_seconds, tokens, strict=False
        ):
            if ended is None:
                continue
            if self._origin is None:
                self._origin = float(np.floor(ended))
            buffer.extend((ended - self._origin, generation, environment, count))
        if len(buffer) >= 4 * _BUFFER:
            self._flush(record.task_name)

    def stretches(self, environments: Sequence[str]) -> list[Stretch]:
        """Throughput of these environments together, in at most 240 intervals, which are those of the whole run."""
        for name in list(self._buffers):
            self._flush(name)
        everything = _sum(self._bins.values())
        if self._origin is None or not everything:
            return []
        chosen = _sum(self._bins[name] for name in environments if name in self._bins)
        active = _active(everything)
        step = 1
        while sum(-(-(last - first) // step) for first, last in active) > _MOST_POINTS:
            step *= 2
        return [self._stretch(chosen, first, last, step) for first, last in active]

    @property
    def environments(self) -> list[str]:
        """Names of the environments of the trajectories that were added."""
        return [*{*self._bins, *self._buffers}]

    def tokens_per_second(self) -> float | None:
        """Mean of the whole run without pauses; None if no times are known."""
        stretches = self.stretches(self.environments)
        seconds = sum(stretch.end - stretch.start for stretch in stretches)
        return sum(stretch.generated for stretch in stretches) / seconds if seconds else None

    def _stretch(self, bins: Mapping[int, Floats], first: int, last: int, step: int) -> Stretch:
        assert self._origin is not None
        bounds = np.append(np.arange(first, last, step), last)
        seconds = np.diff(bounds) * self._width
        indexes = np.array(sorted(bins), dtype=np.int64)
        columns = np.array([bins[int(index)] for index in indexes]).reshape(-1, _COLUMNS)
        before = np.searchsorted(indexes, bounds)
        sums = np.vstack([np.zeros(_COLUMNS), np.cumsum(columns, axis=0)])[before]
        moments = bounds * self._width

        def mean(slopes: int, moment_sums: int) -> Floats:
            # Rounding may leave a little below zero.
            return np.maximum(np.diff(moments * sums[:, slopes] - sums[:, moment_sums]) / seconds, 0.0)

        return Stretch(
            start=self._origin + first * self._width,
            end=self._origin + last * self._width,
            seconds=step * self._width,
            turns=np.diff(sums[:, _TURNS]) / seconds,
            tokens=mean(_TOKENS, _TOKEN_MOMENTS),
            busy=mean(_BUSY, _BUSY_MOMENTS),
            stepping=mean(_STEPPING, _STEPPING_MOMENTS),
        )

    def _flush(self, environment: str) -> None:
        buffer = self._buffers.pop(environment)
        ended, generation, stepping, tokens = np.frombuffer(buffer, dtype=np.float64).reshape(-1, 4).T
        generated = ended - stepping
        began = generated - np.maximum(generation, _SHORTEST)
        rate = tokens / (generated - began)
        bins = self._bins.setdefault(environment, {})
        one, none = np.ones(len(ended)), np.zeros(len(ended))
        self._count(bins, began, rate, one, none, 0)
        self._count(bins, generated, -rate, none, one, 0)
        self._count(bins, ended, none, -one, -one, 1)
        while len(bins) > _MOST_BINS:
            self._widen()
            bins = self._bins[environment]

    def _count(
        self, bins: dict[int, Floats], moments: Floats, tokens: Floats, busy: Floats, stepping: Floats, turns: int
    ) -> None:
        indexes: Integers = np.floor(moments / self._width).astype(np.int64)
        places, of = np.unique(indexes, return_inverse=True)
        columns = (
            *(column for slopes in (tokens, busy, stepping) for column in (slopes, slopes * moments)),
            np.full(len(moments), turns),
        )
        sums = np.stack([np.bincount(of, weights=column, minlength=len(places)) for column in columns], axis=1)
        for place, values in zip(places.tolist(), sums, strict=True):
            bins[place] = bins[place] + values if place in bins else values

    def _widen(self) -> None:
        self._width *= 2
        for name, bins in self._bins.items():
            wider: dict[int, Floats] = {}
            for index, values in bins.items():
                wider[index // 2] = wider[index // 2] + values if index // 2 in wider else values
            self._bins[name] = wider


def _sum(parts: Any) -> dict[int, Floats]:
    found: dict[int, Floats] = {}
    for bins in parts:
        for index, values in bins.items():
            found[index] = found[index] + values if index in found else values
    return found


def _active(bins: Mapping[int, Floats]) -> list[tuple[int, int]]:
    """Ranges of bins, end exclusive, in which trajectories were busy, without the long pauses between them."""
    indexes = sorted(bins)
    ranges: list[list[int]] = []
    busy = 0.0
    for index in indexes:
        # Half a trajectory: rounding leaves a little.
        if ranges and (busy > 0.5 or ranges[-1][1] == index):
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
        busy += bins[index][_BUSY]
    total = sum(last - first for first, last in ranges)
    # A pause is left out if it would take a tenth of the chart.
    pauses = [(after[0] - before[1], after[0]) for before, after in pairwise(ranges)]
    long = {start for length, start in sorted(pauses)[-_MOST_PAUSES:] if length > max(1, total // 10)}
    joined = [ranges[0]]
    for first, last in ranges[1:]:
        if first in long:
            joined.append([first, last])
        else:
            joined[-1][1] = last
    return [(first, last) for first, last in joined]
