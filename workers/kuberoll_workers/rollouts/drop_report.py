"""Comparison of kept and dropped trajectories: those that finish first are shorter, and may score differently."""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import WHOLE_GROUP


@dataclass(slots=True)
class TrajectoryTotals:
    """Sums over trajectories, from which means are computed."""

    trajectories: int = 0
    turns: int = 0
    generated_tokens: int = 0
    reward: float = 0.0

    def add(self, record: TrajectoryRecord | DroppedRecord) -> None:
        """Count one trajectory."""
        self.trajectories += 1
        self.turns += record.turn_count
        self.generated_tokens += record.tokens.generated
        self.reward += record.total_reward

    def as_json(self) -> dict[str, float | int | None]:
        """Count and means; a mean over no trajectories is None."""
        count = self.trajectories
        return {
            "trajectories": count,
            "mean_turns": self.turns / count if count else None,
            "mean_generated_tokens": self.generated_tokens / count if count else None,
            "mean_total_reward": self.reward / count if count else None,
        }


class DropReport:
    """Totals of kept and of dropped trajectories.

    Of trajectories that were stopped early only the complete turns are known, so their lengths, and the bias, are
    lower bounds. `unfinished` is their number.
    """

    def __init__(self) -> None:
        self.kept = TrajectoryTotals()
        self.dropped: dict[str, TrajectoryTotals] = {}
        self.unfinished = 0

    @property
    def given_up(self) -> int:
        """Trajectories of groups that were given up as a whole."""
        return sum(lot.trajectories for reason, lot in self.dropped.items() if reason in WHOLE_GROUP)

    def add(self, record: TrajectoryRecord | DroppedRecord | FailureRecord) -> None:
        """Count one result; failures are neither kept nor dropped."""
        if isinstance(record, TrajectoryRecord):
            self.kept.add(record)
        elif isinstance(record, DroppedRecord):
            self.dropped.setdefault(record.reason, TrajectoryTotals()).add(record)
            self.unfinished += record.stop_reason is None

    def as_json(self) -> dict[str, object]:
        """`kept`, `dropped` by reason, and `unfinished`, the number of dropped trajectories that were stopped early."""
        return {
            "kept": self.kept.as_json(),
            "dropped": {reason: lot.as_json() for reason, lot in sorted(self.dropped.items())},
            "unfinished": self.unfinished,
        }
