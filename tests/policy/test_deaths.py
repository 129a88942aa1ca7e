"""Who is to blame for the deaths of replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.routing.deaths import MOST_DEATHS, REMEMBERED_SECONDS, SUSPICIOUS_DEATHS, DeathLog
from kuberoll_workers.policy.routing.sessions import Session


def sessions(count: int) -> list[Session]:
    return [Session(str(number)) for number in range(count)]


def test_where_replicas_die_with_it_only_two_deaths_are_enough() -> None:
    poison, other = sessions(2)
    log = DeathLog()
    log.record("replica-0", [poison, other], 0.0)
    log.record("replica-1", [poison], 10.0)
    assert log.needed(poison, 10.0) == SUSPICIOUS_DEATHS
    assert log.needed(other, 10.0) == SUSPICIOUS_DEATHS + 1


def test_each_replica_that_died_without_it_asks_for_one_more_death() -> None:
    [innocent] = sessions(1)
    log = DeathLog()
    for number in range(6):
        assert log.needed(innocent, 0.0) == min(MOST_DEATHS, SUSPICIOUS_DEATHS + number)
        log.record(f"replica-{number}", [], 0.0)


def test_a_replica_that_comes_back_and_dies_again_counts_once() -> None:
    poison, other = sessions(2)
    log = DeathLog()
    for at in range(3):
        log.record("replica-0", [other], float(at))
    assert log.needed(poison, 3.0) == SUSPICIOUS_DEATHS + 1


def test_a_departure_is_a_death_unless_more_is_known_of_it() -> None:
    poison, other = sessions(2)
    log = DeathLog()
    log.record_departure("replica-0", [], 0.0)
    assert log.needed(poison, 0.0) == SUSPICIOUS_DEATHS + 1
    log.record("replica-0", [poison, other], 1.0)
    log.record_departure("replica-0", [], 2.0)
    assert log.needed(poison, 2.0) == SUSPICIOUS_DEATHS


def test_deaths_of_long_ago_do_not_count() -> None:
    [poison] = sessions(1)
    log = DeathLog()
    log.record("replica-0", [], 0.0)
    assert log.needed(poison, REMEMBERED_SECONDS + 1) == SUSPICIOUS_DEATHS


def test_what_has_been_explained_does_not_protect_the_next_one() -> None:
    first, second = sessions(2)
    log = DeathLog()
    log.record("replica-0", [first], 0.0)
    log.record("replica-1", [first], 1.0)
    assert log.needed(second, 1.0) == SUSPICIOUS_DEATHS + 2
    log.explain(first)
    assert log.needed(second, 1.0) == SUSPICIOUS_DEATHS


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.floats(0, 300)), max_size=80))
def test_a_request_that_kills_engines_is_to_blame_after_few_deaths_whatever_else_dies(
    deaths: list[tuple[int, bool, float]],
) -> None:
    poison, other = sessions(2)
    log = DeathLog()
    now, own = 0.0, 0
    for replica, killed, seconds in deaths:
        now += seconds
        log.record(f"replica-{replica}", [poison, other] if killed else [other], now)
        own += killed
        assert SUSPICIOUS_DEATHS <= log.needed(poison, now) <= MOST_DEATHS
        if killed and own >= MOST_DEATHS:
            assert own >= log.needed(poison, now)
    if all(killed for _, killed, _ in deaths):
        assert log.needed(poison, now) == SUSPICIOUS_DEATHS
