"""Outages of a policy: when they begin, what they are called, when they end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.outage import PATIENCE_SECONDS, Outage, OutageWatch, Silence


def test_a_replica_that_gets_no_requests_is_an_outage_at_once() -> None:
    watch = OutageWatch()
    assert watch.update(0, usable=["a"]) is None
    watch.record_trouble("a", "refused", 1)
    assert watch.update(1, usable=[]) == Outage("refused", 0)
    watch.record_trouble("a", "no route", 2)
    assert watch.update(4, usable=[]) == Outage("no route", 3)


def test_an_overloaded_replica_is_one_when_it_lasts() -> None:
    watch = OutageWatch()
    watch.record_trouble("a", "503", 0)
    assert watch.update(PATIENCE_SECONDS - 0.1, usable=["a"]) is None
    assert watch.update(PATIENCE_SECONDS, usable=["a"]) == Outage("503", PATIENCE_SECONDS)


def test_one_replica_that_works_is_enough() -> None:
    watch = OutageWatch()
    watch.record_trouble("a", "refused", 0)
    watch.record_trouble("", "no list", 0)
    assert watch.update(100, usable=["b"]) is None


def test_who_answers_that_it_is_busy_is_not_silent() -> None:
    watch = OutageWatch()
    watch.record_trouble("a", "503", 0, busy=True)
    watch.record_trouble("b", "no route", 2, requests=7)
    watch.record_trouble("", "no list", 0)
    watch.record_trouble("b", "refused", 4, requests=0)
    assert watch.silent(2 + PATIENCE_SECONDS - 0.1) == {}
    # The newest reason, of a silence that has one beginning.
    assert watch.silent(2 + PATIENCE_SECONDS) == {"b": Silence("refused", 2, 7)}
    watch.record_trouble("a", "no route", 3)
    assert list(watch.silent(20)) == ["b", "a"]
    watch.keep(["a"])
    assert list(watch.silent(20)) == ["a"]
    watch.record_answer("a")
    assert watch.silent(20) == {}
    assert watch.update(20, usable=[]) == Outage("no route", 20)


def test_health_without_answers_ends_an_outage_only_if_it_lasts() -> None:
    watch = OutageWatch()
    for second in range(0, 60, 2):
        watch.record_trouble("a", "500", second)
        assert watch.update(second, usable=[]) == Outage("500", second)
        watch.record_recovery("a")
        assert watch.update(second + 1, usable=["a"]) == Outage("500", second + 1)
    assert watch.last(60) == Outage("500", 60)
    assert watch.update(59 + PATIENCE_SECONDS, usable=["a"]) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 20), st.sampled_from(["trouble", "recovery", "answer"]), st.sampled_from("ab"))),
    st.sets(st.sampled_from("ab")),
)
def test_an_outage_needs_a_trouble_and_ends_with_an_answer(
    steps: list[tuple[float, str, str]], usable: set[str]
) -> None:
    watch, now = OutageWatch(), 0.0
    troubled: set[str] = set()
    for seconds, what, name in steps:
        now += seconds
        if what == "trouble":
            watch.record_trouble(name, "x", now)
            troubled.add(name)
        else:
            (watch.record_recovery if what == "recovery" else watch.record_answer)(name)
            troubled.discard(name)
        before = watch.last(now)
        outage = watch.update(now, usable=usable)
        assert outage == watch.last(now)
        if before is None:
            assert outage is None or (troubled and not usable - troubled)
        if what == "answer" and name in usable:
            assert outage is None
