"""Statistics of trajectories: by group, over repeats, and of k tries. Formulas are in docs/reference/aggregates.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_EXACT_BINOMIALS = 1024
_SERIES_FREEDOM = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Statistics of values in groups; every array has one entry per group.

    Attributes:
        count: Number of finite values.
        nonfinite: Number of NaN and infinite values, which all other statistics exclude.
        mean, minimum, p25, median, p75, maximum: NaN for a group without values.
        std: Sample standard deviation (divisor n - 1); NaN for a group with fewer than two values.
    """

    count: Integers
    nonfinite: Integers
    mean: Floats
    std: Floats
    minimum: Floats
    p25: Floats
    median: Floats
    p75: Floats
    maximum: Floats


def describe_groups(values: Floats, groups: Integers, group_count: int) -> GroupStatistics:
    """Statistics of each group, independent of the order of the values.

    Args:
        values: Any floats.
        groups: Group of each value, from 0 to `group_count` - 1; groups may be empty.
    """
    finite = np.isfinite(values)
    nonfinite = np.bincount(groups[~finite], minlength=group_count)
    # Adding 0 turns -0 into 0, which sorts as its equal.
    values, groups = values[finite] + 0.0, groups[finite]
    # Sorted, so that sums do not depend on the order of the input.
    order = np.lexsort((values, groups))
    values, groups = values[order], groups[order]
    count = np.bincount(groups, minlength=group_count)
    filled = count > 0
    sizes = count[filled]
    starts = np.cumsum(sizes) - sizes

    def spread(of_filled: Floats) -> Floats:
        found = np.full(group_count, np.nan)
        found[filled] = of_filled
        return found

    def quantile(part: float) -> Floats:
        place = (sizes - 1) * part
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, sizes - 1)
        lower, upper = values[starts + below], values[starts + above]
        found: Floats = lower + (upper - lower) * (place - below)
        return found

    with np.errstate(all="ignore"):
        if not sizes.size:
            nothing = np.full(group_count, np.nan)
            mean = std = minimum = p25 = median = p75 = maximum = nothing
        else:
            low, high = values[starts], values[starts + sizes - 1]
            means = np.clip(_sums(values, starts, sizes) / sizes, low, high)
            squares = np.add.reduceat((values - np.repeat(means, sizes)) ** 2, starts)
            deviation = np.where(low == high, 0.0, np.sqrt(squares / (sizes - 1)))
            mean, minimum, maximum = spread(means), spread(low), spread(high)
            std = spread(np.where(sizes > 1, deviation, np.nan))
            p25, median, p75 = spread(quantile(0.25)), spread(quantile(0.5)), spread(quantile(0.75))
    return GroupStatistics(
        count=count,
        nonfinite=nonfinite,
        mean=mean,
        std=std,
        minimum=minimum,
        p25=p25,
        median=median,
        p75=p75,
        maximum=maximum,
    )


def _sums(values: Floats, starts: Integers, sizes: Integers) -> Floats:
    """Sum of each group, rounded once."""
    if len(sizes) == len(values):
        return values
    listed = values.tolist()
    sums = (math.fsum(listed[start:end]) for start, end in zip(starts, starts + sizes, strict=True))
    try:
        return np.fromiter(sums, dtype=np.float64, count=len(sizes))
    except OverflowError:
        found: Floats = np.add.reduceat(values, starts)
        return found


def describe(values: Floats) -> GroupStatistics:
    """Statistics of all values as one group."""
    return describe_groups(values, np.zeros(len(values), dtype=np.int64), 1)


class RunMean(NamedTuple):
    """Mean over runs, with its uncertainty; fields are None if there are too few runs.

    Attributes:
        std: Standard deviation of the runs' values (divisor n - 1).
        standard_error: `std / sqrt(runs)`.
        low, high: 95 % confidence interval: by Student's t with `runs - 1` degrees of freedom, or Wilson's for a share.
    """

    runs: int
    mean: float | None
    std: float | None
    standard_error: float | None
    low: float | None
    high: float | None


def run_mean(values: Sequence[float]) -> RunMean:
    """Mean of one finite value per run."""
    found = describe(np.asarray(values, dtype=np.float64))
    runs = int(found.count[0])
    if runs == 0:
        return RunMean(0, None, None, None, None, None)
    mean = float(found.mean[0])
    if runs == 1:
        return RunMean(1, mean, None, None, None, None)
    std = float(found.std[0])
    error = std / math.sqrt(runs)
    reach = t_quantile(0.975, runs - 1) * error
    return RunMean(runs, mean, std, error, mean - reach, mean + reach)


def run_share(values: Sequence[float], trials: int, *, whole: float = 1.0) -> RunMean:
    """Mean of one share of successes per run, from 0 to `whole`; its interval is too.

    The interval takes all trials for independent, which for repeats of the same tasks is at most too wide: tasks that
    differ in difficulty vary less.

    Args:
        trials: Number of trials of all runs together.
    """
    found = run_mean(values)
    if found.mean is None or not trials:
        return found
    low, high = wilson_interval(found.mean / whole, trials)
    return found._replace(low=whole * low, high=whole * high)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a share of successes with 95 % confidence; it lies within 0 and 1.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    Args:
        share: From 0 to 1.
        trials: At least 1.
    """
    square = NormalDist().inv_cdf(0.975) ** 2
    center = (share + square / (2 * trials)) / (1 + square / trials)
    reach = math.sqrt(square * (share * (1 - share) + square / (4 * trials)) / trials) / (1 + square / trials)
    # Rounding must neither leave the range nor exclude the share.
    return max(0.0, min(share, center - reach)), min(1.0, max(share, center + reach))


class Difference(NamedTuple):
    """Difference of two means; fields are None if there are too few values.

    Attributes:
        size: Number of pairs, or of the values of the smaller side.
        first, second: The means.
        difference: `second - first`.
        low, high: 95 % confidence interval of the difference.
    """

    size: int
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None


def paired_difference(first: Floats, second: Floats) -> Difference:
    """Difference of the means of paired values, with Student's interval of the pairs' differences.

    Args:
        first, second: Finite values; equal positions are pairs.
    """
    of_pairs = run_mean((second - first).tolist())
    one, two = run_mean(first.tolist()), run_mean(second.tolist())
    return Difference(of_pairs.runs, one.mean, two.mean, of_pairs.mean, of_pairs.low, of_pairs.high)


def unpaired_difference(first: Floats, second: Floats) -> Difference:
    """Difference of the means of independent finite values, with Welch's interval.

    Source of its degrees of freedom: Welch, "The generalization of 'Student's' problem when several different
    population variances are involved", Biometrika 34 (1947).
    """
    one, two = run_mean(first.tolist()), run_mean(second.tolist())
    size = min(one.runs, two.runs)
    if one.mean is None or two.mean is None:
        return Difference(size, one.mean, two.mean, None, None, None)
    difference = two.mean - one.mean
    if one.standard_error is None or two.standard_error is None:
        return Difference(size, one.mean, two.mean, difference, None, None)
    variance = one.standard_error**2 + two.standard_error**2
    parts = one.standard_error**4 / (one.runs - 1) + two.standard_error**4 / (two.runs - 1)
    freedom = max(1, int(variance**2 / parts)) if parts > 0 else 1
    reach = t_quantile(0.975, freedom) * math.sqrt(variance)
    return Difference(size, one.mean, two.mean, difference, difference - reach, difference + reach)


class RankTest(NamedTuple):
    """Comparison of the ranks of marked values with those of the others of their stratum.

    Attributes:
        z: Standardized sum of the marked values' ranks: above 0 if they are the larger ones.
        marked: Number of marked values in strata that say something.
    """

    z: float
    marked: int


def stratified_ranks(strata: Integers, values: Floats, marked: npt.NDArray[np.bool_]) -> RankTest | None:
    """The stratified rank-sum test of van Elteren, with ties; strata of only marked or only other values say nothing.

    Source: van Elteren, "On the combination of independent two sample tests of Wilcoxon", Bull. Inst. Intern. Statist.
    37 (1960); each stratum of n values has the weight 1 / (n + 1). The variance is that over all permutations.

    Returns:
        None if no stratum says anything.
    """
    order = np.lexsort((values, strata))
    strata, values, marked = strata[order], values[order], marked[order]
    _, first, place, sizes = np.unique(strata, return_index=True, return_inverse=True, return_counts=True)
    # Equal values of a stratum share the mean of their ranks.
    new = np.ones(len(values), dtype=bool)
    new[1:] = (np.diff(strata) != 0) | (np.diff(values) != 0)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(values))
    shared = np.repeat((starts + ends - 1) / 2, ends - starts)
    centered = shared - first[place] - (sizes[place] - 1) / 2
    chosen = np.bincount(place, weights=marked)
    squares = np.bincount(place, weights=centered**2)
    tells = (chosen > 0) & (chosen < sizes) & (squares > 0)
    if not tells.any():
        return None
    n, m = sizes[tells].astype(np.float64), chosen[tells]
    sums = np.bincount(place, weights=centered * marked)[tells]
    variance = m * (n - m) / (n * (n - 1)) * squares[tells]
    z = float((sums / (n + 1)).sum() / math.sqrt((variance / (n + 1) ** 2).sum()))
    return RankTest(z, int(m.sum()))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Probabilities of several tests, so that any is below a only with probability a if nothing is to be found.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979).
    """
    adjusted = [0.0] * len(probabilities)
    highest = 0.0
    for rank, number in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        highest = max(highest, min(1.0, (len(probabilities) - rank) * probabilities[number]))
        adjusted[number] = highest
    return adjusted


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t, to about 12 digits.

    Args:
        probability: Above 0.5 and below 1.
        freedom: Degrees of freedom, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0.5 < probability < 1 or freedom < 1:
        raise ValueError(f"t_quantile: found ({probability}, {freedom}); it takes 0.5 < probability < 1, freedom >= 1")
    if freedom > _SERIES_FREEDOM:
        return _t_from_normal(NormalDist().inv_cdf(probability), freedom)
    # Bisection on the angle atan(t / sqrt(freedom)), which is bounded by 0 and pi / 2.
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if _t_distribution(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _t_distribution(angle: float, freedom: int) -> float:
    """Student's distribution function at tan(angle) * sqrt(freedom): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = sine * cosine if odd else sine
    total = 0.0
    for number in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (number + 1) / (number + 2)
    return 0.5 + ((angle + total) / math.pi if odd else total / 2)


def _t_from_normal(z: float, freedom: int) -> float:
    """The quantile as a series in 1 / freedom: Abramowitz and Stegun, 26.7.5."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def tries(samples: int) -> list[int]:
    """The reported numbers of tries: the powers of two up to `samples`, and `samples` itself."""
    return sorted({*(1 << bit for bit in range(samples.bit_length())), samples}) if samples > 0 else []


@lru_cache(maxsize=65536)
def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, include a success; 0 to 1.

    Args:
        k: From 1 to `samples`.
    """
    if samples > _EXACT_BINOMIALS:
        return min(1.0, math.fsum(_best_weights(samples, k)[samples - successes :]))
    ways = math.comb(samples, k)
    chance: float = (ways - math.comb(samples - successes, k)) / ways
    return chance


def best_of_k(ascending: Floats, k: int) -> float:
    """Expected maximum of k values drawn without replacement.

    Args:
        ascending: The values in ascending order, finite.
        k: From 1 to their number.
    """
    return math.fsum((_best_weights(len(ascending), k) * ascending).tolist())


@lru_cache(maxsize=256)
def _best_weights(samples: int, k: int) -> Floats:
    """Probabilities that the i-th smallest sample is the largest of k: C(i - 1, k - 1) / C(samples, k)."""
    above = np.arange(samples, 1, -1, dtype=np.float64)
    ratios = np.concatenate([[k / samples], np.maximum(above - k, 0.0) / (above - 1)])
    weights = np.cumprod(ratios)[::-1].copy()
    weights.flags.writeable = False
    return weights


def majority_at_k(answers: Sequence[int], scores: Sequence[float], k: int) -> float:
    """Mean score of majority votes of k samples, over disjoint runs of k consecutive samples.

    The most frequent answer of a run wins, with the mean of its samples' scores; of tied answers the mean counts.
    Samples without an answer do not vote; a run without votes scores 0. Samples after the last complete run are
    ignored.

    Args:
        answers: One per sample, 0 for no answer; equal numbers are equal answers.
        scores: One per sample, finite.
        k: From 1 to the number of samples.
    """
    runs = len(answers) // k
    return math.fsum(_vote(answers[k * run : k * run + k], scores[k * run : k * run + k]) for run in range(runs)) / runs


def _vote(answers: Sequence[int], scores: Sequence[float]) -> float:
    ballots: dict[int, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer:
            ballots.setdefault(answer, []).append(score)
    if not ballots:
        return 0.0
    most = max(map(len, ballots.values()))
    winners = [math.fsum(votes) / most for votes in ballots.values() if len(votes) == most]
    return math.fsum(winners) / len(winners)
