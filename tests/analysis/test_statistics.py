"""The statistics against the standard library, numpy, and counting all subsets."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis import statistics as statistics_module
from kuberoll_workers.analysis.statistics import (
    best_of_k,
    describe,
    describe_groups,
    majority_at_k,
    pass_at_k,
    run_mean,
    t_quantile,
    tries,
    wilson_interval,
)

NUMBERS = st.floats(min_value=-1e6, max_value=1e6)


def majority(samples: Sequence[tuple[int, float]], k: int) -> float:
    return majority_at_k([answer for answer, _ in samples], [score for _, score in samples], k)


@given(st.lists(st.tuples(st.integers(0, 5), NUMBERS | st.sampled_from([math.nan, math.inf, -math.inf]))))
def test_statistics_of_groups(pairs: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in pairs], dtype=np.int64)
    found = describe_groups(np.array([value for _, value in pairs], dtype=np.float64), groups, 7)
    for group in range(7):
        all_values = [value for number, value in pairs if number == group]
        values = [value for value in all_values if math.isfinite(value)]
        assert found.count[group] == len(values)
        assert found.nonfinite[group] == len(all_values) - len(values)
        if not values:
            assert np.isnan([found.mean[group], found.std[group], found.median[group], found.minimum[group]]).all()
            continue
        assert found.mean[group] == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-9)
        assert found.median[group] == pytest.approx(statistics.median(values), rel=1e-12, abs=1e-9)
        assert (found.minimum[group], found.maximum[group]) == (min(values), max(values))
        assert found.p25[group] == pytest.approx(np.percentile(values, 25), rel=1e-12, abs=1e-9)
        assert found.p75[group] == pytest.approx(np.percentile(values, 75), rel=1e-12, abs=1e-9)
        if len(values) == 1:
            assert math.isnan(found.std[group])
        else:
            assert found.std[group] == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-6)


@given(st.lists(NUMBERS, min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_values_changes_no_bit(values: list[float], shuffle: random.Random) -> None:
    other = list(values)
    shuffle.shuffle(other)
    one, two = describe(np.array(values)), describe(np.array(other))
    for name in ("mean", "std", "median", "p25", "p75"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()


def test_equal_values_have_exactly_their_mean_and_no_deviation() -> None:
    found = describe(np.full(10, 0.1))
    assert (found.mean[0], found.std[0], found.median[0]) == (0.1, 0.0, 0.1)


def test_means_of_numbers_whose_sum_is_no_float_stay_between_them() -> None:
    huge = 1.5e308
    found = describe_groups(np.array([huge, huge, 1.0, 3.0, -huge, -huge, -huge]), np.array([0, 0, 1, 1, 2, 2, 2]), 3)
    assert found.mean.tolist() == [huge, 2.0, -huge]
    assert found.median.tolist() == [huge, 2.0, -huge]


def test_deviations_known_from_elsewhere() -> None:
    rewards = np.array([0.0, 1.0] * 3)
    groups = describe_groups(rewards, np.array([0, 0, 1, 1, 2, 2]), 3)
    assert groups.std.tolist() == [0.7071067811865476] * 3
    assert describe(rewards).std[0] == 0.5477225575051661


# Of tables; the first two have closed forms, tan(0.475 pi) and 0.95 / sqrt(0.04875).
@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, math.tan(0.475 * math.pi)),
        (2, 0.95 / math.sqrt(2 * 0.975 * 0.025)),
        (3, 3.182446305284263),
        (4, 2.7764451051977987),
        (5, 2.5705818356363146),
        (10, 2.2281388519649385),
        (30, 2.0422724563012373),
        (100, 1.9839715185235552),
        (1000, 1.9623390808264078),
        (10**9, 1.959963986912),
    ],
)
def test_t_quantiles_of_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-9)


@given(st.floats(0.51, 0.999), st.integers(1, 3000))
def test_t_quantiles_leave_the_probability_below_them(probability: float, freedom: int) -> None:
    """Against the density, integrated by Simpson's rule over the angle."""
    reach = math.atan(t_quantile(probability, freedom) / math.sqrt(freedom))
    angles = np.linspace(0, reach, 20001)
    density = np.cos(angles) ** (freedom - 1)
    steps = reach / 20000 / 3
    area = steps * (density[0] + density[-1] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum())
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    assert 0.5 + scale * area == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize("probability", [0.75, 0.975, 0.999])
@pytest.mark.parametrize("freedom", [200, 500, 1000])
def test_the_series_continues_the_exact_quantiles(
    monkeypatch: pytest.MonkeyPatch, probability: float, freedom: int
) -> None:
    exact = t_quantile(probability, freedom)
    monkeypatch.setattr(statistics_module, "_SERIES_FREEDOM", 100)
    t_quantile.cache_clear()
    assert t_quantile(probability, freedom) == pytest.approx(exact, abs=1e-9)
    t_quantile.cache_clear()


@pytest.mark.parametrize(("probability", "freedom"), [(0.5, 3), (1.0, 3), (0.975, 0)])
def test_t_quantiles_out_of_range_are_refused(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(probability, freedom)


def test_the_interval_of_runs() -> None:
    found = run_mean([1.0, 2.0, 3.0, 4.0])
    assert (found.runs, found.mean) == (4, 2.5)
    assert found.std == pytest.approx(statistics.stdev([1, 2, 3, 4]))
    assert found.standard_error == pytest.approx(0.6454972243679028)
    assert found.low == pytest.approx(0.445739743239121)
    assert found.high == pytest.approx(4.554260256760879)
    assert run_mean([2.0]) == (1, 2.0, None, None, None, None)
    assert run_mean([]) == (0, None, None, None, None, None)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Agresti and Coull, "Approximate is better than exact", 1998, and Newcombe, "Two-sided confidence intervals", 1998.
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_s_interval_as_published(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10**6).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_s_interval_has_the_share_and_stays_a_share(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson_interval(successes / trials, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
    # The same shares of the other outcome.
    assert wilson_interval(1 - successes / trials, trials) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    more = wilson_interval(successes / trials, 4 * trials)
    assert more[1] - more[0] < high - low
    # Means of several shares, which rounding takes beyond them.
    assert 0 < wilson_interval(math.nextafter(1.0, 2.0), trials)[0] < wilson_interval(1.0 + 1e-15, trials)[1] == 1.0
    assert wilson_interval(-1e-17, trials)[0] == 0.0


def test_numbers_of_tries() -> None:
    assert [tries(samples) for samples in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_counts_subsets(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == sum(map(any, subsets)) / len(subsets)


@given(st.lists(NUMBERS, min_size=1, max_size=9), st.data())
def test_best_of_k_counts_subsets(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    best = [max(subset) for subset in itertools.combinations(values, k)]
    assert best_of_k(np.array(sorted(values)), k) == pytest.approx(statistics.fmean(best), rel=1e-9, abs=1e-6)


@given(st.integers(1025, 5000), st.data())
def test_pass_at_k_of_many_samples(samples: int, data: st.DataObject) -> None:
    successes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    exact = 1 - Fraction(math.comb(samples - successes, k), math.comb(samples, k))
    assert pass_at_k(samples, successes, k) == pytest.approx(float(exact), rel=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12), st.data())
def test_majorities_are_counted_by_hand(samples: list[tuple[int, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))

    def vote(run: list[tuple[int, float]]) -> Fraction:
        ranked = Counter(answer for answer, _ in run if answer).most_common()
        first = [answer for answer, count in ranked if count == ranked[0][1]]
        means = [
            Fraction(sum(Fraction(score) for given, score in run if given == answer), ranked[0][1]) for answer in first
        ]
        return sum(means, Fraction()) / len(means) if means else Fraction()

    runs = [samples[start : start + k] for start in range(0, len(samples) - k + 1, k)]
    expected = sum(map(vote, runs), Fraction()) / len(runs)
    assert majority(samples, k) == pytest.approx(float(expected))


def test_votes_on_average_do_not_depend_on_k_drawn_from_where() -> None:
    """Over all orders of the samples the mean is that over all subsets: the estimate is unbiased."""
    samples = [(1, 1.0), (1, 1.0), (2, 0.0), (0, 0.0), (3, 0.5)]
    for k in range(1, 6):
        orders = [majority(order, k) for order in itertools.permutations(samples)]
        subsets = [majority(drawn, k) for drawn in itertools.combinations(samples, k)]
        assert statistics.fmean(orders) == pytest.approx(statistics.fmean(subsets))
