"""What keeping the first finishers did to the data: they are shorter than those dropped, and may score differently."""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord


@dataclass(slots=True)
class TrajectoryTotals:
    """Trajectories added up: counts, and sums from which the means follow."""

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
        """Counts and means; a mean of nothing is None."""
        count = self.trajectories
        return {
            "trajectories": count,
            "mean_turns": self.turns / count if count else None,
            "mean_generated_tokens": self.generated_tokens / count if count else None,
            "mean_total_reward": self.reward / count if count else None,
        }


class DropReport:
    """Kept against dropped trajectories.

    Of those stopped on their way only the complete turns are known: their lengths are lower bounds, and so is the
    bias. `unfinished` says how many they are.
    """

    def __init__(self) -> None:
        self.kept = TrajectoryTotals()
        self.dropped: dict[str, TrajectoryTotals] = {}
        self.unfinished = 0

    @property
    def filtered(self) -> int:
        """Trajectories of groups that were filtered out."""
        lot = self.dropped.get("filtered")
        return 0 if lot is None else lot.trajectories

    def add(self, record: TrajectoryRecord | DroppedRecord | FailureRecord) -> None:
        """Count one result; failures are neither kept nor dropped."""
        if isinstance(record, TrajectoryRecord):
            self.kept.add(record)
        elif isinstance(record, DroppedRecord):
            self.dropped.setdefault(record.reason, TrajectoryTotals()).add(record)
            self.unfinished += record.stop_reason is None

    def as_json(self) -> dict[str, object]:
        """`kept`, `dropped` by reason, and `unfinished`, the number of dropped ones that were stopped on their way."""
        return {
            "kept": self.kept.as_json(),
            "dropped": {reason: lot.as_json() for reason, lot in sorted(self.dropped.items())},
            "unfinished": self.unfinished,
        }
