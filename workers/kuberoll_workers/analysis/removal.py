"""What failures, limits and staleness removed from a run, and whether long trajectories were removed more often.

A removed trajectory is known as far as it got: its length is a lower bound. docs/explanation/missing-trajectories.md
has what follows from that, and what cannot be known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kuberoll_workers.analysis.statistics import (
    Difference,
    Floats,
    Integers,
    RunMean,
    holm,
    run_mean,
    stratified_ranks,
    unpaired_difference,
)
from kuberoll_workers.data.stop_reasons import ENDINGS

Verdict = Literal["longer", "exposed", "none", "unclear"]
"""What the tests say of an environment. `longer`: long trajectories were removed more often. `exposed`: the kept
rewards are biased if what removed trajectories struck whoever was running. `none`: there is no sign of either.
`unclear`: nobody can tell from what is stored."""

LEAST: Final = 10
"""Ranks of fewer removed trajectories, or tasks, say nothing."""
LEAST_OF_SHIFT: Final = 20
"""That nothing is seen in fewer, in trajectories as in tasks, says nothing either."""
_LEVEL: Final = 0.05
_MOST_TURNS: Final = 1 << 20
_REMEDIES: Final = {
    "TurnDeadline": "raise timeouts.turnSeconds, or let maxTurns or maxTokens end them, which is scored",
    "TrajectoryDeadline": "raise timeouts.trajectorySeconds, or let maxTurns or maxTokens end them, which is scored",
    **{name: ending.remedy for name, ending in ENDINGS.items() if ending.remedy},
}
"""What to do about reasons that remove the slow."""


class Removed(NamedTuple):
    """A trajectory that failed permanently or was dropped.

    Attributes:
        task: Its task's index.
        reason, kind: The reason of its failure, and whose doing that is; or why it was dropped, and `dropped`.
        turns: The turn that it had reached: at least so many it would have had. 0: it was not yet to respond.
        tokens: Generated tokens of its complete responses.
        with_group: It was removed because its group was.
    """

    task: int
    reason: str
    kind: str
    turns: int
    tokens: int
    with_group: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Trajectories with their lengths, each array [trajectories].

    Attributes:
        tasks: Index of each one's task.
    """

    tasks: Integers
    turns: Integers
    tokens: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What was removed from an environment's trajectories.

    Attributes:
        kept: Number of finished trajectories that are kept.
        removed: Number of those that failed or were dropped, without those of filtered groups.
        reasons: For each reason its `kind`, `count`, and means of the `turns` and `tokens` that they reached.
        turns, tokens: By turns and by tokens, `reached` such a length and `removed` at it.
        tests: Probability of a result like this, by test, if what is removed does not depend on length: `turns` and
            `tokens`, removed and kept ones of the same task; `groups`, tasks of which nothing is kept and others;
            `shift`, the mean of `shift` is 0. Tests without enough to compare are left out.
        adjusted: The same for all tests of a run together (Holm).
        midway: True if removed ones were surely shorter than kept ones of their task: they did not fail at their ends.
        shift: Mean over the tasks of by how much the kept rewards are too high, if any trajectory that has reached a
            turn was removed in it with the same probability.
        lowest, highest: Bounds of the mean reward, had all been kept; None without a finite reward.
        short_groups: Mean reward of tasks of which nothing (`first`) and of which something (`second`) was removed.
    """

    kept: int
    removed: int
    reasons: dict[str, dict[str, Any]]
    turns: list[dict[str, int]]
    tokens: list[dict[str, int]]
    tests: dict[str, float]
    midway: bool
    shift: RunMean
    lowest: float | None
    highest: float | None
    short_groups: Difference
    adjusted: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the removed ones."""
        return self.removed / (self.removed + self.kept)

    @property
    def verdict(self) -> Verdict:
        """What the tests say."""
        if any(self.adjusted.get(name, 1.0) < _LEVEL for name in ("turns", "tokens", "groups")):
            return "longer"
        if (shift := self.adjusted.get("shift")) is None:
            return "unclear"
        if shift >= _LEVEL:
            return "none"
        return "exposed" if self.midway else "unclear"

    def as_json(self) -> dict[str, Any]:
        """Form in which it is stored."""
        return {
            "removed": self.removed,
            "share": self.share,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "turns": self.turns,
            "tokens": self.tokens,
            "tests": self.adjusted,
            "shift": self.shift._asdict(),
            "reward_if_all_kept": {"low": self.lowest, "high": self.highest},
            "short_groups": self.short_groups._asdict(),
        }

    def warning(self, environment: str) -> str | None:
        """A line for whoever has run it; None: nothing is known to be biased."""
        lost = f"{environment}: {self.removed} of {self.removed + self.kept} trajectories were removed"
        often = max(self.reasons, key=lambda name: self.reasons[name]["count"])
        by_time = f", which removes slow ones: {_REMEDIES[often]}" if often in _REMEDIES else ": see `kuberoll why`"
        remedy = f"most of them by {often}{by_time}"
        if self.verdict == "longer":
            chance = min(self.adjusted.get(name, 1.0) for name in ("turns", "tokens", "groups"))
            shown = "p < 0.001" if chance < 0.001 else f"p = {chance:.3f}"
            return f"{lost}, and longer ones more often ({shown}), so that what is kept is biased; {remedy}"
        if self.verdict == "exposed":
            mean, low, high = (f"{value:+.3f}" for value in (self.shift.mean, self.shift.low, self.shift.high))
            return (
                f"{lost} on their way: if that struck whoever was running, the kept rewards of a prompt are off by "
                f"{mean} ({low} to {high}); {remedy}"
            )
        return None


def removal_of(kept: Lengths, rewards: Floats, removed: Sequence[Removed]) -> Removal | None:
    """Compare the removed with the kept trajectories of an environment; None if none was removed.

    Args:
        rewards: Of the kept ones; those that are not finite are left out.
    """
    if not removed:
        return None
    lost = Lengths(
        tasks=np.array([item.task for item in removed], dtype=np.int64),
        turns=np.array([item.turns for item in removed], dtype=np.int64),
        tokens=np.array([item.tokens for item in removed], dtype=np.float64),
    )
    tests, midway = _length_tests(kept, lost)
    if (chance := _group_test(kept, lost)) is not None:
        tests["groups"] = chance
    struck = np.array([not item.with_group for item in removed])
    shift = _shift(kept, rewards, lost, struck)
    if min(shift.runs, struck.sum()) >= LEAST_OF_SHIFT:
        mean, error = abs(shift.mean or 0.0), shift.standard_error
        tests["shift"] = 2 * NormalDist().cdf(-mean / error) if error else float(mean == 0)
    finite = rewards[np.isfinite(rewards)]
    lowest = highest = None
    if finite.size:
        total, count = math.fsum(finite.tolist()), len(finite) + len(removed)
        lowest = (total + len(removed) * float(finite.min())) / count
        highest = (total + len(removed) * float(finite.max())) / count
    return Removal(
        kept=len(kept.tasks),
        removed=len(removed),
        reasons=_reasons(removed),
        turns=list(_by_length(kept.turns, lost.turns, first=1)),
        tokens=list(_by_length(kept.tokens, lost.tokens, first=128)),
        tests=tests,
        midway=midway,
        shift=shift,
        lowest=lowest,
        highest=highest,
        short_groups=_short_groups(kept.tasks, rewards, lost.tasks),
    )


def adjust(removals: Mapping[str, Removal]) -> dict[str, Removal]:
    """The same, with the probabilities of all tests of a run adjusted for their number."""
    tests = [(key, name, chance) for key, item in removals.items() for name, chance in item.tests.items()]
    adjusted: dict[str, dict[str, float]] = {key: {} for key in removals}
    for (key, name, _), chance in zip(tests, holm([chance for _, _, chance in tests]), strict=True):
        adjusted[key][name] = chance
    return {key: replace(item, adjusted=adjusted[key]) for key, item in removals.items()}


def _length_tests(kept: Lengths, lost: Lengths) -> tuple[dict[str, float], bool]:
    """One-sided rank tests within tasks, and whether removed ones were surely shorter.

    If what is removed does not depend on length, removed ones would have become as long as kept ones, and are at most
    as long when they are removed, wherever that is. So they are longer by chance only.
    """
    # Other tasks than those that lost something say nothing.
    of = np.isin(kept.tasks, lost.tasks)
    tasks = np.concatenate([kept.tasks[of], lost.tasks])
    marked = np.arange(len(tasks)) >= of.sum()
    tests, midway = {}, False
    for name, own, other in (("turns", kept.turns, lost.turns), ("tokens", kept.tokens, lost.tokens)):
        found = stratified_ranks(tasks, np.concatenate([own[of], other]).astype(np.float64), marked)
        if found is not None and found.marked >= LEAST:
            tests[name] = NormalDist().cdf(-found.z)
            midway = midway or (name == "turns" and NormalDist().cdf(found.z) < _LEVEL / 2)
    return tests, midway


def _group_test(kept: Lengths, lost: Lengths) -> float | None:
    """The same between tasks of which nothing is kept and others, by the means of their turns."""
    ours, mine = _means(kept.tasks, kept.turns)
    theirs, others = _means(lost.tasks, lost.turns)
    others = others[~np.isin(theirs, ours)]
    if min(len(mine), len(others)) < LEAST:
        return None
    values = np.concatenate([mine, others])
    found = stratified_ranks(np.zeros(len(values), dtype=np.int64), values, np.arange(len(values)) >= len(mine))
    return None if found is None else NormalDist().cdf(-found.z)


def _shift(kept: Lengths, rewards: Floats, lost: Lengths, struck: npt.NDArray[np.bool_]) -> RunMean:
    """`Removal.shift`: the mean of each task less that weighted by the inverse probability of being kept.

    The probability is the product over the turns of one less the share of those that have reached it and were removed
    in it (Kaplan and Meier). Nothing is known of lengths that no kept trajectory has, nor of tasks with one reward.
    """
    if not len(kept.turns) or kept.turns.min() == kept.turns.max():
        return run_mean([])
    top = min(int(kept.turns.max()), _MOST_TURNS)
    own, others = np.minimum(kept.turns, top), np.minimum(lost.turns, top + 1)
    ended = np.bincount(own, minlength=top + 2) + np.bincount(others, minlength=top + 2)
    reached = np.cumsum(ended[::-1])[::-1]
    removed = np.bincount(others[struck], minlength=top + 2)
    survives = np.cumprod(1 - removed[: top + 1] / reached[: top + 1])
    weights = 1 / survives[own]
    finite = np.isfinite(rewards)
    _, place, counts = np.unique(kept.tasks[finite], return_inverse=True, return_counts=True)
    rewards, weights = rewards[finite], weights[finite]
    plain = np.bincount(place, weights=rewards) / counts
    weighted = np.bincount(place, weights=rewards * weights) / np.bincount(place, weights=weights)
    # Sums of different rounding errors are no shift.
    return run_mean(np.round((plain - weighted)[counts > 1], 12).tolist())


def _means(tasks: Integers, values: Any) -> tuple[Integers, Floats]:
    """Distinct tasks, and the mean of the values of each."""
    found, place, counts = np.unique(tasks, return_inverse=True, return_counts=True)
    return found, np.bincount(place, weights=values) / counts


def _short_groups(tasks: Integers, rewards: Floats, lost: Integers) -> Difference:
    finite = np.isfinite(rewards)
    found, means = _means(tasks[finite], rewards[finite])
    short = np.isin(found, lost)
    return unpaired_difference(means[~short], means[short])


def _reasons(removed: Sequence[Removed]) -> dict[str, dict[str, Any]]:
    by_reason: dict[str, list[Removed]] = {}
    for item in removed:
        by_reason.setdefault(item.reason, []).append(item)
    return {
        reason: {
            "kind": lot[0].kind,
            "count": len(lot),
            "turns": sum(item.turns for item in lot) / len(lot),
            "tokens": sum(item.tokens for item in lot) / len(lot),
        }
        for reason, lot in sorted(by_reason.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    }


def _by_length(kept: Any, lost: Any, *, first: int) -> Iterator[dict[str, int]]:
    """How many reached each range of lengths and were removed in it: 0, up to `first`, and powers of two of it."""
    low, high = 0, 0
    while reached := int((kept >= low).sum() + (lost >= low).sum()):
        removed = int(((lost >= low) & (lost <= high)).sum())
        yield {"from": low, "to": high, "reached": reached, "removed": removed}
        low, high = high + 1, 2 * high or first
