"""What sessions spend of a replica's time; no server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.serving.arrivals import ACTIVE_SECONDS
from kuberoll_workers.serving.spending import LEAST_SHARE, SAVED_SECONDS, Spending


def test_one_that_is_alone_never_waits() -> None:
    spending = Spending()
    for number in range(1_000):
        assert spending.delay("one", number * 1e-3) == 0
        spending.spend("one", 1.0, number * 1e-3)
    # What it has spent alone is not held against it.
    spending.spend("other", 0.1, 1.0)
    assert spending.delay("one", 1.0) == 0


def spent_by_one_that_never_stops(others: int, cost: float, seconds: float) -> float:
    """What a session spends beside others that call once a second, seconds."""
    spending, now, total = Spending(), 0.0, 0.0
    called = -1.0
    while now < seconds:
        if now - called >= 1.0:
            called = now
            for number in range(others):
                assert spending.delay(f"good {number}", now) == 0
                spending.spend(f"good {number}", 0.01, now)
        delay = spending.delay("bad", now)
        if delay:
            now += max(1e-6, min(delay, called + 1.0 - now))
            continue
        spending.spend("bad", cost, now)
        total += cost
        now += cost / 10
    return total


@pytest.mark.parametrize("others", [20, 100])
@pytest.mark.parametrize("cost", [1e-3, 0.1, 1.0])
def test_one_among_many_spends_a_twentieth_of_the_time(others: int, cost: float) -> None:
    total = spent_by_one_that_never_stops(others, cost, 200.0)
    assert 0.9 * LEAST_SHARE * 200 <= total <= LEAST_SHARE * 200 + SAVED_SECONDS + cost


def test_two_have_half_each() -> None:
    total = spent_by_one_that_never_stops(1, 0.1, 100.0)
    assert 45 <= total <= 50 + SAVED_SECONDS + 0.1


def test_those_that_have_not_called_for_a_while_do_not_count() -> None:
    spending = Spending()
    for number in range(100):
        spending.spend(str(number), 0.1, 0.0)
    # It owes for as long as it takes, and hides nobody that came after it.
    spending.spend("late", 0.1, 1.0)
    spending.spend("0", 50.0, 0.0)
    assert spending.share() == LEAST_SHARE
    assert spending.delay("late", 1.0 + ACTIVE_SECONDS) == 0
    assert spending.share() == 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.floats(0, 2, exclude_min=True), st.floats(0, 5)),
        min_size=1,
        max_size=100,
    )
)
def test_who_waits_as_long_as_it_was_told_may_spend(steps: list[tuple[str, float, float]]) -> None:
    spending, now = Spending(), 0.0
    for session, cost, pause in steps:
        now += pause
        for _ in range(10):
            delay = spending.delay(session, now)
            # A second that a session saves is not more than it has; one call may cost more.
            assert 0 <= delay <= 100 * 2 / LEAST_SHARE
            if not delay:
                break
            now += delay + 1e-9
        assert spending.delay(session, now) == 0
        spending.spend(session, cost, now)
