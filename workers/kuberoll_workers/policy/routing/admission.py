"""Who may send a request now, where to, and who waits. Pure: time is given, and waiters are woken by being called.

A turn goes to its trajectory's home, and waits there while the home takes no more. A new trajectory waits, first come
first served, until a replica has room for one more request and for its context; a replica on which nothing is under way
always has room for one, so that nobody waits for ever, whatever the others wait for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kuberoll_workers.policy.routing.breaker import Breaker
from kuberoll_workers.policy.routing.sessions import (
    YOUNG_TOKENS,
    Cause,
    Place,
    Session,
    SessionTable,
    bound,
)
from kuberoll_workers.policy.routing.window import Window

WINDOW = 1024
"""Requests in flight at a replica that does not say how many it takes."""

_LASTING_REFUSALS = 8


class Member(Place):
    """A replica as somewhere to send requests.

    Attributes:
        listed: Discovery knows it; one that left finishes what it has.
        budget: For how many resident tokens it has room; 0: unknown.
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

    def takes(self, now: float) -> bool:
        """Whether it takes one more request of a trajectory that lives there."""
        window = self.window
        return window.in_flight < window.limit and now >= window.resume_at

    def fits(self, tokens: int) -> bool:
        """Whether it has room for a new trajectory's context."""
        return not self.budget or not self.window.in_flight or self.resident + tokens <= self.budget


class Ticket:
    """One request that wants to be sent.

    Attributes:
        member: Where to send it, once it may be sent.
        avoid: Replicas that failed it.
        wake: Called when it may be sent after it had to wait.
    """

    __slots__ = ("_epoch", "avoid", "member", "session", "session_id", "tokens", "waiting", "wake")

    def __init__(self, session_id: str, tokens: int, wake: Callable[[], Any] = lambda: None) -> None:
        self.session_id = session_id
        self.tokens = tokens
        self.wake = wake
        self.session: Session | None = None
        self.member: Member | None = None
        self.avoid: set[str] | None = None
        self.waiting = False
        self._epoch = 0


class Admission:
    """All replicas, all trajectories, and who waits for what."""

    def __init__(
        self,
        *,
        sticky: bool = True,
        moved: Callable[[Cause], None] = lambda _: None,
        sessions: SessionTable | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin without a replica.

        Args:
            sticky: False: a trajectory has a home for as long as one request.
            moved: Told of each trajectory that gets another home.
            seed: Of the jitter of pauses; None: any.
        """
        self.members: dict[str, Member] = {}
        self.sessions = sessions if sessions is not None else SessionTable()
        self.waiting = 0
        self._sticky = sticky
        self._moved = moved
        self._draw = random.Random(seed)
        self._usable: list[Member] = []
        # Turns of trajectories that have lost their home and find no other.
        self._homeless: deque[Ticket] = deque()
        self._new: deque[Ticket] = deque()

    @property
    def in_flight(self) -> int:
        return sum(member.window.in_flight for member in self.members.values())

    def ask(self, ticket: Ticket, now: float) -> bool:
        """Whether a request may be sent, to `ticket.member`, now; else it is woken later, or withdrawn."""
        session = self.sessions.find(ticket.session_id)
        ticket.session = session
        ticket.member = None
        if session is None:
            if not self._new and self._admit(ticket, now):
                return True
            return self._wait(ticket, self._new)
        home = self._home(ticket, session, now)
        if home is None:
            return self._wait(ticket, self._homeless)
        if not home.queue and home.takes(now):
            self._begin(ticket, session, home)
            return True
        return self._wait(ticket, home.queue)

    def withdraw(self, ticket: Ticket) -> None:
        """A request that waits is not wanted any more."""
        if ticket.waiting:
            # It stays in its queue, to be passed over.
            ticket.waiting = False
            self.waiting -= 1

    def answered(self, ticket: Ticket, tokens: int, now: float, *, load: int | None = None) -> None:
        """A request was answered.

        Args:
            tokens: Of the context, the answer included.
            load: Requests that the replica had besides it, as it said.
        """
        member, session = self._end(ticket)
        member.window.succeeded()
        member.breaker.succeeded()
        if load is not None:
            member.outside = max(0, load - member.window.in_flight)
        session.deaths = 0
        self.sessions.grown(session, tokens)
        if not self._sticky:
            self.sessions.release(ticket.session_id)
        self.pump(member, now)

    def failed(self, ticket: Ticket, now: float, *, blame: bool = True) -> bool:
        """A request was not answered.

        Args:
            blame: It is the replica's fault; else the request's own, or nobody's.

        Returns:
            Whether the replica's breaker opened by it.
        """
        member, _ = self._end(ticket)
        opened = blame and member.breaker.failed(now)
        if blame:
            ticket.avoid = (ticket.avoid or set()) | {member.id}
        if opened:
            self._lost(member, now)
        else:
            self.pump(member, now)
        return opened

    def refused(self, ticket: Ticket, now: float, *, retry_after: float | None = None) -> float:
        """A replica said "not now".

        Returns:
            Seconds after which `pump` is to be called for it.
        """
        member, _ = self._end(ticket)
        window = member.window
        pause = window.overloaded(ticket._epoch, now, retry_after=retry_after, draw=self._draw)
        # Where there is another one: else everybody would only wait longer.
        if window.refusals >= _LASTING_REFUSALS and len(self._usable) > 1:
            self.down(member, now)
        return pause

    def given_up(self, ticket: Ticket, now: float) -> None:
        """No more tries of a request; whoever calls this has said before how the last one ended."""
        if not self._sticky:
            self.ended(ticket.session_id, now)

    def down(self, member: Member, now: float) -> bool:
        """A replica was seen to be down; whether its breaker opened by it."""
        opened = member.breaker.failed(now, fatally=True)
        if opened:
            self._lost(member, now)
        return opened

    def ended(self, session_id: str, now: float) -> None:
        """A trajectory has ended."""
        session = self.sessions.find(session_id)
        if session is not None:
            home = session.place
            self.sessions.release(session_id)
            self._leave(home)
            self._pump_new(now)

    def join(self, member: Member, now: float) -> None:
        """A replica is there."""
        self.members[member.id] = member
        self._refresh()
        self.pump(member, now)

    def list(self, names: Iterable[str], now: float) -> None:
        """Exactly these of the replicas are to get requests."""
        listed = set(names)
        changed = [member for member in self.members.values() if member.listed != (member.id in listed)]
        # All of them first: what moves because of one is not to empty another that is about to be listed again.
        for member in changed:
            member.listed = not member.listed
        self._refresh()
        for member in changed:
            if member.listed:
                self.pump(member, now)
            else:
                self._lost(member, now)
        for member in list(self.members.values()):
            self._leave(member)

    def closed(self, member: Member, now: float) -> None:
        """A replica's breaker was closed again."""
        self._refresh()
        self.pump(member, now)

    def pump(self, member: Member, now: float) -> None:
        """Wake those who may be sent since something changed at a replica."""
        queue = member.queue
        while queue and member.takes(now):
            ticket = queue.popleft()
            if ticket.waiting and ticket.session is not None:
                self._grant(ticket, ticket.session, member)
        if self._homeless:
            self._pump_homeless(now)
        if self._new:
            self._pump_new(now)
        if not member.listed:
            self._leave(member)

    def _pump_homeless(self, now: float) -> None:
        if not self._usable:
            return
        homeless, self._homeless = self._homeless, deque()
        for ticket in homeless:
            if ticket.waiting and ticket.session is not None:
                home = self._home(ticket, ticket.session, now)
                if home is None:
                    self._homeless.append(ticket)
                elif home.queue or not home.takes(now):
                    home.queue.append(ticket)
                else:
                    self._grant(ticket, ticket.session, home)

    def _pump_new(self, now: float) -> None:
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
        sessions, tokens, avoid = self.sessions, ticket.tokens, ticket.avoid
        candidates: list[Place] = [member for member in self._usable if member.takes(now) and member.fits(tokens)]
        if avoid and len(candidates) > 1:
            candidates = [member for member in candidates if member.id not in avoid] or candidates
        place = sessions.choose(ticket.session_id, None, candidates)
        if not isinstance(place, Member):
            return False
        session = sessions.find(ticket.session_id)
        if session is None:
            session = sessions.new(ticket.session_id)
        sessions.settle(session, place, tokens)
        self._begin(ticket, session, place)
        return True

    def _home(self, ticket: Ticket, session: Session, now: float) -> Member | None:
        """Where a known trajectory's next request goes, moving it where it has to, or may; None: nowhere yet."""
        home, avoid = session.place, ticket.avoid
        cause: Cause
        if not isinstance(home, Member) or not home.listed:
            cause = "gone"
        elif not home.breaker.closed:
            cause = "broken"
        elif avoid is not None and home.id in avoid:
            cause = "failed"
        elif ticket.tokens < YOUNG_TOKENS and len(self._usable) > 1:
            return self._better(ticket, session, home, now) or home
        else:
            return home
        usable = [member for member in self._usable if avoid is None or member.id not in avoid]
        if not usable:
            # Better once more to one that failed than nowhere.
            usable = self._usable
        taking: list[Place] = [member for member in usable if member.takes(now)]
        place = self.sessions.choose(ticket.session_id, session, taking or usable)
        if isinstance(place, Member):
            if place is not home:
                self._moved(cause)
            self._settle(session, place, ticket.tokens)
            return place
        return None

    def _better(self, ticket: Ticket, session: Session, home: Member, now: float) -> Member | None:
        taking = [member for member in self._usable if member is not home and member.takes(now)]
        if not taking:
            return None
        least = min([member.load for member in taking])
        # Twice the margin of a first home, lest it move to and fro.
        crowded = home.load - 1 > 2 * bound(least) - least
        if not crowded and home.takes(now):
            return None
        places: list[Place] = [
            member for member in taking if member.load <= bound(least) and member.fits(ticket.tokens)
        ]
        place = self.sessions.choose(ticket.session_id, session, places)
        if not isinstance(place, Member):
            return None
        self._moved("overload")
        self._settle(session, place, ticket.tokens)
        return place

    def _settle(self, session: Session, place: Member, tokens: int) -> None:
        before = session.place
        self.sessions.settle(session, place, tokens)
        if before is not place:
            self._leave(before)

    def _begin(self, ticket: Ticket, session: Session, member: Member) -> None:
        ticket.session = session
        ticket.member = member
        ticket._epoch = member.window.begin()
        session.in_flight += 1
        self.sessions.grown(session, ticket.tokens)

    def _grant(self, ticket: Ticket, session: Session, member: Member) -> None:
        ticket.waiting = False
        self.waiting -= 1
        self._begin(ticket, session, member)
        ticket.wake()

    def _wait(self, ticket: Ticket, queue: deque[Ticket]) -> bool:
        ticket.waiting = True
        self.waiting += 1
        queue.append(ticket)
        return False

    def _end(self, ticket: Ticket) -> tuple[Member, Session]:
        member, session = ticket.member, ticket.session
        assert member is not None
        assert session is not None
        member.window.end()
        session.in_flight -= 1
        return member, session

    def _lost(self, member: Member, now: float) -> None:
        """A replica takes nothing any more: who waits there goes elsewhere."""
        self._refresh()
        self._homeless.extend(ticket for ticket in member.queue if ticket.waiting)
        member.queue.clear()
        self._pump_homeless(now)
        self._pump_new(now)

    def _leave(self, place: Place | None) -> None:
        """Forget a replica that is not listed and has nothing of ours any more."""
        if isinstance(place, Member) and not place.listed and not place.sessions and not place.window.in_flight:
            self.members.pop(place.id, None)

    def _refresh(self) -> None:
        self._usable = [member for member in self.members.values() if member.usable]
