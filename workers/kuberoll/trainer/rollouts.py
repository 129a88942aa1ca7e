"""A consumer of a run: its prompt groups as batches, each group once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kuberoll.trainer.advantages import AdvantageFunction, AdvantageName, advantage_function
from kuberoll.trainer.batch import Batch, is_exact, make_batch, require_exact
from kuberoll.trainer.groups import Group, GroupTracker, group_rules
from kuberoll.trainer.journals import JournalReader, Line, Place, open_place
from kuberoll.trainer.state import FORMAT, ConsumerState, decode_state, encode_state, identity_of
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    RecordError,
    TrajectoryKey,
    TrajectoryRecord,
    decode_line,
    key_of,
)
from kuberoll_workers.output.manifest import MANIFEST, RunManifest, RunRefused
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_files import NotARun, RunFiles
from kuberoll_workers.output.storage import StorageError
from kuberoll_workers.output.unreadable import warn_unreadable

Inexact = Literal["error", "skip", "keep"]

_OPEN_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a consumer has had of a run, and what it was not given.

    Attributes:
        groups, trajectories: Delivered.
        short_groups: Of `groups`, those with fewer trajectories than they should have, because some failed.
        filtered_groups: Groups that the run filtered out.
        failed_groups: Groups that have ended without a trajectory; a resumed run may still finish them.
        inexact_trajectories: Left out with `inexact="skip"`.
        late_trajectories: Finished by a resumed run after their group was delivered without them, as far as this
            process has seen.
    """

    groups: int = 0
    trajectories: int = 0
    short_groups: int = 0
    filtered_groups: int = 0
    failed_groups: int = 0
    inexact_trajectories: int = 0
    late_trajectories: int = 0


class Rollouts:
    """A consumer of a run.

    It reads the run's journals and writes nothing, so any number of consumers read a run at once, each all of it. One
    may be used by several threads; each group goes to one of them.

    Attributes:
        location: Directory or URI of the run, as given.
        consumer: Name of this consumer.
        manifest: The run's manifest.
    """

    def __init__(
        self, location: str, *, manifest: RunManifest, place: Place, consumer: str, inexact: Inexact, pad_id: int
    ) -> None:
        """Use `Rollouts.open`."""
        self.location = location
        self.consumer = consumer
        self.manifest = manifest
        self._place = place
        self._inexact = inexact
        self._pad_id = pad_id
        self._rules = group_rules(manifest, where=f"{location}/{MANIFEST}")
        self._lock = threading.RLock()
        self._begin(None)

    @classmethod
    def open(
        cls,
        location: str,
        *,
        consumer: str = "trainer",
        inexact: Inexact = "error",
        allow_simulated: bool = False,
        pad_id: int = 0,
        poll_seconds: float | None = None,
        timeout: float = 0.0,
    ) -> Rollouts:
        """Open a run, whether it goes on or has ended.

        Args:
            location: Its output: a directory, or an object store's URI such as `s3://bucket/run-1`.
            consumer: Name of this consumer, which its state has: a state is loaded by the consumer that saved it.
            inexact: What to do with trajectories whose token ids are not those that were sampled, or that have no
                log-probabilities: raise an error, leave them out, or keep them.
            allow_simulated: Open a run of `engine: Simulated`, too: no model wrote its responses, and their
                log-probabilities are not those of a policy.
            pad_id: Token id after a row's end.
            poll_seconds: Seconds between two looks for new trajectories; None: 0.02 to 0.05 in a directory, 1 in an
                object store.
            timeout: Seconds to wait for the run to begin.

        Raises:
            NotARun: There is no run, or what is there is none that can be consumed.
            ValueError: An argument is invalid.
        """
        if inexact not in ("error", "skip", "keep"):
            raise ValueError(f'inexact: found {inexact!r}; use "error", "skip" or "keep"')
        if poll_seconds is not None and not poll_seconds > 0:
            raise ValueError(f"poll_seconds: found {poll_seconds}, expected a number above 0")
        if not consumer:
            raise ValueError("consumer: found an empty name; name the consumer, such as 'grpo'")
        try:
            place = open_place(_checked_location(location), seconds=poll_seconds)
        except StorageError as error:
            raise NotARun(str(error)) from error
        manifest = _await_manifest(location, timeout)
        if manifest.identity.get("generation.engine") == "Simulated" and not allow_simulated:
            raise NotARun(
                f"{location}: its engine is Simulated: no model wrote the responses, and their log-probabilities are "
                "not those of a policy; to try the way of the data, open it with allow_simulated=True"
            )
        try:
            return cls(location, manifest=manifest, place=place, consumer=consumer, inexact=inexact, pad_id=pad_id)
        except ValueError as error:
            raise NotARun(str(error)) from error

    @property
    def counts(self) -> Counts:
        """What this consumer has had so far, with what it had before the state that it loaded."""
        with self._lock:
            tracker = self._tracker
            return replace(
                self._counts,
                filtered_groups=tracker.filtered_groups,
                failed_groups=tracker.failed_groups,
                late_trajectories=tracker.late,
            )

    def batches(
        self,
        groups: int,
        *,
        advantages: AdvantageName | AdvantageFunction | None = "grpo",
        wait: bool = True,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Batches of whole prompt groups, as they end; the last one may be smaller.

        A batch counts as taken when it is returned: a state that is saved after that continues with the next one.

        Args:
            groups: Number of groups of each batch.
            advantages: Name of a function of `kuberoll.trainer`, or a function from the rewards of a group's
                trajectories, [trajectories] in float64, to their advantages; None: none are computed.
            wait: Wait for the run to end all its groups; False: end with what is there.
            timeout: Seconds without a new group after which to give up; None: never.

        Raises:
            ValueError: An argument is invalid.
            TimeoutError: While iterating: no group came for `timeout` seconds. What came before is kept for the next
                call.
            InexactTrajectory: While iterating, with `inexact="error"`.
            RecordError: While iterating: a file has lines of another run, or is not what its name says.
        """
        steps = self._checked_steps(groups, advantages, wait, timeout)

        def iterate() -> Iterator[Batch]:
            for step in steps:
                if isinstance(step, Batch):
                    if self._take(step):
                        yield step
                else:
                    time.sleep(step)

        return iterate()

    def batches_async(
        self,
        groups: int,
        *,
        advantages: AdvantageName | AdvantageFunction | None = "grpo",
        wait: bool = True,
        timeout: float | None = None,
    ) -> AsyncIterator[Batch]:
        """`batches` for an event loop: files are read, and batches made, in threads."""
        steps = self._checked_steps(groups, advantages, wait, timeout)

        async def iterate() -> AsyncIterator[Batch]:
            while (step := await asyncio.to_thread(next, steps, None)) is not None:
                if isinstance(step, Batch):
                    # Here and not in the thread: what a cancelled task was about to receive was not taken.
                    if self._take(step):
                        yield step
                else:
                    await asyncio.sleep(step)

        return iterate()

    def state_dict(self) -> dict[str, Any]:
        """What has been taken so far, as plain JSON: `load_state_dict` continues exactly there.

        Its size grows with the shards, the groups in progress and those that were delivered too short, not with the
        length of the run. Nothing is read or written.
        """
        with self._lock:
            tracker = self._tracker
            counts = {name: getattr(self._counts, name) for name in _STORED_COUNTS}
            state = {
                "format": FORMAT,
                "consumer": self.consumer,
                "run": identity_of(self.manifest),
                "closed": tracker.closed.as_json(),
                "short": [(*key, list(rollouts)) for key, rollouts in sorted(tracker.short.items())],
                "read": self._reader.hints(tracker.needed()),
                "counts": {**counts, "filtered_groups": tracker.filtered_groups},
            }
            return encode_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after what was taken when a state was saved, whatever this object has returned since.

        Iterators that were made before end with a RuntimeError.

        Raises:
            StateRefused: It is no state, or one of another run, or of another consumer.
        """
        loaded = decode_state(state, consumer=self.consumer, run=identity_of(self.manifest), location=self.location)
        closed, short = loaded.closed_groups(), loaded.short_groups()
        with self._lock:
            self._begin(loaded)
            self._tracker.closed = closed
            self._tracker.short = short
            self._tracker.filtered_groups = loaded.counts.get("filtered_groups", 0)

    def _begin(self, loaded: ConsumerState | None) -> None:
        self._tracker = GroupTracker(self._rules)
        self._queue: deque[Group] = deque()
        counts = {} if loaded is None else loaded.counts
        self._counts = Counts(**{name: counts.get(name, 0) for name in _STORED_COUNTS})
        self._reader = JournalReader(
            self._place, is_settled=self._is_settled, hints=None if loaded is None else loaded.hints()
        )
        self._pass: Iterator[Group] | None = None
        self._lines = 0

    def _checked_steps(
        self,
        groups: int,
        advantages: AdvantageName | AdvantageFunction | None,
        wait: bool,
        timeout: float | None,
    ) -> Iterator[Batch | float]:
        if groups < 1:
            raise ValueError(f"groups: found {groups}, expected a number of prompt groups from 1")
        return self._steps(groups, advantage_function(advantages), wait, timeout)

    def _steps(
        self, groups: int, advantages: AdvantageFunction | None, wait: bool, timeout: float | None
    ) -> Iterator[Batch | float]:
        """Batches that are ready and not taken, and between them the seconds to wait."""
        tracker = self._tracker
        pause = self._place.seconds
        came, last_came = 0, time.monotonic()
        while True:
            with self._lock:
                if tracker is not self._tracker:
                    raise RuntimeError("a state was loaded while batches were iterated: call batches() again")
                read = self._read_until(groups)
                ready = list(self._queue)[:groups]
                over = not read and (not wait or tracker.run_ended)
            if len(ready) == groups or (ready and over):
                if self._inexact == "error":
                    require_exact(ready)
                yield make_batch(ready, advantages=advantages, pad_id=self._pad_id)
                came, last_came = 0, time.monotonic()
                continue
            if over:
                return
            if read:
                pause = self._place.seconds
            if len(ready) > came:
                came, last_came = len(ready), time.monotonic()
            if timeout is not None and time.monotonic() - last_came >= timeout:
                raise TimeoutError(self._why_waiting(timeout))
            if not read:
                yield pause
                pause = min(self._place.idle_seconds, 1.5 * pause)

    def _take(self, batch: Batch) -> bool:
        """Take the groups of a batch; False if another thread has taken one of them."""
        with self._lock:
            count = len(batch.groups)
            mine = list(self._queue)[:count]
            if len(mine) < count or any(a is not b for a, b in zip(mine, batch.groups, strict=True)):
                return False
            for group in mine:
                self._queue.popleft()
                self._tracker.close(group.key)
            counts = self._counts
            self._counts = replace(
                counts,
                groups=counts.groups + count,
                trajectories=counts.trajectories + sum(len(group.trajectories) for group in mine),
                short_groups=counts.short_groups + sum(len(group.trajectories) < group.wanted for group in mine),
            )
            return True

    def _read_until(self, groups: int) -> bool:
        """Read until so many groups are ready, or to the end of a pass; True if there was something new."""
        new = False
        if self._pass is None:
            self._pass = self._ready_groups()
        while len(self._queue) < groups:
            group = next(self._pass, None)
            if group is None:
                self._pass = None
                return new or self._lines > 0
            self._admit(group)
            new = True
        return True

    def _ready_groups(self) -> Iterator[Group]:
        """The groups that one pass over the journals makes ready."""
        self._lines = 0
        for line in self._reader.lines():
            self._lines += 1
            if (group := self._offer(line)) is not None:
                yield group
        yield from self._tracker.end_pass(final=self._reader.ended)

    def _offer(self, line: Line) -> Group | None:
        tracker, where = self._tracker, line.where
        record = self._decoded(line) if line.record is None else line.record
        if isinstance(record, TrajectoryRecord):
            return tracker.finished(record, line.position, where=where)
        if isinstance(record, FailureRecord):
            tracker.failed(record, where=where)
        elif record is not None:
            tracker.dropped(record, where=where)
        return None

    def _decoded(self, line: Line) -> EndedRecord | None:
        assert line.text is not None
        try:
            if line.journal == FAILURES:
                return decode_line(line.text, FailureRecord, where=line.where)
            if line.journal == DROPPED:
                return decode_line(line.text, DroppedRecord, where=line.where)
            # Most of what a resumed consumer reads again is settled.
            key = key_of(line.text)
            if key is not None and self._is_settled(key):
                return None
            return decode_line(line.text, TrajectoryRecord, where=line.where)
        except RecordError as error:
            warn_unreadable(error, trajectory=line.journal not in (FAILURES, DROPPED))
            return None

    def _is_settled(self, key: TrajectoryKey) -> bool:
        group = self._rules.only_group_of(*key)
        return group is not None and self._tracker.is_settled(group, key.rollout_index)

    def _admit(self, group: Group) -> None:
        if self._inexact != "skip":
            self._queue.append(group)
            return
        exact = tuple(filter(is_exact, group.trajectories))
        left_out = len(group.trajectories) - len(exact)
        if exact:
            self._queue.append(replace(group, trajectories=exact) if left_out else group)
        else:
            self._tracker.close(group.key)
        counts = self._counts
        self._counts = replace(counts, inexact_trajectories=counts.inexact_trajectories + left_out)

    def _why_waiting(self, seconds: float) -> str:
        counts, ready = self.counts, len(self._queue)
        return (
            f"{self.location}: no prompt group has ended for {seconds:g} s: {counts.groups} were delivered, {ready} "
            f"wait for their batch, {counts.filtered_groups} were filtered out and {counts.failed_groups} failed, of "
            f"{self._rules.groups} of the dataset. If the run was stopped, continue it with --resume, or use "
            "batches(…, wait=False) for what is there"
        )


_STORED_COUNTS = ("groups", "trajectories", "short_groups", "inexact_trajectories")


def _checked_location(location: str) -> str:
    scheme = location.partition("://")[0] if "://" in location else ""
    if scheme == "rolloutjob":
        raise ValueError(
            f"{location}: a job of a cluster cannot be opened by its name: open its output, which "
            "`kubectl get rolloutjob NAME -o jsonpath={.spec.output.uri}` shows: a URI as it is, of pvc://CLAIM/path "
            "the directory where the claim is mounted"
        )
    if scheme == "pvc":
        raise ValueError(f"{location}: this is a volume of a cluster: mount the claim, and open the directory")
    return location


def _await_manifest(location: str, timeout: float) -> RunManifest:
    deadline = time.monotonic() + timeout
    while True:
        try:
            manifest = RunFiles(location).manifest()
        except NotARun:
            if time.monotonic() >= deadline:
                raise
        except RunRefused as error:
            raise NotARun(str(error)) from error
        else:
            if manifest is not None:
                return manifest
            raise NotARun(
                f"{location}: found trajectories but no {MANIFEST}, so nobody knows which trajectories make a prompt "
                "group: give the output directory of a run"
            )
        time.sleep(_OPEN_SECONDS)
