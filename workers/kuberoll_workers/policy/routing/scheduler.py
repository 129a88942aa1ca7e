"""Scheduling of requests over replicas. Pure: the time is an argument, and waiting requests are woken by a callback.

A turn goes to the replica of its trajectory, and waits there while that replica takes no more requests. A new
trajectory waits, first come first served, until a replica has room for one more request and for its context. An idle
replica always has room for one, so no request waits for ever.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kuberoll_workers.policy.routing.breaker import Breaker
from kuberoll_workers.policy.routing.places import Places, ReplicaLoad
from kuberoll_workers.policy.routing.sessions import (
    SHORT_CONTEXT_TOKENS,
    MoveCause,
    Session,
    SessionTable,
    acceptable_load,
    crowded_load,
)
from kuberoll_workers.policy.routing.window import Window

WINDOW = 1024
"""Requests in flight at a replica that does not report its limit."""

_LASTING_REFUSALS = 8


class Replica(ReplicaLoad):
    """A replica with its window, circuit breaker and queue.

    Attributes:
        listed: Discovery lists it; one that is no longer listed finishes its requests.
        budget: Maximum number of resident tokens; 0: unknown.
        queue: Requests of its trajectories that wait.
    """

    __slots__ = ("breaker", "budget", "listed", "queue", "window")

    def __init__(self, name: str, *, budget: int = 0, window: int = WINDOW) -> None:
        super().__init__(name)
        self.listed = True
        self.budget = budget
        self.window = Window(window)
        self.breaker = Breaker()
        self.queue: deque[Ticket] = deque()

    @property
    def usable(self) -> bool:
        return self.listed and self.breaker.state == "closed"

    def accepts_request(self, now: float) -> bool:
        """True if it takes one more request now."""
        window = self.window
        return window.in_flight < window.limit and now >= window.resume_at

    def has_room(self, tokens: int) -> bool:
        """True if it has room for a new trajectory's context."""
        return not self.budget or not self.window.in_flight or self.resident + tokens <= self.budget


class Ticket:
    """One request to be sent.

    Attributes:
        replica: The replica to send it to; None while it waits.
        avoid: Ids of replicas that failed it.
        wake: Called when it may be sent after waiting.
    """

    __slots__ = ("_epoch", "avoid", "replica", "session", "session_id", "tokens", "waiting", "wake")

    def __init__(self, session_id: str, tokens: int, wake: Callable[[], Any] = lambda: None) -> None:
        self.session_id = session_id
        self.tokens = tokens
        self.wake = wake
        self.session: Session | None = None
        self.replica: Replica | None = None
        self.avoid: set[str] | None = None
        self.waiting = False
        self._epoch = 0


class RequestScheduler:
    """The replicas, the trajectories and the requests of a process.

    Attributes:
        waiting, in_flight: Numbers of requests.
    """

    def __init__(
        self,
        *,
        sticky: bool = True,
        moved: Callable[[MoveCause], None] = lambda _: None,
        sessions: SessionTable | None = None,
        seed: int | None = None,
    ) -> None:
        """Start without replicas.

        Args:
            sticky: Keep a trajectory on its replica between requests.
            moved: Called for each trajectory that moves to another replica.
            seed: Seed for the jitter of pauses; None: random.
        """
        self.replicas: dict[str, Replica] = {}
        self.in_flight = 0
        self.sessions = sessions if sessions is not None else SessionTable()
        self.waiting = 0
        self._sticky = sticky
        self._on_move = moved
        self._draw = random.Random(seed)
        self._usable: Places[Replica] = Places()
        # No usable replica fits a new trajectory of so many tokens, but for those that have changed since: else each
        # answer would make the oldest one that waits look at all of them.
        self._refused: int | None = None
        self._changed: dict[Replica, None] = {}
        # Turns of trajectories that lost their replica and have no other yet.
        self._unassigned: deque[Ticket] = deque()
        self._new: deque[Ticket] = deque()

    def submit(self, ticket: Ticket, now: float) -> bool:
        """True if a request may be sent to `ticket.replica` now; else it waits until it is woken or withdrawn."""
        session = self.sessions.find(ticket.session_id)
        ticket.session = session
        ticket.replica = None
        if session is None:
            if not self._new and self._admit(ticket, now):
                return True
            return self._wait(ticket, self._new)
        home = self._home(ticket, session, now)
        if home is None:
            return self._wait(ticket, self._unassigned)
        if not home.queue and home.accepts_request(now):
            self._begin(ticket, session, home)
            return True
        return self._wait(ticket, home.queue)

    def withdraw(self, ticket: Ticket) -> None:
        """Cancel a waiting request."""
        if ticket.waiting:
            # It stays in its queue and is skipped there.
            ticket.waiting = False
            self.waiting -= 1

    def record_answer(self, ticket: Ticket, tokens: int, now: float, *, load: int | None = None) -> None:
        """Record a response.

        Args:
            tokens: Length of the context, with the response.
            load: Number of other requests that the replica reported; None: it did not.
        """
        replica, session = self._end(ticket)
        replica.window.record_success()
        replica.breaker.record_success()
        if load is not None:
            replica.outside = max(0, load - replica.window.in_flight)
        session.deaths = 0
        self.sessions.set_tokens(session, tokens)
        if not self._sticky:
            self.sessions.release(ticket.session_id)
        self.dispatch(replica, now)

    def record_failure(self, ticket: Ticket, now: float, *, blame: bool = True) -> bool:
        """Record a request without a response.

        Args:
            blame: Count it as a failure of the replica.

        Returns:
            True if this opened the replica's breaker.
        """
        replica, _ = self._end(ticket)
        opened = blame and replica.breaker.record_failure(now)
        if blame:
            ticket.avoid = (ticket.avoid or set()) | {replica.id}
        if opened:
            self._reroute(replica, now)
        else:
            self.dispatch(replica, now)
        return opened

    def record_overload(self, ticket: Ticket, now: float, *, retry_after: float | None = None) -> float:
        """Record an overload response.

        Returns:
            Seconds after which to call `dispatch` for the replica.
        """
        replica, _ = self._end(ticket)
        window = replica.window
        pause = window.record_overload(ticket._epoch, now, retry_after=retry_after, draw=self._draw)
        # Only with another usable replica: else all requests would just wait longer.
        if window.refusals >= _LASTING_REFUSALS and len(self._usable) > 1:
            self.mark_down(replica, now)
        return pause

    def abandon(self, ticket: Ticket, now: float) -> None:
        """End the retries of a request, after its last attempt was recorded."""
        if not self._sticky:
            self.end_session(ticket.session_id, now)

    def mark_down(self, replica: Replica, now: float) -> bool:
        """Record that a replica is down; True if this opened its breaker."""
        opened = replica.breaker.record_failure(now, fatally=True)
        if opened:
            self._reroute(replica, now)
        return opened

    def end_session(self, session_id: str, now: float) -> None:
        """Release a trajectory that has ended."""
        session = self.sessions.find(session_id)
        if session is not None:
            home = session.replica
            self.sessions.release(session_id)
            self._note_change(home)
            self._remove_if_unused(home)
            self._dispatch_new(now)

    def add_replica(self, replica: Replica, now: float, *, last: bool = True) -> None:
        """Add a replica, which may get requests from now on.

        Args:
            last: False if another one is added at once: what waits is sent then, to all of them.
        """
        self.replicas[replica.id] = replica
        self._refresh(replica)
        self._note_change(replica)
        if last:
            self.dispatch(replica, now)

    def set_listed(self, names: Iterable[str], now: float) -> None:
        """Set the ids of the replicas that discovery lists; no others get new requests."""
        listed = set(names)
        changed = [replica for replica in self.replicas.values() if replica.listed != (replica.id in listed)]
        # Update all of them first, so that no trajectory leaves a replica that is about to be listed again.
        for replica in changed:
            replica.listed = not replica.listed
            self._refresh(replica)
        for replica in changed:
            if replica.listed:
                self.dispatch(replica, now)
            else:
                self._reroute(replica, now)
        for replica in list(self.replicas.values()):
            self._remove_if_unused(replica)

    def mark_recovered(self, replica: Replica, now: float) -> None:
        """Send requests to a replica whose breaker has closed."""
        self._refresh(replica)
        self.dispatch(replica, now)

    def dispatch(self, replica: Replica, now: float) -> None:
        """Wake the requests that may be sent after a change at a replica."""
        self._note_change(replica)
        queue = replica.queue
        while queue and replica.accepts_request(now):
            ticket = queue.popleft()
            if ticket.waiting and ticket.session is not None:
                self._grant(ticket, ticket.session, replica)
        if self._unassigned:
            self._dispatch_unassigned(now)
        if self._new:
            self._dispatch_new(now)
        if not replica.listed:
            self._remove_if_unused(replica)

    def _dispatch_unassigned(self, now: float) -> None:
        if not len(self._usable):
            return
        unassigned, self._unassigned = self._unassigned, deque()
        for ticket in unassigned:
            if ticket.waiting and ticket.session is not None:
                home = self._home(ticket, ticket.session, now)
                if home is None:
                    self._unassigned.append(ticket)
                elif home.queue or not home.accepts_request(now):
                    home.queue.append(ticket)
                else:
                    self._grant(ticket, ticket.session, home)

    def _dispatch_new(self, now: float) -> None:
        while self._new:
            ticket = self._new[0]
            if not ticket.waiting:
                self._new.popleft()
                continue
            # Another request of the same trajectory may have come first.
            if not self._admit(ticket, now):
                return
            self._new.popleft()
            ticket.waiting = False
            self.waiting -= 1
            ticket.wake()

    def _admit(self, ticket: Ticket, now: float) -> bool:
        sessions, tokens = self.sessions, ticket.tokens
        chosen = self._place_of_new(ticket, now)
        if chosen is None:
            self._refused = tokens
            self._changed.clear()
            return False
        session = sessions.find(ticket.session_id)
        if session is None:
            session = sessions.add(ticket.session_id)
        sessions.assign(session, chosen, tokens)
        self._begin(ticket, session, chosen)
        return True

    def _place_of_new(self, ticket: Ticket, now: float) -> Replica | None:
        tokens, avoid = ticket.tokens, ticket.avoid

        def fits(replica: Replica) -> bool:
            return replica.accepts_request(now) and self._has_room(replica, tokens)

        if self._refused is not None and tokens >= self._refused:
            possible = (replica for replica in self._changed if replica.usable and fits(replica))
            first = next(possible, None)
            if first is None or next(possible, None) is None:
                return first
        choose = self.sessions.choose
        if avoid and (
            chosen := choose(ticket.session_id, None, self._usable, lambda one: one.id not in avoid and fits(one))
        ):
            return chosen
        return choose(ticket.session_id, None, self._usable, fits)

    def _note_change(self, replica: ReplicaLoad | None) -> None:
        """Note that a replica may fit a trajectory that it did not fit before."""
        if self._refused is not None and isinstance(replica, Replica):
            self._changed[replica] = None

    def _home(self, ticket: Ticket, session: Session, now: float) -> Replica | None:
        """The replica for a known trajectory's next request, moving the trajectory if needed; None: none yet."""
        home, avoid = session.replica, ticket.avoid
        cause: MoveCause
        if not isinstance(home, Replica) or not home.listed:
            cause = "gone"
        elif not home.breaker.closed:
            cause = "broken"
        elif avoid is not None and home.id in avoid:
            cause = "failed"
        elif len(self._usable) > 1:
            return self._less_loaded(ticket, session, home, now) or home
        else:
            return home
        wishes: list[Callable[[Replica], bool]] = [lambda one: one.accepts_request(now), lambda _: True]
        if avoid is not None:
            # Retry a replica that failed it rather than none.
            wishes = [
                lambda one: one.id not in avoid and one.accepts_request(now),
                lambda one: one.id not in avoid,
                *wishes,
            ]
        for fits in wishes:
            if chosen := self.sessions.choose(ticket.session_id, session, self._usable, fits):
                if chosen is not home:
                    self._on_move(cause)
                self._settle(session, chosen, ticket.tokens)
                return chosen
        return None

    def _less_loaded(self, ticket: Ticket, session: Session, home: Replica, now: float) -> Replica | None:
        def takes(replica: Replica) -> bool:
            return replica is not home and replica.accepts_request(now)

        least = self._usable.least_load(takes)
        if least is None:
            return None
        full = ticket.tokens < SHORT_CONTEXT_TOKENS and not home.accepts_request(now)
        if not full and not self._is_crowded(home.load - 1, least, ticket.tokens):
            return None
        chosen = self.sessions.choose(
            ticket.session_id,
            session,
            self._usable,
            lambda one: takes(one) and self._has_room(one, ticket.tokens),
            most=acceptable_load(least),
        )
        if chosen is None:
            return None
        self._on_move("overload")
        self._settle(session, chosen, ticket.tokens)
        return chosen

    def _is_crowded(self, others: int, least: int, tokens: int) -> bool:
        """True if a context should leave a replica with so many others for one with the least load."""
        if tokens < SHORT_CONTEXT_TOKENS:
            # Twice the margin of a first assignment, so that trajectories do not move back and forth.
            return others > 2 * acceptable_load(least) - least
        return others > crowded_load(least)

    def _has_room(self, replica: Replica, tokens: int) -> bool:
        return replica.has_room(tokens)

    def _settle(self, session: Session, replica: Replica, tokens: int) -> None:
        before = session.replica
        self.sessions.assign(session, replica, tokens)
        if before is not replica:
            self._note_change(before)
            self._remove_if_unused(before)

    def _begin(self, ticket: Ticket, session: Session, replica: Replica) -> None:
        ticket.session = session
        ticket.replica = replica
        ticket._epoch = replica.window.begin()
        self.in_flight += 1
        session.in_flight += 1
        self.sessions.set_tokens(session, ticket.tokens)

    def _grant(self, ticket: Ticket, session: Session, replica: Replica) -> None:
        ticket.waiting = False
        self.waiting -= 1
        self._begin(ticket, session, replica)
        ticket.wake()

    def _wait(self, ticket: Ticket, queue: deque[Ticket]) -> bool:
        ticket.waiting = True
        self.waiting += 1
        queue.append(ticket)
        return False

    def _end(self, ticket: Ticket) -> tuple[Replica, Session]:
        replica, session = ticket.replica, ticket.session
        assert replica is not None
        assert session is not None
        replica.window.end()
        self.in_flight -= 1
        session.in_flight -= 1
        return replica, session

    def _reroute(self, replica: Replica, now: float) -> None:
        """Reassign the requests that wait for a replica that takes no more."""
        self._refresh(replica)
        self._unassigned.extend(ticket for ticket in replica.queue if ticket.waiting)
        replica.queue.clear()
        self._dispatch_unassigned(now)
        self._dispatch_new(now)

    def _remove_if_unused(self, replica: ReplicaLoad | None) -> None:
        """Forget a replica that is not listed and has no trajectories or requests of ours."""
        if (
            isinstance(replica, Replica)
            and not replica.listed
            and not replica.sessions
            and not replica.window.in_flight
        ):
            self.replicas.pop(replica.id, None)

    def _refresh(self, replica: Replica) -> None:
        if replica.usable:
            self._usable.add(replica)
        else:
            self._usable.remove(replica)
