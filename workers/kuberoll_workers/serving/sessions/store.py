"""The sessions of a replica: opened, called in, closed, and then remembered for as long as there is room."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.serving.openai_api.exchange import Exchange, Sampled
from kuberoll_workers.serving.sessions.limits import CallLimits
from kuberoll_workers.serving.sessions.tree import CallTree

if TYPE_CHECKING:
    from vllm import SamplingParams

IDLE_SECONDS: Final = 3600.0
"""Time without a call after which a session is closed, unless it asks for another."""

MAX_SESSIONS: Final = 4096
"""Maximum number of open sessions."""

MAX_CALLS: Final = 4096
"""Maximum number of responses of one session."""

MAX_BYTES: Final = 1 << 30
"""Maximum size of all open sessions together: about 100 million tokens."""

MAX_PATH_TOKENS: Final = 16 << 20
"""Maximum number of tokens of one session's trajectories, in which branches repeat what they have in common."""

CLOSED_SESSIONS: Final = 4096
CLOSED_BYTES: Final = 256 << 20
"""Bounds of what is remembered of closed sessions."""

_UNANSWERED: Final = 256


class SessionRefused(Exception):
    """A request that a session, or the replica, refuses.

    Attributes:
        status: HTTP status: 404 for an unknown session, 410 for a closed one, 429 for one call or session too many.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Session:
    """What was sampled for one caller.

    Attributes:
        token: A right to call in this session alone.
        opened: Unix time, seconds.
        closed: It takes no more calls, and what they sample is not recorded.
    """

    def __init__(
        self, identity: str, settings: SessionSettings, *, clock: Callable[[], float], count: Callable[[int], None]
    ) -> None:
        """
        Args:
            clock: Unix time, seconds.
            count: Called with the number of bytes that each response adds.
        """
        self.identity = identity
        self.token = secrets.token_urlsafe(32)
        self.opened = self.last_used = clock()
        self.tree = CallTree()
        self.idle_seconds = IDLE_SECONDS if settings.idle_seconds is None else settings.idle_seconds
        self.limits = CallLimits(settings)
        self.closed = False
        self._clock, self._count = clock, count
        # By request: its answers, as the calls in them and the number of calls that they took; and how many of the last
        # requests were not answered.
        self._answers: dict[bytes, list[tuple[list[int], int]]] = {}
        self._unanswered: OrderedDict[bytes, int] = OrderedDict()
        # Requests whose answer the engine did not finish, and that were not repeated with more success.
        self._aborted: OrderedDict[bytes, None] = OrderedDict()

    def record(self, sampled: Sampled, exchange: Exchange | None = None) -> None:
        """See `RecordedSession.record`; nothing is stored in a closed session."""
        if self.closed:
            return
        if exchange is not None and exchange.request and not exchange.calls_recorded:
            self._record_answer(exchange)
        before = self.tree.size
        if exchange is not None:
            self._aborted.pop(exchange.request, None)
            exchange.calls_recorded.append(len(self.tree.calls))
        self.tree.add(sampled)
        self._count(self.tree.size - before)
        # The time of a long call is no time without one.
        self.last_used = self._clock()

    def _record_answer(self, exchange: Exchange) -> None:
        request = exchange.request
        answers = self._answers.setdefault(request, [])
        if exchange.repeats:
            if self._unanswered.get(request):
                self._unanswered[request] -= 1
            elif answers and self.tree.lose(answers[-1][0]):
                _, taken = answers.pop()
                self.limits.release(taken)
        answers.append((exchange.calls_recorded, exchange.admitted))

    def release(self, exchange: Exchange) -> None:
        """See `RecordedSession.release`."""
        self.limits.release(exchange.admitted)
        if exchange.aborted:
            self._aborted[exchange.request] = None
            if len(self._aborted) > _UNANSWERED:
                self._aborted.popitem(last=False)
        if not self.closed and exchange.request:
            self._unanswered[exchange.request] = self._unanswered.pop(exchange.request, 0) + 1
            if len(self._unanswered) > _UNANSWERED:
                self._unanswered.popitem(last=False)

    def idle(self) -> bool:
        """True if nobody has called it for its `idle_seconds`."""
        return self._clock() - self.last_used > self.idle_seconds

    def admit(self, params: SamplingParams, prompt: int) -> None:
        """See `CallLimits.admit`."""
        self.limits.admit(params, prompt)

    def complete(self, path: str, body: dict[str, Any]) -> bool:
        """See `CallLimits.complete`."""
        return self.limits.complete(path, body)

    def state(self) -> dict[str, Any]:
        """Its state as plain values."""
        calls = [call for index, call in enumerate(self.tree.calls) if index not in self.tree.lost]
        return {
            "id": self.identity,
            "closed": self.closed,
            "opened_at": self.opened,
            "calls": len(calls),
            "lost": len(self.tree.lost),
            "aborted": len(self._aborted),
            "refused": self.limits.refused,
            "paths": sum(1 for _ in self.tree.leaves()),
            "tokens": self.tree.tokens,
            "continuity": dict(Counter(call.sampled.continuity for call in calls)),
        }


class ClosedSessions:
    """The sessions that were closed last, for callers whose request to close one was interrupted and is repeated.

    It holds at most so many sessions and bytes, drops the oldest, and refuses none: the newest is always held.
    """

    def __init__(self, *, sessions: int = CLOSED_SESSIONS, size: int = CLOSED_BYTES) -> None:
        self._most, self._most_bytes = max(1, sessions), size
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, identity: str) -> Session | None:
        """The session of an id; None: it was never closed, or it was dropped."""
        return self._sessions.get(identity)

    def add(self, session: Session) -> None:
        """Remember a session, and drop the oldest while there are too many."""
        self._sessions[session.identity] = session
        self.size += session.tree.size
        while len(self._sessions) > 1 and (len(self._sessions) > self._most or self.size > self._most_bytes):
            _, dropped = self._sessions.popitem(last=False)
            self.size -= dropped.tree.size


class Sessions:
    """All sessions of a replica.

    What is counted against the limits is exactly what is open: `len()` sessions of `size` bytes. A session that is
    closed, or was not called for its `idle_seconds`, takes no more calls, and frees its place and its bytes at once;
    what it sampled is remembered apart (`ClosedSessions`). Where the open sessions have too many bytes, only those are
    refused calls that have more than their share, `max_bytes / len()`.
    """

    def __init__(
        self,
        prefix: str,
        *,
        clock: Callable[[], float] = time.time,
        sessions: int = MAX_SESSIONS,
        calls: int = MAX_CALLS,
        max_bytes: int = MAX_BYTES,
        path_tokens: int = MAX_PATH_TOKENS,
        closed: ClosedSessions | None = None,
    ) -> None:
        """
        Args:
            prefix: Beginning of the ids, which tells the replicas of a policy apart.
            clock: Unix time, seconds.
            sessions, calls, max_bytes, path_tokens: Limits, as the constants of this module.
            closed: Holds the closed sessions; None: within the bounds of this module.
        """
        self._prefix, self._clock = prefix, clock
        self._most_sessions, self._most_calls, self._most_bytes = sessions, calls, max_bytes
        self._most_path_tokens = path_tokens
        self._open: dict[str, Session] = {}
        self._closed = ClosedSessions() if closed is None else closed
        self.size = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, settings: SessionSettings | None = None) -> Session:
        """Open a session; `settings` None: without limits and defaults of its own.

        Raises:
            SessionRefused: There are too many.
        """
        if len(self._open) >= self._most_sessions:
            self._close_idle()
        if len(self._open) >= self._most_sessions:
            raise SessionRefused(429, f"{len(self._open):,} sessions are open, which is the maximum; retry later")
        name = f"{self._prefix}-{secrets.token_hex(12)}"
        session = Session(name, settings or SessionSettings(), clock=self._clock, count=self._count)
        self._open[session.identity] = session
        return session

    def find(self, identity: str) -> Session:
        """Find a session, open or closed.

        Raises:
            SessionRefused: There is none of this id, or it was forgotten.
        """
        session = self._open.get(identity)
        # Only this one: a call must not cost more, the more sessions there are.
        if session is not None and session.idle():
            self._close(session)
        session = session or self._closed.find(identity)
        if session is None:
            where = "" if identity.startswith(f"{self._prefix}-") else "; use the base URL that opening it returned"
            raise SessionRefused(404, f"session {identity[:100]}: this replica does not have it{where}")
        return session

    def enter(self, identity: str) -> Session:
        """Find a session for a call in it.

        Raises:
            SessionRefused: There is none of this id, it is closed, or it or the replica is full.
        """
        session = self.find(identity)
        if session.closed:
            raise SessionRefused(410, f"session {identity} is closed")
        if len(session.tree.calls) >= self._most_calls:
            raise SessionRefused(429, f"session {identity} has {self._most_calls:,} responses, which is the maximum")
        if session.tree.path_tokens >= self._most_path_tokens:
            raise SessionRefused(
                429,
                f"the trajectories of session {identity} have {session.tree.path_tokens:,} tokens, with those that "
                f"branches have in common; the maximum is {self._most_path_tokens:,}",
            )
        if self.size >= self._most_bytes:
            self._close_idle()
        if self.size >= self._most_bytes and session.tree.size * len(self._open) >= self._most_bytes:
            raise SessionRefused(
                429, f"the open sessions of this replica have {self.size:,} bytes, and this one its share; retry later"
            )
        session.last_used = self._clock()
        return session

    def close(self, identity: str) -> Session:
        """Close a session; closing a closed one changes nothing.

        Raises:
            SessionRefused: There is none of this id.
        """
        session = self.find(identity)
        if not session.closed:
            self._close(session)
        return session

    def is_open(self, identity: str) -> bool:
        """True if there is an open session of an id."""
        return identity in self._open

    def opens(self, identity: str, token: str) -> bool:
        """True if a token is that of a session, open or closed."""
        session = self._open.get(identity) or self._closed.find(identity)
        return session is not None and hmac.compare_digest(session.token.encode(), token.encode())

    def _count(self, size: int) -> None:
        self.size += size

    def _close(self, session: Session) -> None:
        session.closed = True
        del self._open[session.identity]
        self.size -= session.tree.size
        self._closed.add(session)

    def _close_idle(self) -> None:
        for session in [session for session in self._open.values() if session.idle()]:
            self._close(session)
