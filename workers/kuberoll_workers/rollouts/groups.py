"""Prompt groups in progress: when a group is complete, what happens to its other samples, and how many are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.pace import oldest_version
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.run_ahead import RunAhead

Result = TrajectoryRecord | FailureRecord | DroppedRecord

DueResult = tuple[InFlight, Result]

GroupFilter = Callable[[Sequence[TrajectoryRecord]], bool]
"""A predicate on a complete group: True to keep it."""


def rewards_differ(group: Sequence[TrajectoryRecord]) -> bool:
    """True if the rewards of a group are not all equal: with equal rewards every advantage in GRPO is 0.

    The filter of DAPO ("DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, dynamic sampling).
    """
    return any(record.total_reward != group[0].total_reward for record in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Rules for completing, keeping and dropping prompt groups.

    Attributes:
        atomic: All of a group or nothing: when a group can no longer be completed, its other samples fail with it.
        keep: Called with each complete group; if it returns False, the group is dropped.
        drop_budget: Maximum number of groups that `keep` may drop; after that all are kept. None: no limit.
        wanted: Number of groups to keep; a dropped group is replaced by the next one of the source, and no more groups
            are started than needed. None: all groups of the source.
    """

    atomic: bool = False
    keep: GroupFilter | None = None
    drop_budget: int | None = None
    wanted: int | None = None

    @property
    def defers_results(self) -> bool:
        """True if results have to wait until their group is complete, whatever their environment."""
        return self.atomic or self.keep is not None


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """The result of a prompt group.

    Attributes:
        kept: Finished trajectories that were kept, in the order in which they finished.
        failed: Trajectories that failed permanently.
        dropped: Trajectories that were dropped: oversampled ones, or all of a group that was filtered out.
    """

    group: SampleGroup
    kept: list[TrajectoryRecord] = field(default_factory=list)
    failed: list[FailureRecord] = field(default_factory=list)
    dropped: list[DroppedRecord] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add one result to the list that it belongs to."""
        if isinstance(result, TrajectoryRecord):
            self.kept.append(result)
        elif isinstance(result, FailureRecord):
            self.failed.append(result)
        else:
            self.dropped.append(result)


class GroupQuota:
    """The number of groups that may be started and dropped; shared by all groups of a run."""

    def __init__(self, policy: GroupPolicy) -> None:
        self._policy = policy
        self._begun = 0
        self._replaced = 0
        self._dropped = 0

    def has_room(self, count: int) -> bool:
        """True if so many more groups may be started now."""
        return self._policy.wanted is None or self._begun + count <= self._policy.wanted + self._replaced

    def begin(self) -> None:
        self._begun += 1

    def replace(self) -> None:
        """Allow another group in place of one that was dropped or has failed."""
        self._replaced += 1

    def drops(self, group: Sequence[TrajectoryRecord]) -> bool:
        """True if a complete group is to be dropped; counts it against the budget."""
        keep, budget = self._policy.keep, self._policy.drop_budget
        if keep is None or (budget is not None and self._dropped >= budget) or keep(group):
            return False
        self._dropped += 1
        return True


class GroupRun:
    """One prompt group while its trajectories run.

    Attributes:
        pending_results: Number of results that the sink has not yet taken.
        closed: True if all of its trajectories have ended, and their results are final; see `decide`.
        started: Number of its trajectories that were started; each has one result when the group is closed.
    """

    def __init__(
        self, group: SampleGroup, policy: GroupPolicy, quota: GroupQuota, rollout: Rollout, run_ahead: RunAhead
    ) -> None:
        self.result = GroupResult(group=group)
        self._policy = policy
        self._quota = quota
        self._rollout = rollout
        self._run_ahead = run_ahead
        # The next one is the last. Lists, because a deque has room for 64, and a run may have ten thousand groups.
        self._todo = list(reversed(group.samples))
        self._in_flight: set[InFlight] = set()
        self._finished: list[tuple[InFlight, TrajectoryRecord]] = []
        # Finished trajectories whose results wait for the group.
        self._held: list[InFlight] = []
        self._failure: FailureRecord | None = None
        self._outages = 0
        self._stale = False
        # Samples of a stale group that will not be started.
        self._unstarted: list[Sample] = []
        self.pending_results = 0
        self.started = 0
        self.closed = False

    @property
    def oldest_version(self) -> int | None:
        """The lowest version of the weights that sampled a token of its trajectories, as far as they are known."""
        flights = (*self._in_flight, *self.finished)
        versions = (oldest_version(flight.trajectory.messages) for flight in flights)
        return min((version for version in versions if version is not None), default=None)

    def stop_stale(self) -> None:
        """Give the group up because it is too old; a group without a trajectory in flight is left as it is."""
        for flight in tuple(self._in_flight):
            flight.stop("stale")
            self._stale = self._stale or flight.drop_reason == "stale"
        if self._stale:
            self._unstarted, self._todo = self._todo, []

    @property
    def ended(self) -> bool:
        """True if none of its trajectories is running or waiting to start: then it is to be decided."""
        return not self._todo and not self._in_flight and not self.closed

    @property
    def holds_results(self) -> bool:
        """True if finished trajectories wait for the group."""
        return bool(self._held)

    @property
    def has_more(self) -> bool:
        """True if some of its samples have not been started."""
        return bool(self._todo)

    def unstarted(self, count: int) -> Iterator[Sample]:
        """The next of its samples that have not been started, at most `count`."""
        return itertools.islice(reversed(self._todo), count)

    @property
    def finished(self) -> list[InFlight]:
        """The finished trajectories that are kept so far."""
        return [flight for flight, _ in self._finished]

    def begin(self) -> InFlight | None:
        """Start the next sample's trajectory; None when all have been started.

        Raises:
            KeyError, ValueError: The sample cannot be run.
        """
        if not self._todo:
            return None
        flight = self._admit(self._todo.pop())
        self._in_flight.add(flight)
        return flight

    def end(self, flight: InFlight) -> list[DueResult]:
        """Take a trajectory that has ended; return the results that are final now, with their trajectories.

        Each returned result is counted in the metrics. Trajectories of the group that are no longer needed are
        stopped; `end` is called for each of them in turn.
        """
        self._in_flight.discard(flight)
        due: list[DueResult] = []
        result = flight.result()
        if isinstance(result, TrajectoryRecord):
            if len(self._finished) >= self.result.group.keep:
                self._due(flight, flight.dropped("oversampled"), due)
            else:
                self._finished.append((flight, result))
                if self._policy.defers_results or self._rollout.may_score_groups(result.task_name):
                    self._held.append(flight)
                else:
                    self._due(flight, result, due)
        else:
            if isinstance(result, FailureRecord):
                self._failure = self._failure or result
                self._outages += result.outage
            self._due(flight, result, due)
        self._stop_unneeded(due)
        return due

    async def decide(self) -> list[DueResult]:
        """Score the group once it has ended, and decide on the results that have waited for it; returns these."""
        due: list[DueResult] = []
        if self._held and not self._stale and not (self._policy.atomic and not self._complete):
            try:
                await self._rollout.score_group(self.result.group, self._held)
            except TrajectoryFailed as failure:
                if self._policy.atomic:
                    self._quota.replace()
                for flight in self._held:
                    flight.failure = failure
                    self._due(flight, flight.result(), due)
                self._held.clear()
        self._decide(due)
        self.closed = True
        return due

    @property
    def _complete(self) -> bool:
        return len(self._finished) >= self.result.group.keep

    @property
    def _possible(self) -> int:
        """Number of samples that may finish; what an outage left unscored does so in a later attempt."""
        return len(self._finished) + len(self._in_flight) + len(self._todo) + self._outages

    def _stop_unneeded(self, due: list[DueResult]) -> None:
        if self._stale:
            while self._unstarted:
                flight = self._admit(self._unstarted.pop())
                self._due(flight, flight.dropped("stale"), due)
            return
        keep = self.result.group.keep
        if len(self._finished) >= keep:
            self._todo.clear()
            for flight in tuple(self._in_flight):
                flight.stop("oversampled")
        elif self._policy.atomic and self._possible < keep:
            for flight in tuple(self._in_flight):
                flight.stop(self._shared_failure())
            while self._todo:
                self._fail(self._admit(self._todo.pop()), due)

    def _decide(self, due: list[DueResult]) -> None:
        records = [(flight, flight.result()) for flight in self._held]
        self._held.clear()
        if self._stale:
            self._quota.replace()
            for flight, _ in records:
                self._due(flight, flight.dropped("stale"), due)
        elif self._policy.atomic and not self._complete:
            self._quota.replace()
            for flight, _ in records:
                self._fail(flight, due)
        elif self._drops([record for _, record in records if isinstance(record, TrajectoryRecord)]):
            self._quota.replace()
            for flight, _ in records:
                self._due(flight, flight.dropped("filtered"), due)
        else:
            for flight, record in records:
                self._due(flight, record, due)

    def _drops(self, records: Sequence[TrajectoryRecord]) -> bool:
        return self._complete and bool(records) and not self.result.group.decided and self._quota.drops(records)

    def _fail(self, flight: InFlight, due: list[DueResult]) -> None:
        flight.failure = self._shared_failure()
        self._due(flight, flight.result(), due)

    def _shared_failure(self) -> TrajectoryFailed:
        first = self._failure
        assert first is not None
        cause = f"sample {first.rollout_index} of its group failed: {first.cause}"
        return TrajectoryFailed(cause, reason=first.reason or "Unexpected", stage="group")

    def _due(self, flight: InFlight, result: Result, due: list[DueResult]) -> None:
        flight.count_result(result)
        self.result.add(result)
        due.append((flight, result))

    def _admit(self, sample: Sample) -> InFlight:
        flight = self._rollout.admit(sample, deferred=self._policy.defers_results)
        self.started += 1
        self._run_ahead.start()
        return flight
