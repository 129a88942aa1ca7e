"""Prompt groups under way: when one is complete, what happens to the rest of it, and which groups are wanted at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.rollout import InFlight, Rollout

Result = TrajectoryRecord | FailureRecord | DroppedRecord

DueResult = tuple[InFlight, Result]

GroupFilter = Callable[[Sequence[TrajectoryRecord]], bool]
"""Whether a complete group is worth keeping."""


def rewards_differ(group: Sequence[TrajectoryRecord]) -> bool:
    """Keep groups whose rewards are not all equal: the others have an advantage of 0 in GRPO and teach nothing.

    The filter of DAPO ("DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, dynamic sampling).
    """
    return any(record.total_reward != group[0].total_reward for record in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """What makes a group count.

    Attributes:
        atomic: All of a group or nothing: when it cannot be completed any more, its other samples fail with it.
        keep: Asked about each complete group; one that it refuses is dropped.
        drop_budget: Most groups that `keep` may drop; then all are kept. None: no bound.
        wanted: Stop when so many groups are kept: each dropped one is replaced by the next of the source, and no more
            are begun than can be wanted. None: as many as there are.
    """

    atomic: bool = False
    keep: GroupFilter | None = None
    drop_budget: int | None = None
    wanted: int | None = None

    @property
    def defers_results(self) -> bool:
        """Whether results have to wait for their group."""
        return self.atomic or self.keep is not None


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """What became of a prompt group.

    Attributes:
        kept: The trajectories that count, in the order in which they finished.
        failed: Those given up.
        dropped: Those not wanted: begun beyond what the group needed, or all of a group that was filtered out.
    """

    group: SampleGroup
    kept: list[TrajectoryRecord] = field(default_factory=list)
    failed: list[FailureRecord] = field(default_factory=list)
    dropped: list[DroppedRecord] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Sort one result in."""
        if isinstance(result, TrajectoryRecord):
            self.kept.append(result)
        elif isinstance(result, FailureRecord):
            self.failed.append(result)
        else:
            self.dropped.append(result)


class GroupQuota:
    """How many groups may be begun and dropped; shared by all groups of a run."""

    def __init__(self, policy: GroupPolicy) -> None:
        self._policy = policy
        self._begun = 0
        self._replaced = 0
        self._dropped = 0

    @property
    def open(self) -> bool:
        """Whether one more group may be begun now."""
        return self._policy.wanted is None or self._begun < self._policy.wanted + self._replaced

    def begin(self) -> None:
        self._begun += 1

    def replace(self) -> None:
        """A group came to nothing: another one may be begun in its place."""
        self._replaced += 1

    def drops(self, group: Sequence[TrajectoryRecord]) -> bool:
        """Whether a complete group is dropped; counts it against the budget."""
        keep, budget = self._policy.keep, self._policy.drop_budget
        if keep is None or (budget is not None and self._dropped >= budget) or keep(group):
            return False
        self._dropped += 1
        return True


class GroupRun:
    """One group from its first sample to its end.

    Attributes:
        pending_results: Results that are due but not yet taken.
        reported: Whether the group's own result has been handed on.
    """

    def __init__(self, group: SampleGroup, policy: GroupPolicy, quota: GroupQuota, rollout: Rollout) -> None:
        self.result = GroupResult(group=group)
        self._policy = policy
        self._quota = quota
        self._rollout = rollout
        self._todo = deque(group.samples)
        self._in_flight: set[InFlight] = set()
        self._finished: list[tuple[InFlight, TrajectoryRecord]] = []
        self._failure: FailureRecord | None = None
        self.pending_results = 0
        self.reported = False

    @property
    def closed(self) -> bool:
        """Whether nothing of it is left to be run."""
        return not self._todo and not self._in_flight

    @property
    def has_more(self) -> bool:
        """Whether some of it is still to be begun."""
        return bool(self._todo)

    @property
    def finished(self) -> list[InFlight]:
        """The trajectories that are to be kept so far."""
        return [flight for flight, _ in self._finished]

    def begin(self) -> InFlight | None:
        """The next sample's trajectory; None when there is none left to be begun.

        Raises:
            KeyError, ValueError: The sample cannot be run.
        """
        if not self._todo:
            return None
        flight = self._admit(self._todo.popleft())
        self._in_flight.add(flight)
        return flight

    def end(self, flight: InFlight) -> list[DueResult]:
        """Take a trajectory that is over; the results that are due now, each counted in the metrics, by trajectory.

        Siblings that are not wanted any more are stopped; they come here in their turn.
        """
        self._in_flight.discard(flight)
        due: list[DueResult] = []
        result = flight.result()
        if isinstance(result, TrajectoryRecord):
            if len(self._finished) >= self.result.group.keep:
                self._due(flight, flight.trajectory.dropped_record("oversampled"), due)
            else:
                self._finished.append((flight, result))
                if not self._policy.defers_results:
                    self._due(flight, result, due)
        else:
            if isinstance(result, FailureRecord) and self._failure is None:
                self._failure = result
            self._due(flight, result, due)
        self._stop_what_is_not_wanted(due)
        if self.closed and self._policy.defers_results:
            self._decide(due)
        return due

    def _stop_what_is_not_wanted(self, due: list[DueResult]) -> None:
        keep = self.result.group.keep
        if len(self._finished) >= keep:
            self._todo.clear()
            for flight in tuple(self._in_flight):
                flight.stop("oversampled")
        elif self._policy.atomic and len(self._finished) + len(self._in_flight) + len(self._todo) < keep:
            for flight in tuple(self._in_flight):
                flight.stop(self._shared_failure())
            while self._todo:
                self._fail(self._admit(self._todo.popleft()), due)

    def _decide(self, due: list[DueResult]) -> None:
        complete = len(self._finished) >= self.result.group.keep
        records = [record for _, record in self._finished]
        if self._policy.atomic and not complete:
            self._quota.replace()
            for flight, _ in self._finished:
                self._fail(flight, due)
        elif complete and not self.result.group.decided and self._quota.drops(records):
            self._quota.replace()
            for flight, _ in self._finished:
                self._due(flight, flight.trajectory.dropped_record("filtered"), due)
        else:
            for flight, record in self._finished:
                self._due(flight, record, due)

    def _fail(self, flight: InFlight, due: list[DueResult]) -> None:
        flight.failure = self._shared_failure()
        self._due(flight, flight.result(), due)

    def _shared_failure(self) -> TrajectoryFailed:
        first = self._failure
        assert first is not None
        cause = f"its group lost sample {first.rollout_index}: {first.cause}"
        return TrajectoryFailed(cause, kind=first.kind, stage="group", tries=1)

    def _due(self, flight: InFlight, result: Result, due: list[DueResult]) -> None:
        flight.count_result(result)
        self.result.add(result)
        due.append((flight, result))

    def _admit(self, sample: Sample) -> InFlight:
        return self._rollout.admit(sample, deferred=self._policy.defers_results)
