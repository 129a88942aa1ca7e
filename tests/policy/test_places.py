"""Choice of a replica: as if all were looked at, without a look at all of them."""

from __future__ import annotations

import functools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.routing.places import RANKED, Places, ReplicaLoad
from kuberoll_workers.policy.routing.scheduler import Replica, RequestScheduler, Ticket

_CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "sessions", "outside"]), st.integers(0, 11), st.integers(0, 9)),
    max_size=60,
)


@given(_CHANGES, st.integers(0, 99), st.sets(st.integers(0, 11)))
def test_the_choice_is_that_of_a_look_at_all(changes: list[tuple[str, int, int]], draw: int, unfit: set[int]) -> None:
    places: Places[ReplicaLoad] = Places()
    replicas = [ReplicaLoad(f"replica-{number}") for number in range(12)]
    listed: set[int] = set()
    for change, number, value in changes:
        replica = replicas[number]
        if change == "add":
            places.add(replica)
            listed.add(number)
        elif change == "remove":
            places.remove(replica)
            listed.discard(number)
        else:
            setattr(replica, change, value)
        assert replica.load == replica.sessions + replica.outside
    assert sorted(one.id for one in places) == sorted(replicas[number].id for number in listed)
    assert len(places) == len(listed)
    fitting = [replicas[number] for number in listed - unfit]
    names = {one.id for one in fitting}

    def fits(one: ReplicaLoad) -> bool:
        return one.id in names

    least = min((one.load for one in fitting), default=None)
    assert places.least_load(fits) == least
    assert places.least_load(fits, most=3) == (least if least is not None and least <= 3 else None)
    if least is not None:
        tied = [one for one in fitting if one.load == least]
        assert places.ranked_first(least, draw, fits) is max(tied, key=lambda one: (one.rank(draw), one.id))


def test_a_draw_keeps_its_replica_of_many_when_others_come_and_go() -> None:
    places: Places[ReplicaLoad] = Places()
    replicas = [ReplicaLoad(f"replica-{number}") for number in range(8 * RANKED)]
    for replica in replicas:
        places.add(replica)
    draws = [zlib.crc32(f"group-{number}".encode()) for number in range(512)]
    before = [places.ranked_first(0, draw, lambda _: True) for draw in draws]
    places.remove(replicas[5])
    after = [places.ranked_first(0, draw, lambda _: True) for draw in draws]
    moved = [old for old, new in zip(before, after, strict=True) if old is not new and old is not replicas[5]]
    assert len(moved) <= len(draws) // RANKED
    # Far from all at the same ones.
    assert len(set(before)) > len(replicas) // 2
    assert max(before.count(replica) for replica in replicas) < 8 * len(draws) // len(replicas)


class _Counted(Replica):
    """Counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def accepts_request(self, now: float) -> bool:
        _Counted.looks += 1
        return super().accepts_request(now)


@pytest.mark.parametrize("budget", [0, 1000])
@pytest.mark.parametrize("sticky", [True, False])
def test_a_choice_among_a_thousand_replicas_looks_at_few(budget: int, sticky: bool) -> None:
    """Short and long turns, idle and full caches: about as many looks as with a few replicas."""
    scheduler = RequestScheduler(sticky=sticky, seed=1)
    for number in range(1024):
        scheduler.add_replica(_Counted(f"replica-{number}", budget=budget, window=64), 0.0)
    _Counted.looks = turns = 0
    waiting = 0
    in_flight: list[Ticket] = []
    for number in range(4096):
        # Without a budget four trajectories a replica; with it, half of them find no room.
        ticket = Ticket(f"{number // 4}-{number % 4}-0", 400)
        ticket.wake = functools.partial(in_flight.append, ticket)
        if scheduler.submit(ticket, 0.0):
            in_flight.append(ticket)
        else:
            waiting += 1
    assert bool(waiting) == bool(budget)
    while in_flight and turns < 8192:
        ticket = in_flight.pop(0)
        turns += 1
        scheduler.record_answer(ticket, ticket.tokens + 100, 0.0, load=3)
        if ticket.tokens >= 800:
            scheduler.end_session(ticket.session_id, 0.0)
        else:
            following = Ticket(ticket.session_id, ticket.tokens + 200)
            following.wake = functools.partial(in_flight.append, following)
            if scheduler.submit(following, 0.0):
                in_flight.append(following)
    assert turns > 4096
    assert _Counted.looks / (turns + 4096) < 40
