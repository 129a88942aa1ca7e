"""Routing's decisions: sessions, admission, windows and breakers, without a clock or a network."""

from __future__ import annotations

import functools
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kuberoll_workers.policy.routing.breaker import FAILURES, LONGEST_SECONDS, Breaker
from kuberoll_workers.policy.routing.places import ReplicaLoad
from kuberoll_workers.policy.routing.scheduler import Replica, RequestScheduler, Ticket
from kuberoll_workers.policy.routing.sessions import SHORT_CONTEXT_TOKENS, SessionTable, acceptable_load, crowded_load
from kuberoll_workers.policy.routing.window import Window

BUDGET = 3000
LARGEST = 4


class Requests(RuleBasedStateMachine):
    """Trajectories that ask, wait, are answered, refused and failed, on replicas that come, go and break."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.moves: list[str] = []
        self.tokens = 0
        self.admission = RequestScheduler(moved=self.moved, seed=1)
        self.begun = 0
        self.sent: list[Ticket] = []
        self.asking: list[Ticket] = []
        self.idle: dict[str, int] = {}
        self.homes: dict[str, str] = {}
        self.ever: set[Replica] = set()
        self.new: set[Ticket] = set()
        # Collected, because what is raised in the midst of a change leaves it half done, and then `teardown` complains
        # of that.
        self.faults: list[str] = []

    def names(self) -> list[str]:
        return [name for name, replica in self.admission.replicas.items() if replica.listed]

    def moved(self, cause: str) -> None:
        # Only one that looks for a place may be moved for the load's sake, and only a young one, or one whose replica
        # has a multiple of the load: it asks anew, or it has lost its home while it waited, which may be back.
        looking = [self.tokens] if self.tokens else [ticket.tokens for ticket in self.asking]
        young = min(looking, default=SHORT_CONTEXT_TOKENS) < SHORT_CONTEXT_TOKENS
        crowded = max(replica.load for replica in self.admission.replicas.values()) > crowded_load(0)
        self.check(cause != "overload" or young or crowded, "moved by load")
        self.moves.append(cause)

    def check(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    def ask(self, session: str, tokens: int) -> None:
        ticket = Ticket(session, tokens)
        ticket.wake = lambda: self.woken(ticket)
        if self.admission.sessions.find(session) is None:
            self.new.add(ticket)
        moves = len(self.moves)
        self.tokens = tokens
        granted = self.admission.submit(ticket, self.now)
        self.tokens = 0
        if granted:
            self.granted(ticket, moved=len(self.moves) > moves)
        else:
            self.asking.append(ticket)

    def woken(self, ticket: Ticket) -> None:
        self.asking.remove(ticket)
        self.granted(ticket, moved=True)

    def granted(self, ticket: Ticket, *, moved: bool) -> None:
        replica = ticket.replica
        assert replica is not None
        self.check(replica.usable, "sent to one that is not usable")
        self.check(self.now >= replica.window.resume_at, "sent to one that wants to be left alone")
        home = self.homes.get(ticket.session_id)
        if ticket in self.new:
            # A new one fits, or is the only one that is answered there.
            self.check(replica.resident <= BUDGET or replica.window.in_flight == 1, "sent where it does not fit")
        elif home is not None and not moved:
            self.check(home == replica.id, "sent elsewhere than home")
        self.homes[ticket.session_id] = replica.id
        self.sent.append(ticket)

    @rule(number=st.integers(0, 5))
    def joins(self, number: int) -> None:
        name = f"replica-{number}"
        if name not in self.admission.replicas:
            replica = Replica(name, budget=BUDGET, window=LARGEST)
            self.ever.add(replica)
            self.admission.add_replica(replica, self.now)

    @rule(data=st.data())
    def is_listed(self, data: Any) -> None:
        names = sorted(self.admission.replicas)
        self.admission.set_listed([name for name in names if data.draw(st.booleans())], self.now)

    @rule(tokens=st.integers(1, 2 * BUDGET), group=st.integers(0, 3))
    def begins(self, tokens: int, group: int) -> None:
        self.begun += 1
        self.ask(f"{group}-{self.begun}-0", tokens)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), more=st.integers(1, 1500))
    def goes_on(self, data: Any, more: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.idle)))
        self.ask(session, self.idle.pop(session) + more)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def ends(self, data: Any) -> None:
        session = data.draw(st.sampled_from(sorted(self.idle)))
        del self.idle[session]
        self.homes.pop(session, None)
        self.admission.end_session(session, self.now)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), outside=st.none() | st.integers(0, 20))
    def is_answered(self, data: Any, outside: int | None) -> None:
        ticket = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.idle[ticket.session_id] = ticket.tokens + 10
        self.admission.record_answer(ticket, ticket.tokens + 10, self.now, load=outside)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), blame=st.booleans())
    def is_failed(self, data: Any, blame: bool) -> None:
        ticket = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.admission.record_failure(ticket, self.now, blame=blame)
        self.idle[ticket.session_id] = ticket.tokens
        self.homes.pop(ticket.session_id, None)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), retry_after=st.none() | st.floats(0, 60))
    def is_refused(self, data: Any, retry_after: float | None) -> None:
        ticket = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        assert self.admission.record_overload(ticket, self.now, retry_after=retry_after) > 0
        self.idle[ticket.session_id] = ticket.tokens

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def is_withdrawn(self, data: Any) -> None:
        ticket = self.asking.pop(data.draw(st.integers(0, len(self.asking) - 1)))
        self.admission.withdraw(ticket)
        # While it waited its home may have become another.
        self.homes.pop(ticket.session_id, None)
        if self.admission.sessions.find(ticket.session_id) is not None:
            self.idle[ticket.session_id] = ticket.tokens

    @precondition(lambda self: self.names())
    @rule(data=st.data())
    def breaks(self, data: Any) -> None:
        self.admission.mark_down(self.admission.replicas[data.draw(st.sampled_from(self.names()))], self.now)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for replica in list(self.admission.replicas.values()):
            if replica.breaker.begin_probe(self.now):
                replica.breaker.record_probe(True, self.now)
                self.admission.mark_recovered(replica, self.now)
            self.admission.dispatch(replica, self.now)

    @invariant()
    def nothing_was_done_that_may_not_be(self) -> None:
        assert not self.faults, self.faults

    @invariant()
    def counts_are_true(self) -> None:
        admission = self.admission
        assert admission.waiting == len(self.asking)
        assert len(admission.sessions) <= len(self.idle) + len(self.sent) + len(self.asking)
        assert admission.in_flight == len(self.sent)
        for replica in self.ever:
            living = [
                session
                for name in {*self.idle, *(t.session_id for t in self.sent), *(t.session_id for t in self.asking)}
                if (session := admission.sessions.find(name)) is not None and session.replica is replica
            ]
            assert replica.sessions == len(living)
            assert replica.resident == sum(session.tokens for session in living)
            assert replica.window.in_flight == sum(ticket.replica is replica for ticket in self.sent)
            assert 1 <= replica.window.limit <= LARGEST
            kept = replica.listed or living or replica.window.in_flight
            assert (admission.replicas.get(replica.id) is replica) or not kept or not replica.listed

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Where no answer, pause or probe is to come, nobody waits."""
        able = [
            replica
            for replica in self.admission.replicas.values()
            if replica.usable and replica.accepts_request(self.now)
        ]
        if able and not self.sent and all(self.now >= m.window.resume_at for m in self.admission.replicas.values()):
            for replica in able:
                self.admission.dispatch(replica, self.now)
            assert self.sent or not self.asking

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        self.admission.set_listed(self.admission.replicas, self.now)
        self.joins(0)
        for _ in range(3 * len(self.asking) + 3):
            self.time_passes(LONGEST_SECONDS * 2)
            while self.sent:
                ticket = self.sent.pop()
                self.idle[ticket.session_id] = ticket.tokens
                self.admission.record_answer(ticket, ticket.tokens, self.now)
        assert not self.faults, self.faults
        assert not self.asking
        for session in list(self.idle):
            self.admission.end_session(session, self.now)
        assert len(self.admission.sessions) == self.admission.waiting == self.admission.in_flight == 0
        assert not self.admission.sessions._groups
        for replica in self.ever:
            assert replica.sessions == replica.resident == replica.window.in_flight == 0
            assert not replica.queue
        self.admission.set_listed([], self.now)
        assert not self.admission.replicas
        super().teardown()


TestRequests = Requests.TestCase


def admission_with(count: int, *, sticky: bool = True, budget: int = 0, window: int = 1000) -> RequestScheduler:
    admission = RequestScheduler(sticky=sticky)
    for number in range(count):
        admission.add_replica(Replica(f"replica-{number}", budget=budget, window=window), 0.0)
    return admission


def sent(admission: RequestScheduler, session: str, tokens: int = 100, now: float = 0.0) -> Ticket:
    ticket = Ticket(session, tokens)
    assert admission.submit(ticket, now)
    return ticket


def loads(admission: RequestScheduler) -> list[int]:
    return sorted(replica.sessions for replica in admission.replicas.values())


def test_new_trajectories_are_spread() -> None:
    admission = admission_with(4)
    for task in range(64):
        sent(admission, f"{task}-0-0")
    assert loads(admission) == [16, 16, 16, 16]


def test_a_group_stays_together_as_far_as_the_load_allows() -> None:
    admission = admission_with(4)
    tickets = [sent(admission, f"{task}-{sample}-0") for task in range(16) for sample in range(4)]
    assert len({(ticket.session_id.split("-")[0], ticket.replica) for ticket in tickets}) < 24
    assert max(loads(admission)) <= acceptable_load(min(loads(admission)))


def test_turns_go_home_once_they_are_long() -> None:
    admission = admission_with(2)
    ticket = sent(admission, "0-0-0", 100)
    home = ticket.replica
    assert home is not None
    home.outside = crowded_load(0) - 1
    admission.record_answer(ticket, SHORT_CONTEXT_TOKENS, 0.0)
    again = sent(admission, "0-0-0", SHORT_CONTEXT_TOKENS)
    assert again.replica is home
    admission.record_answer(again, SHORT_CONTEXT_TOKENS, 0.0)
    # A new one knows better.
    assert sent(admission, "0-1-0").replica is not home


def test_long_contexts_leave_a_replica_that_has_a_multiple_of_the_load_and_come_to_rest() -> None:
    moves: list[str] = []
    admission = RequestScheduler(moved=moves.append)
    admission.add_replica(Replica("first"), 0.0)
    for number in range(200):
        admission.record_answer(sent(admission, f"{number}-0-0", 4000), 4100, 0.0)
    # It has died, and another one comes in its place; or the fleet has grown.
    admission.add_replica(Replica("second"), 0.0)
    for turn in range(4):
        before = len(moves)
        for number in range(200):
            tokens = 5000 + 1000 * turn
            admission.record_answer(sent(admission, f"{number}-0-0", tokens), tokens + 100, 0.0)
    assert len(moves) == before > 40
    assert max(loads(admission)) <= crowded_load(min(loads(admission))) + 1


def test_young_trajectories_move_from_a_crowded_replica_to_a_new_one() -> None:
    moves: list[str] = []
    admission = RequestScheduler(moved=moves.append)
    admission.add_replica(Replica("first"), 0.0)
    for number in range(40):
        admission.record_answer(sent(admission, f"{number}-0-0"), 110, 0.0)
    admission.add_replica(Replica("second"), 0.0)
    for number in range(40):
        admission.record_answer(sent(admission, f"{number}-0-0", 120), 130, 0.0)
    assert set(moves) == {"overload"}
    assert min(loads(admission)) >= 10


def test_workers_that_know_nothing_of_each_other_begin_at_different_replicas() -> None:
    begun = {sent(admission_with(4), f"{task}-0-0").replica.id for task in range(32)}  # type: ignore[union-attr]
    assert len(begun) == 4


def test_least_loaded_has_a_home_for_one_request() -> None:
    admission = admission_with(2, sticky=False)
    tickets = [sent(admission, f"{number}-0-0", 5000) for number in range(10)]
    assert loads(admission) == [5, 5]
    for ticket in tickets:
        admission.record_answer(ticket, 5010, 0.0)
    assert loads(admission) == [0, 0]
    assert len(admission.sessions) == 0


def test_new_trajectories_wait_in_order_for_room_in_the_cache() -> None:
    admission = admission_with(1, budget=1000)
    first = sent(admission, "0-0-0", 900)
    woken: list[str] = []
    waiting = [Ticket(f"{number}-0-0", tokens) for number, tokens in ((1, 500), (2, 50))]
    for ticket in waiting:
        ticket.wake = functools.partial(woken.append, ticket.session_id)
        assert not admission.submit(ticket, 0.0)
    # Its own next turn does not wait.
    admission.record_answer(first, 900, 0.0)
    assert woken == ["1-0-0"]
    admission.end_session("0-0-0", 0.0)
    assert woken == ["1-0-0", "2-0-0"]


def test_a_bound_on_what_is_remembered() -> None:
    table = SessionTable(largest=10)
    place = ReplicaLoad("here")
    for number in range(100):
        session = table.add(f"{number}-0-0")
        table.assign(session, place, 5)
    assert len(table) == place.sessions == len(table._groups) == 10
    assert place.resident == 50


@given(st.lists(st.sampled_from(["success", "failure", "fatal", "healthy", "ill", "wait"]), max_size=60))
def test_breakers(events: list[str]) -> None:
    breaker, now, failures, backoff = Breaker(), 0.0, 0, 0.0
    for event in events:
        before = breaker.state
        if event == "success":
            breaker.record_success()
            assert breaker.state == before
            failures = 0 if before == "closed" else failures
            backoff = 0.0 if before == "closed" else backoff
        elif event in ("failure", "fatal"):
            failures += 1
            opened = breaker.record_failure(now, fatally=event == "fatal")
            assert opened == (before == "closed" and (event == "fatal" or failures >= FAILURES))
            if opened:
                assert backoff < breaker.retry_at - now <= LONGEST_SECONDS or backoff == LONGEST_SECONDS
                backoff = breaker.retry_at - now
        elif event in ("healthy", "ill"):
            due = breaker.begin_probe(now)
            assert due == (before == "open" and now >= breaker.retry_at)
            assert not breaker.begin_probe(now)
            if breaker.state == "half-open":
                breaker.record_probe(event == "healthy", now)
                assert breaker.closed == (event == "healthy")
                if not breaker.closed:
                    assert breaker.retry_at > now
                    backoff = breaker.retry_at - now
        else:
            now = max(now, breaker.retry_at)
        if before != "closed" and breaker.closed:
            failures = 0
        now = round(now, 6)


@given(st.integers(1, 64), st.lists(st.sampled_from(["begin", "success", "overload"]), max_size=200))
def test_windows(largest: int, events: list[str]) -> None:
    window, epochs, draw = Window(largest), [], random.Random(0)
    for event in events:
        limit = window.limit
        if event == "begin":
            epochs.append(window.begin())
        elif epochs and event == "success":
            epochs.pop()
            window.end()
            window.record_success()
            assert limit <= window.limit <= min(limit + 1, largest)
        elif epochs:
            window.end()
            pause = window.record_overload(epochs.pop(), 0.0, retry_after=None, draw=draw)
            assert window.limit in (limit, max(1, limit // 2))
            assert 0 < pause < 10
        assert window.in_flight == len(epochs)
        assert 1 <= window.limit <= largest


def test_those_refused_together_halve_the_window_once() -> None:
    window, draw = Window(64), random.Random(0)
    epochs = [window.begin() for _ in range(64)]
    for epoch in epochs:
        window.record_overload(epoch, 0.0, retry_after=None, draw=draw)
    assert window.limit == 32


def test_a_window_grows_by_one_for_each_window_of_successes() -> None:
    window, draw = Window(64), random.Random(0)
    window.record_overload(window.begin(), 0.0, retry_after=None, draw=draw)
    for _ in range(32):
        window.record_success()
    assert window.limit == 33


def test_a_wish_to_be_left_alone_is_respected() -> None:
    window = Window(4)
    assert window.record_overload(window.begin(), 100.0, retry_after=7, draw=random.Random(0)) >= 7
    assert window.resume_at >= 107
