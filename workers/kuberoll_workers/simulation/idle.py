"""Idle time of the engines of a fleet by its cause."""

from __future__ import annotations

from typing import Final, Literal, get_args

EngineState = Literal["starting", "gone", "weights", "busy", "idle"]
"""What an engine does: it is not there yet, or no longer, it loads weights, it takes steps, or it has no request."""

IdleCause = Literal["no work", "environment", "admission", "weights", "tail", "cold start", "dead"]
"""Why an engine takes no steps.

`admission`: requests wait in workers; `tail`: all trajectories have begun, and the last ones are elsewhere;
`environment`: trajectories are in their environments; `no work`: fewer are in flight than there are replicas.
"""

CAUSES: Final = get_args(IdleCause)


def cause_of_idleness(*, waiting: int, stepping: int, unbegun: int) -> IdleCause:
    """Why an engine that is up has no request.

    Args:
        waiting: Requests of the whole fleet that wait in workers.
        stepping: Trajectories in their environments.
        unbegun: Trajectories that have not sent their first request.
    """
    if waiting:
        return "admission"
    if not unbegun:
        return "tail"
    return "environment" if stepping else "no work"


_OF_STATE: Final[dict[EngineState, IdleCause]] = {"starting": "cold start", "gone": "dead", "weights": "weights"}


class IdleLedger:
    """Engine seconds of a fleet: busy ones, and idle ones by cause.

    Attributes:
        waiting, stepping, unbegun: As in `cause_of_idleness`; changed by `count`.
    """

    def __init__(self, *, unbegun: int) -> None:
        self.waiting = 0
        self.stepping = 0
        self.unbegun = unbegun
        self.busy_seconds = 0.0
        self.idle_seconds: dict[IdleCause, float] = dict.fromkeys(CAUSES, 0.0)
        self._engines: dict[EngineState, int] = dict.fromkeys(get_args(EngineState), 0)
        self._since = 0.0

    def add(self, state: EngineState, now: float) -> None:
        """Add an engine."""
        self._settle(now)
        self._engines[state] += 1

    def remove(self, state: EngineState, now: float) -> None:
        """Remove an engine that another one has replaced."""
        self._settle(now)
        self._engines[state] -= 1

    def change(self, before: EngineState, after: EngineState, now: float) -> None:
        """Move an engine to another state."""
        if before != after:
            self._settle(now)
            self._engines[before] -= 1
            self._engines[after] += 1

    def count(self, now: float, *, waiting: int = 0, stepping: int = 0, unbegun: int = 0) -> None:
        """Add to the counts that decide on the cause."""
        self._settle(now)
        self.waiting += waiting
        self.stepping += stepping
        self.unbegun += unbegun

    def close(self, now: float) -> None:
        """Count the time until the end."""
        self._settle(now)

    def _settle(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed <= 0:
            return
        self._since = now
        engines = self._engines
        self.busy_seconds += elapsed * engines["busy"]
        for state, cause in _OF_STATE.items():
            if engines[state]:
                self.idle_seconds[cause] += elapsed * engines[state]
        if engines["idle"]:
            cause = cause_of_idleness(waiting=self.waiting, stepping=self.stepping, unbegun=self.unbegun)
            self.idle_seconds[cause] += elapsed * engines["idle"]
