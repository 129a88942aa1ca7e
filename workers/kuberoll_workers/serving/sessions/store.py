"""The sessions of a replica: opened, called in, closed, and forgotten some time after that."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.serving.openai_api.exchange import Sampled
from kuberoll_workers.serving.sessions.limits import CallLimits
from kuberoll_workers.serving.sessions.tree import CallTree

if TYPE_CHECKING:
    from vllm import SamplingParams

IDLE_SECONDS: Final = 3600.0
"""Time without a call after which a session is closed, unless it asks for another."""

MAX_SESSIONS: Final = 4096
MAX_CALLS: Final = 4096
"""Maximum number of responses of one session."""

MAX_TOKENS: Final = 64 << 20
"""Maximum number of tokens of all sessions together."""


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
    """

    def __init__(self, identity: str, settings: SessionSettings, *, now: float, count: Callable[[int], None]) -> None:
        """
        Args:
            now: Unix time, seconds.
            count: Called with the number of tokens that each response adds.
        """
        self.identity = identity
        self.token = secrets.token_urlsafe(32)
        self.opened = now
        self.tree = CallTree()
        self.idle_seconds = IDLE_SECONDS if settings.idle_seconds is None else settings.idle_seconds
        self.limits = CallLimits(settings)
        self.last_used = now
        self.closed_at: float | None = None
        self._count = count

    def record(self, sampled: Sampled) -> None:
        """Store a response, unless the session was closed before it ended."""
        if self.closed_at is None:
            before = self.tree.tokens
            self.tree.add(sampled)
            self._count(self.tree.tokens - before)

    def expire(self, now: float) -> bool:
        """Close the session if nobody has called it for its `idle_seconds`; True once it is to be forgotten."""
        if self.closed_at is None and now - self.last_used > self.idle_seconds:
            self.closed_at = self.last_used + self.idle_seconds
        return self.closed_at is not None and now - self.closed_at > self.idle_seconds

    def admit(self, params: SamplingParams, prompt: int) -> None:
        """See `CallLimits.admit`."""
        self.limits.admit(params, prompt)

    def complete(self, path: str, body: dict[str, Any]) -> bool:
        """See `CallLimits.complete`."""
        return self.limits.complete(path, body)

    def state(self) -> dict[str, Any]:
        """Its state as plain values."""
        calls = self.tree.calls
        return {
            "id": self.identity,
            "closed": self.closed_at is not None,
            "opened_at": self.opened,
            "calls": len(calls),
            "refused": self.limits.refused,
            "paths": sum(1 for _ in self.tree.leaves()),
            "tokens": self.tree.tokens,
            "continuity": dict(Counter(call.sampled.continuity for call in calls)),
        }


class Sessions:
    """All sessions of a replica.

    A session that is closed, or was not called for its `idle_seconds`, takes no more calls. What it sampled is kept
    for another `idle_seconds`, so that a caller whose request to close it was interrupted can repeat the request.
    """

    def __init__(
        self,
        prefix: str,
        *,
        clock: Callable[[], float] = time.time,
        sessions: int = MAX_SESSIONS,
        calls: int = MAX_CALLS,
        tokens: int = MAX_TOKENS,
    ) -> None:
        """
        Args:
            prefix: Beginning of the ids, which tells the replicas of a policy apart.
            clock: Unix time, seconds.
        """
        self._prefix, self._clock = prefix, clock
        self._most_sessions, self._most_calls, self._most_tokens = sessions, calls, tokens
        self._sessions: dict[str, Session] = {}
        self._tokens = 0

    def open(self, settings: SessionSettings | None = None) -> Session:
        """Open a session; `settings` None: without limits and defaults of its own.

        Raises:
            SessionRefused: There are too many.
        """
        self._forget()
        if len(self._sessions) >= self._most_sessions:
            raise SessionRefused(429, f"{len(self._sessions):,} sessions are open or were closed recently; retry later")
        name = f"{self._prefix}-{secrets.token_hex(12)}"
        session = Session(name, settings or SessionSettings(), now=self._clock(), count=self._count)
        self._sessions[session.identity] = session
        return session

    def find(self, identity: str) -> Session:
        """Find a session, open or closed.

        Raises:
            SessionRefused: There is none of this id, or it was forgotten.
        """
        session = self._sessions.get(identity)
        # Only this one: a call must not cost more, the more sessions there are.
        if session is None or session.expire(self._clock()):
            where = "" if identity.startswith(f"{self._prefix}-") else "; use the base URL that opening it returned"
            raise SessionRefused(404, f"session {identity[:100]}: this replica does not have it{where}")
        return session

    def enter(self, identity: str) -> Session:
        """Find a session for a call in it.

        Raises:
            SessionRefused: There is none of this id, it is closed, or it or the replica is full.
        """
        session = self.find(identity)
        if session.closed_at is not None:
            raise SessionRefused(410, f"session {identity} is closed")
        if len(session.tree.calls) >= self._most_calls:
            raise SessionRefused(429, f"session {identity} has {self._most_calls:,} responses, which is the maximum")
        if self._tokens >= self._most_tokens:
            self._forget()
        if self._tokens >= self._most_tokens:
            raise SessionRefused(429, f"the sessions of this replica have {self._most_tokens:,} tokens; retry later")
        session.last_used = self._clock()
        return session

    def close(self, identity: str) -> Session:
        """Close a session; closing a closed one changes nothing.

        Raises:
            SessionRefused: There is none of this id.
        """
        session = self.find(identity)
        if session.closed_at is None:
            session.closed_at = self._clock()
        return session

    def opens(self, identity: str, token: str) -> bool:
        """True if a token is that of a session."""
        session = self._sessions.get(identity)
        return session is not None and hmac.compare_digest(session.token.encode(), token.encode())

    def _count(self, tokens: int) -> None:
        self._tokens += tokens

    def _forget(self) -> None:
        now = self._clock()
        for session in [session for session in self._sessions.values() if session.expire(now)]:
            del self._sessions[session.identity]
            self._tokens -= session.tree.tokens
