"""A consumer's hold on the pace of its run: the plan that workers read, and the groups that it found too old."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kuberoll.trainer.groups import Group, GroupKey
from kuberoll.trainer.pacing import Pacer, PaceRules, PaceState
from kuberoll.trainer.publishing import whole_number
from kuberoll_workers.data.consumer_counts import ConsumerCounts
from kuberoll_workers.data.record import DroppedRecord, TrajectoryRecord
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.output.consumer_plan import ConsumerPlan, read_plan, write_plan
from kuberoll_workers.output.records import DROPPED
from kuberoll_workers.output.storage import CONSUMER, Storage

_NOTABLE_WAIT_SECONDS = 5.0


class PacedByAnother(ValueError):
    """Another consumer sets the pace of the run; the message names it and the remedy."""


class _Unobserved:
    def observe(self, _amount: float) -> None:
        return

    def failed(self) -> None:
        return


class PaceControl:
    """Sets the pace of a run: every change of what may begin is written as the run's plan.

    Changes are made in a block of `changing`, at whose end the plan is written: workers wait for what it says, so a
    change that is not written may keep them and the consumer waiting for each other for ever. The caller holds a lock.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        consumer: str,
        shards: int,
        rules: PaceRules | None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            rules: None: the run is not held back, and can only be stopped.
            written: Called when a plan has been written.

        Raises:
            PacedByAnother: The run has a plan of another consumer.
            PlanUnreadable: Its plan cannot be read.
        """
        self._storage = storage
        self._consumer = consumer
        self._shards = shards
        self._written = written
        self.rules = rules
        self._owner = f"{CONSUMER}{uuid.uuid4().hex[:8]}"
        self._counts = ConsumerCounts()
        self._waiting_since: float | None = None
        self._waiting = False
        self._blocks = 0
        self._unwritten = False
        self._loaded = False
        self._plan: ConsumerPlan | None = None
        found = read_plan(storage, shards=shards)
        if found is not None and found.consumer != consumer:
            raise PacedByAnother(
                f"{storage.location}: consumer {found.consumer!r} sets the pace of this run: open it with "
                f"pace=False to read beside it, or with consumer={found.consumer!r} to go on as that one"
            )
        self.stopped = found is not None and found.stopped
        state = PaceState.new(shards)
        if found is not None:
            # Weights that were published before a restart are newer than those of the checkpoint.
            state.version = found.version
            self._counts = found.counts
        self.pacer = Pacer(rules or PaceRules(max_lag=None, in_order=False, max_ahead=None, groups=None), state)

    @property
    def version(self) -> int:
        """Number of the newest weights."""
        return self.pacer.state.version

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A block of changes. At the end of the outermost one the plan is written, if it is another than the last.

        Raises:
            Exception: The storage refuses; the end of the next block tries again.
        """
        self._blocks += 1
        try:
            yield
        except BaseException:
            if self._blocks == 1:
                # What was changed before the error stays changed.
                with contextlib.suppress(Exception):
                    self._write()
            raise
        else:
            if self._blocks == 1:
                self._write()
        finally:
            self._blocks -= 1

    @property
    def _changed(self) -> PaceState:
        """The state, to be changed."""
        if not self._blocks:
            raise RuntimeError("the pace of a run is changed in a block of `changing` only")
        self._unwritten = True
        return self.pacer.state

    def load(self, state: PaceState) -> None:
        """Continue from a checkpoint; the newest weights stay the newest. `begin` tells the workers."""
        state.version = max(state.version, self.version)
        self.pacer.state = state
        self._loaded = True

    def begin(self, groups: int, *, groups_per_version: int) -> None:
        """Note what the consumer takes, and let it begin.

        Args:
            groups: Number of groups of a batch.
            groups_per_version: Number of groups that it takes between two publications.

        Raises:
            ValueError: The run never has so many for a batch.
        """
        ahead, lag = (None, None) if self.rules is None else (self.rules.max_ahead, self.rules.max_lag)
        if ahead is not None and groups > ahead:
            raise ValueError(
                f"groups: {groups}, but rollout.onPolicy.maxAhead of the run is {ahead}: so many never wait at once; "
                "take smaller batches, or raise it"
            )
        if lag is not None and groups > (window := (lag + 1) * groups_per_version):
            raise ValueError(
                f"groups: {groups}, but with groups_per_version={groups_per_version} and rollout.onPolicy.maxLag {lag} "
                f"only {window} may begin before new weights are published: take smaller batches, or open the run "
                "with a greater groups_per_version"
            )
        state = self._changed
        if self._loaded and state.taken_since >= groups_per_version:
            # The checkpoint was saved between its last batch and a publication, which nobody will make any more.
            state.taken_before = list(state.delivered)
        self._loaded = False
        self.pacer.groups_per_version = groups_per_version

    def settle(self, key: GroupKey, order: int | None) -> None:
        """Note a group that nobody will take."""
        self._changed.settle(self.shard(key), order, delivered=False)

    def take(self, groups: Sequence[Group], *, ready: int) -> None:
        """Note that groups were taken.

        Args:
            ready: Number of groups that have ended and were not taken.
        """
        lag = dict(self._counts.lag)
        for group in groups:
            versions = self.pacer.lag(group.trajectories)
            lag[versions] = lag.get(versions, 0) + len(group.trajectories)
            self._changed.settle(self.shard(group.key), group.order, delivered=True)
        self._count(taken_groups=self._counts.taken_groups + len(groups), ready_groups=ready, lag=lag)
        self.end_wait()

    def give_up(self, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Record finished trajectories of a group that is too old."""
        if not trajectories:
            return
        records = [_stale(record) for record in trajectories]
        # In a thread of its own: the caller may be in an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, self._store(records)).result()
        self._count(
            stale_trajectories=self._counts.stale_trajectories + len(records),
            stale_tokens=self._counts.stale_tokens + sum(record.tokens.generated for record in records),
        )

    def checked_version(self, version: object) -> int:
        """The number of the next weights.

        Raises:
            ValueError: It is no whole number, or not greater than the newest one.
        """
        number = whole_number(version)
        if number is None:
            raise ValueError(f"version: found {version!r}, expected a whole number from {self.version + 1}")
        if number <= self.version:
            raise ValueError(
                f"version: found {number}, but {self.version} was published before: versions grow for as long as a "
                "run lasts, also after a trainer's restart; leave it out, and the next one is taken"
            )
        return number

    def published(self, version: int, *, seconds: Mapping[str, float] | None = None) -> None:
        """Note that every replica serves new weights.

        Args:
            seconds: Seconds of publishing, by phase.

        Raises:
            ValueError: The version is no whole number, or not greater than the newest one.
        """
        number = self.checked_version(version)
        self._changed.publish(number)
        phases = dict(self._counts.publish_seconds)
        for name, amount in (seconds or {}).items():
            phases[name] = phases.get(name, 0.0) + amount
        self._count(publications=self._counts.publications + 1, publish_seconds=phases)

    def note_version(self, version: int) -> bool:
        """Note weights that were seen in a trajectory; True if they are newer than those that were known."""
        newer = version > self.version
        if newer:
            self._changed.publish(version)
        return newer

    def shard(self, key: GroupKey) -> int:
        """The shard of a group."""
        return shard_of(key.task_index, self._shards)

    def stop(self) -> None:
        """Let the run end: no more groups begin, ever."""
        assert self._changed
        self.stopped = True

    def wait(self, ready: int) -> None:
        """Note that the consumer waits for groups now.

        Args:
            ready: Number of groups that have ended and were not taken.
        """
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        elif not self._waiting and now - self._waiting_since >= _NOTABLE_WAIT_SECONDS:
            self._waiting = True
            self._count(ready_groups=ready)

    def end_wait(self) -> None:
        """Note that the consumer does not wait any more."""
        if self._waiting_since is not None:
            self._count(waited_seconds=self._counts.waited_seconds + time.monotonic() - self._waiting_since)
        self._waiting_since, self._waiting = None, False

    def _write(self) -> None:
        if not self._unwritten:
            return
        state = self.pacer.state
        plan = ConsumerPlan(
            consumer=self._consumer,
            version=state.version,
            room=None if self.rules is None else self.pacer.room(),
            settled=[found.bounds() for found in state.settled],
            waiting=self._waiting,
            stopped=self.stopped,
            counts=self._counts,
        )
        if plan != self._plan:
            write_plan(self._storage, plan)
            self._plan = plan
            self._written()
        self._unwritten = False

    def _count(self, **changes: object) -> None:
        assert self._changed
        values = {name: getattr(self._counts, name) for name in self._counts.__struct_fields__}
        self._counts = ConsumerCounts(**{**values, **changes})

    async def _store(self, records: Iterable[DroppedRecord]) -> None:
        journal = self._storage.journal(DROPPED, owner=self._owner, seconds=_Unobserved(), shared=True)
        for record in records:
            journal.add(record)
        await journal.close()


def _stale(record: TrajectoryRecord) -> DroppedRecord:
    return DroppedRecord(
        task_index=record.task_index,
        rollout_index=record.rollout_index,
        task_name=record.task_name,
        idx=record.idx,
        reason="stale",
        stop_reason=record.stop_reason,
        turn_count=record.turn_count,
        total_reward=record.total_reward,
        rewards=record.rewards,
        tokens=record.tokens,
        messages=record.messages,
        metadata=record.metadata,
        seed=record.seed,
        attempt=record.attempt,
        group_reward=record.group_reward,
        group_order=record.group_order,
    )
