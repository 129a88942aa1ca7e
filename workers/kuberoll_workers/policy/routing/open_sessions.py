"""Agents' sessions that are open, at their replicas. Pure.

What an agent asks of a replica goes past this worker, so an agent that waits for a replica that is gone must be told.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict


class OpenSessions:
    """The replica of each open session, and the scope of the episode that depends on it."""

    def __init__(self) -> None:
        self._replicas: dict[str, str] = {}
        self._sessions: defaultdict[str, dict[str, asyncio.Timeout | None]] = defaultdict(dict)
        self._urls: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica: str) -> bool:
        """True if a replica has open sessions."""
        return bool(self._sessions.get(replica))

    def count(self, replica: str) -> int:
        """Number of open sessions at a replica."""
        return len(self._sessions.get(replica, ()))

    def add(self, session: str, replica: str, url: str) -> None:
        """Record that a session was opened at a replica, whose base URL is `url`."""
        self._replicas[session] = replica
        self._sessions[replica][session] = None
        self._urls[replica] = url

    def attend(self, session: str, scope: asyncio.Timeout) -> str | None:
        """Have a scope end when the session's replica is lost; the replica's id, None if the session is not open."""
        replica = self._replicas.get(session)
        if replica is not None:
            self._sessions[replica][session] = scope
        return replica

    def remove(self, session: str) -> str | None:
        """Forget a session; the replica that has no more of them, if so."""
        replica = self._replicas.pop(session, None)
        if replica is None:
            return None
        self._sessions[replica].pop(session)
        if self._sessions[replica]:
            return None
        del self._sessions[replica], self._urls[replica]
        return replica

    def url(self, replica: str) -> str | None:
        """Base URL of a replica with open sessions."""
        return self._urls.get(replica)

    def scopes(self, replica: str) -> list[asyncio.Timeout]:
        """The scopes of a replica's sessions."""
        return [scope for scope in self._sessions.get(replica, {}).values() if scope is not None]
