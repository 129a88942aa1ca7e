"""Room for new trajectories in a replica's cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.routing.cache_room import CacheRoom
from kuberoll_workers.policy.routing.scheduler import Replica, RequestScheduler, Ticket

CAPACITY = 1000


def ask(room: CacheRoom, tokens: int, *, known: int, cached: int) -> None:
    epoch = room.begin(tokens)
    room.record_prefix(epoch, known=known, cached=cached, requests=1)
    room.end(tokens)


def learned() -> CacheRoom:
    room = CacheRoom(CAPACITY)
    ask(room, 100, known=90, cached=80)
    return room


@given(
    st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 1500), st.floats(0, 1), st.integers(1, 50), st.booleans()),
        max_size=60,
    )
)
def test_the_limit_stays_within_its_bounds_and_moves_one_way_for_each_reason(
    turns: list[tuple[int, int, float, int, bool]],
) -> None:
    room = CacheRoom(CAPACITY)
    open_turns: list[tuple[int, int]] = []
    found = False
    for tokens, known, share, requests, stays in turns:
        epoch = room.begin(tokens)
        before, busy = room.limit, 2 * room.in_flight >= CAPACITY
        cached = int(known * share)
        room.record_prefix(epoch, known=known, cached=cached, requests=requests)
        if 2 * cached >= known:
            found = True
            assert before <= room.limit <= before + 0.01 * CAPACITY
        elif not (found and busy):
            assert room.limit == before
        else:
            assert room.limit <= before
        assert 0.05 * CAPACITY <= room.limit <= CAPACITY
        if stays:
            open_turns.append((epoch, tokens))
        else:
            room.end(tokens)
    assert room.in_flight == sum(tokens for _, tokens in open_turns)
    for _, tokens in open_turns:
        room.end(tokens)
    assert room.in_flight == 0


def test_prefixes_that_are_lost_shrink_it_once_for_all_in_flight_together() -> None:
    room = learned()
    epochs = [room.begin(200) for _ in range(5)]
    for epoch in epochs:
        room.record_prefix(epoch, known=150, cached=0, requests=5)
    assert room.limit == pytest.approx(900)
    room.record_prefix(room.begin(0), known=150, cached=0, requests=6)
    assert room.limit == pytest.approx(810)


def test_what_is_lost_at_a_replica_with_little_to_do_is_no_reason() -> None:
    # Others of its trajectories wait for their environments.
    room = learned()
    ask(room, 400, known=300, cached=0)
    assert room.limit == CAPACITY


def test_an_engine_without_a_prefix_cache_loses_nothing() -> None:
    room = CacheRoom(CAPACITY)
    for _ in range(20):
        ask(room, 900, known=800, cached=0)
    assert room.limit == CAPACITY


def test_a_cache_of_unknown_size_has_no_limit() -> None:
    room = CacheRoom(0)
    ask(room, 100, known=90, cached=90)
    ask(room, 100, known=90, cached=0)
    assert room.fits(1 << 40)


def scheduler_with_one() -> tuple[RequestScheduler, Replica]:
    scheduler, replica = RequestScheduler(seed=1), Replica("here", budget=CAPACITY)
    scheduler.add_replica(replica, 0.0)
    return scheduler, replica


def turn(scheduler: RequestScheduler, session: str, tokens: int, *, cached: int, version: str = "1") -> None:
    ticket = Ticket(session, tokens)
    assert scheduler.submit(ticket, 0.0)
    scheduler.record_answer(ticket, tokens + 50, 0.0, cached=cached, versions=(version, version))


def test_a_turn_tells_whether_the_turn_before_is_still_cached() -> None:
    scheduler, replica = scheduler_with_one()
    turn(scheduler, "0-0-0", 500, cached=0)
    assert replica.room.limit == CAPACITY
    turn(scheduler, "0-0-0", 600, cached=544)
    turn(scheduler, "0-0-0", 700, cached=0)
    assert replica.room.limit < CAPACITY


def test_new_weights_forget_what_was_cached_without_a_fault() -> None:
    scheduler, replica = scheduler_with_one()
    turn(scheduler, "0-0-0", 500, cached=0)
    turn(scheduler, "0-0-0", 600, cached=544)
    turn(scheduler, "0-0-0", 700, cached=0, version="2")
    assert replica.room.limit == CAPACITY
    turn(scheduler, "0-0-0", 800, cached=0, version="2")
    assert replica.room.limit < CAPACITY


def test_trajectories_in_their_environments_leave_room_for_others() -> None:
    scheduler, replica = scheduler_with_one()
    turn(scheduler, "0-0-0", 900, cached=0)
    other = Ticket("1-0-0", 900)
    assert scheduler.submit(other, 0.0)
    assert replica.room.in_flight == 900
    waiting = Ticket("2-0-0", 900)
    assert not scheduler.submit(waiting, 0.0)
    scheduler.record_answer(other, 950, 0.0)
    assert not waiting.waiting
