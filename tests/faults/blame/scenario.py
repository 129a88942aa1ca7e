"""A scenario: what happens to one trajectory, and whose doing that is by common sense, not by the code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to one trajectory.

    Attributes:
        name: In words, with all that was drawn.
        stage: Which run plays it: `judge`, `engine`, `bad`, `program`, `remote`, …
        kind: Whose doing it is.
        reasons: Those that may be named; empty: any of the kind.
        once: It happens once: the trajectory must finish with its reward, and with an incident of the kind.
        reward: The right one; None: any, where the policy's doing is no failure.
        metadata: Of the row.
        answer: The policy's response.
        engine: What the engine does, a part of its URL; empty: it answers.
    """

    name: str
    stage: str
    kind: str
    reasons: tuple[str, ...] = ()
    once: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    answer: str = "x"
    engine: str = ""

    def wrong(self, found: TrajectoryRecord | FailureRecord | DroppedRecord) -> str | None:
        """What is wrong about how it was judged; None: nothing."""
        if self.kind == "policy" and not self.reasons:
            return self._wrong_end(found)
        if self.once:
            return self._wrong_end(found) or self._wrong_incidents(found)
        if not isinstance(found, FailureRecord):
            return self._says(found, "no failure")
        return self._wrong_cause(found.kind, found.reason, found)

    def _wrong_end(self, found: Any) -> str | None:
        if not isinstance(found, TrajectoryRecord):
            return self._says(found, "not finished")
        if self.reward is not None and found.total_reward != self.reward:
            return self._says(found, f"reward {found.total_reward}, not {self.reward}")
        return None

    def _wrong_incidents(self, found: Any) -> str | None:
        incidents = list(found.incidents or [])
        if len(incidents) != 1:
            return self._says(found, f"{len(incidents)} incidents")
        (incident,) = incidents
        return self._wrong_cause(incident.kind, incident.reason, found)

    def _wrong_cause(self, kind: str, reason: str | None, found: Any) -> str | None:
        if kind != self.kind or (self.reasons and reason not in self.reasons):
            return self._says(found, f"{kind} {reason}, not {self.kind} {'|'.join(self.reasons)}")
        return None

    def _says(self, found: Any, words: str) -> str:
        said = getattr(found, "cause", "") or [one.text for one in found.incidents or ()]
        return f"{self.name}: {words}: {str(said)[:200]}"
