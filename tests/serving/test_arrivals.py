"""What is counted of callers' bodies and calls; no server."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kuberoll_workers.serving.arrivals import ACTIVE_SECONDS, LEAST_PLACES, SHARE, Arrival, Arrivals, Calls

BODIES, BYTES = 16, 1_600


class Bodies(RuleBasedStateMachine):
    """What is counted is what is held, it stays within the bounds, and a caller within its share loses nothing."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = Arrivals(bodies=BODIES, size=BYTES)
        self.alive: list[Arrival] = []
        self.dropped: list[Arrival] = []

    @rule(target=held, caller=st.sampled_from("abcd"), bounded=st.booleans())
    def begins(self, caller: str, bounded: bool) -> Arrival:
        made: list[Arrival] = []
        gone: list[bool] = []
        name = f"{caller}{bounded}"
        arrival = self.arrivals.begin(
            name, lambda: self.dropped.append(made[0]) if made else gone.append(True), bounded=bounded
        )
        made.append(arrival)
        self.alive.append(arrival)
        if gone:
            self.dropped.append(arrival)
        self.settle()
        return arrival

    @rule(arrival=held, size=st.integers(1, 400))
    def comes(self, arrival: Arrival, size: int) -> None:
        if arrival in self.alive:
            self.arrivals.add(arrival, size)
            self.settle()

    @rule(arrival=consumes(held))
    def ends(self, arrival: Arrival) -> None:
        if arrival in self.alive:
            self.alive.remove(arrival)
            self.arrivals.end(arrival)

    def settle(self) -> None:
        """Who is dropped ends at once."""
        while self.dropped:
            arrival = self.dropped.pop()
            # Nobody is dropped twice.
            self.alive.remove(arrival)
            self.arrivals.end(arrival)

    @invariant()
    def counts(self) -> None:
        assert self.arrivals.bodies == len(self.alive) <= BODIES
        assert self.arrivals.size == sum(arrival.size for arrival in self.alive) <= BYTES
        for caller in {arrival.caller for arrival in self.alive if arrival.caller.bounded}:
            assert caller.bodies <= BODIES // SHARE
            assert caller.size <= BYTES // SHARE


TestBodies = Bodies.TestCase
TestBodies.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_bodies_that_do_not_come_make_room_for_those_that_do() -> None:
    """One caller with a hundred times as many as there is room for, and good ones beside it."""
    arrivals, dropped = Arrivals(bodies=100, size=1 << 20), list[Any]()
    for number in range(10_000):
        hostile = arrivals.begin("bad", partial(dropped.append, number), bounded=False)
        arrivals.add(hostile, 1)
        good = arrivals.begin(f"good {number}", lambda: dropped.append("good"), bounded=True)
        arrivals.add(good, 1_000)
        arrivals.complete(good)
        arrivals.end(good)
    assert "good" not in dropped
    assert len(dropped) > 9_800


def test_a_whole_body_is_not_dropped() -> None:
    arrivals, dropped = Arrivals(bodies=2, size=100), list[str]()
    for name in "abc":
        arrivals.complete(arrivals.begin(name, partial(dropped.append, name), bounded=False))
    assert dropped == ["c"]


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3), st.floats(0, 5)), max_size=200),
)
def test_calls_are_never_refused_and_never_more_than_their_share(
    places: int, steps: list[tuple[str, int, float]]
) -> None:
    calls = Calls(places)
    running, waiting = deque[str](), dict[str, list[Any]]()
    now = 0.0
    for session, action, pause in steps:
        now += pause
        if action < 2:
            mine = waiting.setdefault(session, [])

            def start(session: str = session, mine: list[Any] = mine) -> None:
                # In their order.
                mine.pop(0)
                running.append(session)

            share = calls.share()
            if calls.begin(session, now, start):
                assert not mine
                running.append(session)
                assert running.count(session) <= max(share, places)
            else:
                assert running.count(session) >= LEAST_PLACES
                mine.append(start)
        elif action == 2 and running:
            calls.end(running.popleft())
        elif waiting.get(session):
            assert calls.withdraw(session, waiting[session].pop())
        assert calls.under_way == len(running)
        assert calls.waiting == sum(map(len, waiting.values()))
    while running:
        calls.end(running.popleft())
    assert (calls.under_way, calls.waiting, sum(map(len, waiting.values()))) == (0, 0, 0)


def test_one_session_among_a_hundred_has_a_hundredth() -> None:
    calls, begun = Calls(512), list[int]()
    for number in range(100):
        assert calls.begin(str(number), 0.0, lambda: None)
    count = sum(calls.begin("bad", 0.0, partial(begun.append, number)) for number in range(10_000))
    assert count == 512 // 101
    # One that has nobody beside it has all.
    alone = Calls(512)
    assert sum(alone.begin("one", 0.0, partial(begun.append, number)) for number in range(10_000)) == 512
    # Those that have not called for a while do not count.
    for number in range(100):
        calls.end(str(number))
    assert calls.begin("late", ACTIVE_SECONDS, lambda: None)
    assert calls.share() == 256
