"""The choice of a server for a call, and rests of servers that were lost or busy."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments.remote.balance import FIRST_SECONDS, LONGEST_SECONDS, Rest, least

EVENTS = st.lists(
    st.tuples(st.sampled_from(["trouble", "answer"]), st.floats(min_value=0.0, max_value=2 * LONGEST_SECONDS)),
    max_size=60,
)


@dataclass
class Server:
    calls: int = 0
    parallel: int = 1
    rest: Rest = field(default_factory=Rest)


def load(server: Server) -> float:
    return server.calls


@given(EVENTS)
def test_rests_grow_until_a_call_is_answered_after_one(events: list[tuple[str, float]]) -> None:
    rest, now, expected = Rest(), 0.0, FIRST_SECONDS
    for kind, pause in events:
        now += pause
        until, rested = rest.until, not rest.lasts(now)
        if kind == "trouble":
            rest.begin(now)
            if rested:
                assert rest.until == now + expected
                expected = min(LONGEST_SECONDS, 2 * expected)
        else:
            rest.record_answer(now)
            if rested:
                expected = FIRST_SECONDS
        if not rested or kind == "answer":
            assert rest.until == until
        assert rest.until <= now + LONGEST_SECONDS


def test_the_length_of_a_rest_stays_a_number() -> None:
    rest, now = Rest(), 0.0
    for _ in range(5000):
        rest.begin(now)
        now = rest.until
    rest.begin(now)
    assert rest.until == now + LONGEST_SECONDS


SERVERS = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=9),
        st.integers(min_value=1, max_value=4),
        st.integers(max_value=5, min_value=0),
    ),
    min_size=1,
    max_size=6,
)


@given(SERVERS, st.floats(min_value=0.0, max_value=LONGEST_SECONDS))
def test_a_call_goes_to_the_least_loaded_one_of_those_that_do_not_rest(
    given_servers: list[tuple[int, int, int]], now: float
) -> None:
    servers = [Server(calls, parallel) for calls, parallel, _ in given_servers]
    for server, (_, _, troubles) in zip(servers, given_servers, strict=True):
        at = 0.0
        for _ in range(troubles):
            server.rest.begin(at)
            at = server.rest.until
    chosen = least(servers, load, now)
    rested = [server for server in servers if not server.rest.lasts(now)]
    if rested:
        assert not chosen.rest.lasts(now)
        assert chosen.calls / chosen.parallel == min(server.calls / server.parallel for server in rested)
    else:
        # There is always one: nobody waits for the end of a rest.
        assert chosen.rest.count == min(server.rest.count for server in servers)


def test_servers_that_all_rest_are_asked_in_turns() -> None:
    servers = [Server() for _ in range(3)]
    asked = []
    for now in range(1, 7):
        chosen = least(servers, load, now / 100)
        asked.append(servers.index(chosen))
        chosen.rest.begin(now / 100)
    assert sorted(asked[:3]) == sorted(asked[3:]) == [0, 1, 2]
