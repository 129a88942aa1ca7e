"""The sessions of a replica: what they count, what they refuse, and what they remember; no engine and no server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.serving.openai_api.continuation import Texts
from kuberoll_workers.serving.openai_api.exchange import Exchange
from kuberoll_workers.serving.sessions.limits import CallRefused
from kuberoll_workers.serving.sessions.store import ClosedSessions, Session, SessionRefused, Sessions
from kuberoll_workers.serving.sessions.trajectories import trajectories
from tests.serving.test_session_tree import sampled

TURNOVER = int(os.environ.get("KUBEROLL_TEST_SESSION_TURNOVER", "1000"))
TEXTS = Texts(str, lambda _: token_array(), None, lambda text, *_: (text, []))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Params:
    """What a session sets of vLLM's parameters."""

    max_tokens: int | None = None
    seed: int | None = None


def refusal(status: int, call: Any, *arguments: Any) -> str:
    with pytest.raises(SessionRefused) as refused:
        call(*arguments)
    assert refused.value.status == status
    return str(refused.value)


def test_a_closed_session_takes_no_calls_and_keeps_what_it_has(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock)
    session = sessions.open(SessionSettings(idle_seconds=10))
    sessions.enter(session.identity).record(sampled([1], [2]))
    assert sessions.close(session.identity) is sessions.close(session.identity)
    assert "is closed" in refusal(410, sessions.enter, session.identity)
    # A call that ends after the end is not part of what was returned.
    session.record(sampled([1, 2], [3]))
    (trajectory,) = trajectories(session, TEXTS)
    assert [message["role"] for message in trajectory["messages"]] == ["context", "assistant"]


def test_an_idle_session_closes_and_its_trajectories_stay(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock)
    session = sessions.open(SessionSettings(idle_seconds=10))
    clock.now = 9
    sessions.enter(session.identity).record(sampled([1], [2]))
    clock.now = 18
    assert not sessions.find(session.identity).state()["closed"]
    clock.now = 20
    assert "is closed" in refusal(410, sessions.enter, session.identity)
    clock.now = 1e6
    assert sessions.close(session.identity).state()["calls"] == 1


def test_a_call_that_takes_long_keeps_its_session_open(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock)
    session = sessions.enter(sessions.open(SessionSettings(idle_seconds=10)).identity)
    clock.now = 100
    session.record(sampled([1], [2]))
    clock.now = 109
    assert sessions.enter(session.identity) is session


def test_sessions_beyond_the_limit_are_refused_while_as_many_are_open(clock: Clock) -> None:
    sessions = Sessions("r", clock=clock, sessions=2)
    first, _ = sessions.open(), sessions.open()
    for _ in range(200):
        assert "2 sessions are open" in refusal(429, sessions.open)
    sessions.close(first.identity)
    third = sessions.open()
    clock.now = 1e6
    # Those that nobody calls are no reason to refuse one.
    assert sessions.open() is not third
    assert len(sessions) == 1


def test_calls_beyond_the_limit_are_refused() -> None:
    sessions = Sessions("r", calls=1)
    session = sessions.open()
    sessions.enter(session.identity).record(sampled([1], [2]))
    for _ in range(100):
        assert "has 1 responses" in refusal(429, sessions.enter, session.identity)


def test_branches_are_bounded_by_what_their_trajectories_take() -> None:
    sessions = Sessions("r", path_tokens=10_000)
    session, prompt = sessions.open(), list(range(1_000))
    sessions.enter(session.identity).record(sampled(prompt, [1]))
    for number in range(10):
        sessions.enter(session.identity).record(sampled([*prompt, 1, number], [2]))
    for _ in range(100):
        assert "branches have in common" in refusal(429, sessions.enter, session.identity)
    assert sum(len(message["token_ids"]) for path in trajectories(session, TEXTS) for message in path["messages"]) < (
        12_000
    )


def test_one_session_that_takes_all_leaves_the_others_their_share() -> None:
    sessions = Sessions("r", max_bytes=100_000)
    hoarder = sessions.open()
    good = [sessions.open() for _ in range(9)]
    while sessions.size < 100_000:
        sessions.enter(hoarder.identity).record(sampled([1], [2] * 1_000))
    for _ in range(100):
        assert "this one its share" in refusal(429, sessions.enter, hoarder.identity)
    for session in good:
        sessions.enter(session.identity).record(sampled([1], [2] * 100))
    sessions.close(hoarder.identity)
    assert sessions.size == sum(session.tree.size for session in good)
    sessions.enter(good[0].identity)


def test_sessions_that_are_opened_and_closed_are_never_refused(clock: Clock) -> None:
    """64 agents, each with one session after the other, of 20,200 tokens each."""
    sessions = Sessions("r", clock=clock, sessions=64, max_bytes=64 * (1 << 18))
    ids = token_array(range(20_000))
    open_sessions: list[Session] = []
    for _ in range(TURNOVER):
        if len(open_sessions) == 64:
            sessions.close(open_sessions.pop(0).identity)
        session = sessions.open(SessionSettings(idle_seconds=6_030.0))
        sessions.enter(session.identity).record(sampled(ids, [2] * 200))
        open_sessions.append(session)
        clock.now += 1 / 16
    assert len(sessions) == 64


def test_what_is_remembered_of_closed_sessions_is_bounded_and_the_newest_stays() -> None:
    closed = ClosedSessions(sessions=3, size=20_000)
    sessions = Sessions("r", closed=closed)
    made = [sessions.open() for _ in range(300)]
    for number, session in enumerate(made):
        sessions.enter(session.identity).record(sampled([1], [2] * (number * 10)))
        sessions.close(session.identity)
        # One that is larger than all room is the only one.
        assert len(closed) <= 3
        assert closed.size <= 20_000 or len(closed) == 1
        assert sessions.close(session.identity) is session
        assert sessions.opens(session.identity, session.token)
    assert "does not have it" in refusal(404, sessions.find, made[0].identity)
    assert (len(sessions), sessions.size) == (0, 0)


def test_a_session_of_another_replica_says_what_to_do() -> None:
    assert "use the base URL that opening it returned" in refusal(404, Sessions("here").find, "there-1")


def test_a_token_opens_its_own_session_alone() -> None:
    sessions = Sessions("r")
    first, second = sessions.open(), sessions.open()
    assert sessions.opens(first.identity, first.token)
    assert not sessions.opens(second.identity, first.token)
    assert not sessions.opens("none", first.token)


def exchange(session: Session, request: bytes = b"question", *, repeats: bool = False) -> Exchange:
    """An admitted call."""
    found = Exchange(None, session, request=request, repeats=repeats)
    session.admit(Params(), 1)
    found.admitted += 1
    return found


def answer(session: Session, ids: Sequence[int], **options: Any) -> None:
    found = exchange(session, **options)
    found.add(sampled([1], ids))
    found.record_sent()
    found.end()


def learned(session: Session) -> list[list[int]]:
    return [segment.token_ids.tolist() for path in session.tree.paths() for segment in path if segment.learn]


def test_an_answer_that_was_lost_and_asked_for_again_is_not_learned_from() -> None:
    session = Sessions("r").open(SessionSettings(max_calls=2))
    answer(session, [2])
    answer(session, [3], repeats=True)
    assert learned(session) == [[3]]
    assert (session.state()["calls"], session.state()["lost"]) == (1, 1)
    # It used up no call.
    answer(session, [4])
    with pytest.raises(CallRefused):
        session.admit(Params(), 1)


def test_a_repeated_request_takes_the_place_of_the_one_that_was_not_answered() -> None:
    session = Sessions("r").open()
    # Two samples of one prompt, of which the second is asked for twice: the first is no lost one.
    answer(session, [2])
    exchange(session).end()
    answer(session, [3], repeats=True)
    assert learned(session) == [[2], [3]]


def test_an_answer_from_which_the_agent_went_on_was_not_lost() -> None:
    session = Sessions("r").open()
    answer(session, [2])
    session.record(sampled([1, 2, 5], [6]))
    answer(session, [3], repeats=True)
    assert learned(session) == [[2], [6], [3]]


def test_what_was_not_sent_is_not_recorded_and_uses_up_no_call() -> None:
    session = Sessions("r").open(SessionSettings(max_calls=1, seed=7))
    seeds = set()
    for _ in range(10):
        found = Exchange(None, session, request=b"?")
        params = Params()
        session.admit(params, 1)
        seeds.add(params.seed)
        found.admitted += 1
        found.add(sampled([1], [2]))
        found.end()
    assert (session.tree.calls, len(seeds)) == ([], 10)
    answer(session, [3])
    with pytest.raises(CallRefused):
        session.admit(Params(), 1)


def test_calls_that_are_broken_off_are_given_back_a_bounded_number_of_times() -> None:
    session = Sessions("r").open(SessionSettings(max_calls=2))
    for number in range(18):
        exchange(session, request=str(number).encode()).end()
    for number in range(1_000):
        with pytest.raises(CallRefused):
            exchange(session, request=str(number).encode())


class Store(RuleBasedStateMachine):
    """Places and bytes in use are those of what is alive, and nothing is refused while there is room."""

    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.closed = ClosedSessions(sessions=3, size=20_000)
        self.sessions = Sessions("r", clock=self.clock, sessions=5, max_bytes=30_000, closed=self.closed)
        self.alive: dict[str, Session] = {}

    def living(self) -> dict[str, Session]:
        return {name: session for name, session in self.alive.items() if not session.closed and not session.idle()}

    @rule(target=made, idle=st.sampled_from([1.0, 100.0]))
    def open(self, idle: float) -> Any:
        full = len(self.living()) >= 5
        try:
            session = self.sessions.open(SessionSettings(idle_seconds=idle))
        except SessionRefused:
            assert full
            return multiple()
        assert not full
        self.alive[session.identity] = session
        return session

    @rule(session=made, size=st.integers(0, 2_000), base=st.integers(0, 5))
    def call(self, session: Session, size: int, base: int) -> None:
        living = self.living()
        try:
            self.sessions.enter(session.identity).record(sampled([base], [1] * size))
        except SessionRefused as error:
            if error.status == 429:
                used = sum(found.tree.size for found in living.values())
                assert used >= 30_000
                assert session.tree.size * len(living) >= 30_000
            else:
                assert session.identity not in living
        else:
            assert session.identity in living

    @rule(session=consumes(made))
    def close(self, session: Session) -> None:
        calls = len(session.tree.calls)
        try:
            closed = self.sessions.close(session.identity)
        except SessionRefused:
            # It was closed because nobody called it, and so many were closed after it.
            assert session.closed
            return
        assert closed is session
        # The answer was lost: it is asked for again.
        assert len(self.sessions.close(session.identity).tree.calls) == calls

    @rule(session=made)
    def late(self, session: Session) -> None:
        session.record(sampled([9], [9]))

    @precondition(lambda self: self.alive)
    @rule(seconds=st.sampled_from([0.5, 2.0, 50.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def counts(self) -> None:
        unclosed = {name: session for name, session in self.alive.items() if not session.closed}
        assert len(self.sessions) == len(unclosed)
        assert self.sessions.size == sum(session.tree.size for session in unclosed.values())
        assert len(self.closed) <= 3
        assert self.closed.size <= 20_000 or len(self.closed) == 1


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
