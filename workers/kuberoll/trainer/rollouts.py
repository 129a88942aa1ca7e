"""A consumer of a run: its prompt groups as batches, each group once."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kuberoll.trainer.advantages import AdvantageFunction, AdvantageName, advantage_function
from kuberoll.trainer.batch import Batch, is_exact, make_batch, require_exact
from kuberoll.trainer.direct import DirectPath
from kuberoll.trainer.endpoint import run_endpoint
from kuberoll.trainer.groups import Group, GroupTracker, group_rules
from kuberoll.trainer.jobs import SCHEME, find_job, output_of
from kuberoll.trainer.journals import JournalReader, Line, Place, open_place
from kuberoll.trainer.pace_control import PaceControl, PacedByAnother
from kuberoll.trainer.pacing import pace_rules, versions_of
from kuberoll.trainer.publishing import Publication, Publisher
from kuberoll.trainer.state import FORMAT, ConsumerState, StateRefused, decode_state, encode_state, identity_of
from kuberoll.trainer.workers import WorkerSource
from kuberoll_api.contract import token_variable
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    RecordError,
    TrajectoryKey,
    TrajectoryRecord,
    decode_line,
    key_of,
)
from kuberoll_workers.output.consumer_plan import read_plan
from kuberoll_workers.output.manifest import MANIFEST, RunManifest, RunRefused
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_files import NotARun, RunFiles
from kuberoll_workers.output.storage import StorageError, open_storage
from kuberoll_workers.output.unreadable import warn_unreadable

Inexact = Literal["error", "skip", "keep"]

_OPEN_SECONDS = 0.2
_COVERED_LISTINGS = 10
"""So many times fewer listings of an object store while the direct path reaches a worker of every shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a consumer has had of a run, and what it was not given.

    Attributes:
        groups, trajectories: Delivered.
        short_groups: Of `groups`, those with fewer trajectories than they should have, because some failed or were left
            out.
        filtered_groups: Groups that the run filtered out.
        stale_groups: Groups that were older than `rollout.onPolicy.maxLag` allows.
        stale_tokens: Tokens that were generated for trajectories of such groups, as far as they have been seen.
        failed_groups: Groups that have ended without a trajectory; a resumed run may still finish them.
        inexact_trajectories: Left out with `inexact="skip"`.
        late_trajectories: Finished by a resumed run after their group was delivered without them, as far as this
            process has seen.
        direct_parts: Parts of journals that came to this process on the direct path, before they were listed.
    """

    groups: int = 0
    trajectories: int = 0
    short_groups: int = 0
    filtered_groups: int = 0
    stale_groups: int = 0
    stale_tokens: int = 0
    failed_groups: int = 0
    inexact_trajectories: int = 0
    late_trajectories: int = 0
    direct_parts: int = 0


class Rollouts:
    """A consumer of a run.

    It reads the run's journals, so any number of consumers read a run at once, each all of it. One of them may set the
    pace of a run that goes on: it writes what it has had, and workers hold back for it. One may be used by several
    threads; each group goes to one of them.

    Attributes:
        location: Directory or URI of the run.
        consumer: Name of this consumer.
        manifest: The run's manifest.
    """

    def __init__(
        self,
        location: str,
        *,
        manifest: RunManifest,
        place: Place,
        consumer: str,
        inexact: Inexact,
        pad_id: int,
        pace: bool = True,
        groups_per_version: int | None = None,
        publisher: Publisher | None = None,
        direct: WorkerSource | None = None,
    ) -> None:
        """Use `Rollouts.open`."""
        self.location = location
        self.consumer = consumer
        self.manifest = manifest
        self._place = place
        self._storage = open_storage(location)
        self._inexact = inexact
        self._pad_id = pad_id
        self._rules = group_rules(manifest, where=f"{location}/{MANIFEST}")
        self._groups_per_version = groups_per_version
        self._publisher = publisher
        self._direct: DirectPath | None = None
        if direct is not None:
            self._direct = DirectPath(direct, shards=range(manifest.shards))
            weakref.finalize(self, self._direct.close)
        self._pace: PaceControl | None = None
        held = pace_rules(manifest)
        if pace and (held is not None or self._rules.groups is None):
            self._pace = PaceControl(
                self._storage,
                consumer=consumer,
                shards=manifest.shards,
                rules=held,
                written=(lambda: None) if self._direct is None else self._direct.plan_written,
            )
        self._lock = threading.RLock()
        self._begin(None)

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        consumer: str = "trainer",
        inexact: Inexact = "error",
        allow_simulated: bool = False,
        pad_id: int = 0,
        poll_seconds: float | None = None,
        timeout: float = 0.0,
        pace: bool = True,
        groups_per_version: int | None = None,
        publisher: Publisher | None = None,
        directory: str | Path | None = None,
        direct: WorkerSource | None = None,
    ) -> Rollouts:
        """Open a run, whether it goes on or has ended.

        Args:
            location: Its output: a directory, or an object store's URI such as `s3://bucket/run-1`; or a job of a
                cluster, `rolloutjob://NAMESPACE/NAME`.
            consumer: Name of this consumer, which its state has: a state is loaded by the consumer that saved it.
            inexact: What to do with trajectories whose token ids are not those that were sampled, or that have no
                log-probabilities: raise an error, leave them out, or keep them.
            allow_simulated: Open a run of `engine: Simulated`, too: no model wrote its responses, and their
                log-probabilities are not those of a policy.
            pad_id: Token id after a row's end.
            poll_seconds: Seconds between two looks for new trajectories; None: 0.02 to 0.05 in a directory, 1 in an
                object store.
            timeout: Seconds to wait for the run to begin.
            pace: Set the pace of a run with `rollout.onPolicy`, or with passes without end, of which one consumer does:
                the trainer. False: read it beside that one, whatever the age of its trajectories.
            groups_per_version: Number of groups that are taken between two publications of weights; None: one batch.
            publisher: What `publish` uses; None: whole files at `LOCATION-weights`, beside the output, for the policy
                of a `kuberoll run` on this machine, or for the job.
            directory: The run's directory here, of a job whose output is a volume; None: it is an object store.
            direct: The workers of a run in an object store, for the direct path: `Workers`, or `run_workers`; None: of
                a job those of its Service, if KUBEROLL_TOKEN_READ has a token for them; else only journals are read.

        Raises:
            NotARun: There is no run, or what is there is none that can be consumed.
            PacedByAnother: Another consumer sets the pace of the run.
            ValueError: An argument is invalid.
        """
        if inexact not in ("error", "skip", "keep"):
            raise ValueError(f'inexact: found {inexact!r}; use "error", "skip" or "keep"')
        if poll_seconds is not None and not poll_seconds > 0:
            raise ValueError(f"poll_seconds: found {poll_seconds}, expected a number above 0")
        if groups_per_version is not None and groups_per_version < 1:
            raise ValueError(f"groups_per_version: found {groups_per_version}, expected a number of groups from 1")
        if not consumer:
            raise ValueError("consumer: found an empty name; name the consumer, such as 'grpo'")
        # "-weights" is written behind it.
        location = str(location).rstrip("/") or "/"
        if location.startswith(SCHEME):
            job = find_job(location)
            location = output_of(job, None if directory is None else str(directory)).rstrip("/")
            if publisher is None:
                publisher = Publisher(endpoint=job, location=f"{location}-weights")
            if direct is None and (token := os.environ.get(token_variable("read"))):
                direct = job.workers(token)
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
            return cls(
                location,
                manifest=manifest,
                place=place,
                consumer=consumer,
                inexact=inexact,
                pad_id=pad_id,
                pace=pace,
                groups_per_version=groups_per_version,
                publisher=publisher,
                # A directory is looked at as often as there is something new.
                direct=direct if place.immutable_parts else None,
            )
        except PacedByAnother:
            raise
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
                stale_groups=tracker.stale_groups,
                stale_tokens=tracker.stale_tokens,
                failed_groups=tracker.failed_groups,
                late_trajectories=tracker.late,
                direct_parts=self._direct_parts,
            )

    @property
    def version(self) -> int:
        """Number of the newest weights that this consumer has published, or that it knows of; 0: the model's own."""
        return 0 if self._pace is None else self._pace.version

    def publish(self, weights: Any, *, version: int | None = None) -> Publication:
        """Have every replica of the policy serve a trainer's weights, and return when they do.

        Args:
            weights: A torch module, a state dict, or a directory of safetensors, as for `Publisher.publish`.
            version: Their number, greater than all before; None: the next one.

        Raises:
            PublishFailed: Not every replica could serve them; the message says what they serve now.
            EndpointError, LocationError, UnusableWeights, ValueError: As `Publisher.publish`; nothing was published.
        """
        if self._publisher is None:
            endpoint = run_endpoint(self.location.removeprefix("file://"))
            self._publisher = Publisher(endpoint=endpoint, location=f"{self.location}-weights")
        number = max(self.version + 1, self._publisher.next_version()) if version is None else version
        if self._pace is not None:
            number = self._pace.checked_version(number)
        publication = self._publisher.publish(weights, version=number)
        if (pace := self._pace) is not None:
            with self._changing():
                pace.published(number, seconds=publication.seconds)
                self._give_up_stale()
        return publication

    async def publish_async(self, weights: Any, *, version: int | None = None) -> Publication:
        """`publish` in a thread, for an event loop; the weights must not change meanwhile."""
        return await asyncio.to_thread(self.publish, weights, version=version)

    def published(self, version: int | None = None) -> int:
        """Note that every replica serves new weights, which were published by other means than `publish`.

        Args:
            version: Their number, greater than all before; None: the next one.

        Returns:
            Their number.

        Raises:
            RuntimeError: This consumer does not set the pace of the run.
            ValueError: The version is no whole number, or not greater than the newest one.
        """
        pace = self._required_pace("published")
        with self._changing():
            pace.published(pace.version + 1 if version is None else version)
            self._give_up_stale()
            return pace.version

    def stop(self) -> None:
        """Let the run end: workers finish what is in flight, and begin no more, also if the run is resumed.

        Raises:
            RuntimeError: This consumer does not set the pace of the run.
        """
        pace = self._required_pace("stop")
        with self._changing():
            pace.stop()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; at its end the run's plan says what has changed."""
        with self._lock, nullcontext() if self._pace is None else self._pace.changing():
            yield

    def _required_pace(self, method: str) -> PaceControl:
        if self._pace is None:
            raise RuntimeError(
                f"{method}: this consumer does not set the pace of {self.location}: that needs rollout.onPolicy or "
                "dataset.epochs: null in its manifest, and no pace=False"
            )
        return self._pace

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
                    pause(step)

        pause = time.sleep if self._direct is None else self._direct.wait
        return iterate()

    def batches_async(
        self,
        groups: int,
        *,
        advantages: AdvantageName | AdvantageFunction | None = "grpo",
        wait: bool = True,
        timeout: float | None = None,
    ) -> AsyncIterator[Batch]:
        """`batches` for an event loop: files are read, and batches made, in threads.

        An iterator that is cancelled while it waits is over: the next one goes on with what was not taken.
        """
        steps = self._checked_steps(groups, advantages, wait, timeout)

        async def iterate() -> AsyncIterator[Batch]:
            while (step := await asyncio.to_thread(next, steps, None)) is not None:
                if isinstance(step, Batch):
                    # Here and not in the thread: what a cancelled task was about to receive was not taken.
                    if self._take(step):
                        yield step
                elif direct is None:
                    await asyncio.sleep(step)
                else:
                    await asyncio.to_thread(direct.wait, step)

        direct = self._direct
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
                "leaving": [(*key, sorted(rollouts)) for key, rollouts in sorted(tracker.leaving.items())],
                "read": self._reader.hints(tracker.needed()),
                "counts": {
                    **counts,
                    "filtered_groups": tracker.filtered_groups,
                    "stale_groups": tracker.stale_groups,
                    "stale_tokens": tracker.stale_tokens,
                },
                "pace": None if self._pace is None else self._pace.pacer.state.as_json(),
            }
            return encode_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after what was taken when a state was saved, whatever this object has returned since.

        Iterators that were made before end with a RuntimeError.

        Raises:
            StateRefused: It is no state, or one of another run, or of another consumer, or of one that does not set the
                run's pace as this one does.
        """
        loaded = decode_state(state, consumer=self.consumer, run=identity_of(self.manifest), location=self.location)
        closed, counted = loaded.closed_groups(), loaded.closed_groups()
        short, pace = loaded.short_groups(), loaded.pace_state()
        if pace is None and self._pace is not None:
            raise StateRefused(
                f"state: it was saved with pace=False, and lacks what the workers of {self.location} need to know: "
                "open the run with pace=False, or start without a state"
            )
        with self._lock:
            self._begin(loaded)
            if self._pace is not None and pace is not None:
                self._pace.load(pace)
            self._tracker.closed, self._tracker.counted = closed, counted
            self._tracker.short, self._tracker.leaving = short, loaded.leaving_groups()
            self._tracker.filtered_groups = loaded.counts.get("filtered_groups", 0)
            self._tracker.stale_groups = loaded.counts.get("stale_groups", 0)
            self._tracker.stale_tokens = loaded.counts.get("stale_tokens", 0)

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
        # When the journals are listed next, with a direct path: time.monotonic.
        self._list_at = 0.0
        self._direct_parts = 0

    def _checked_steps(
        self,
        groups: int,
        advantages: AdvantageName | AdvantageFunction | None,
        wait: bool,
        timeout: float | None,
    ) -> Iterator[Batch | float]:
        if groups < 1:
            raise ValueError(f"groups: found {groups}, expected a number of prompt groups from 1")
        function = advantage_function(advantages)
        if self._pace is not None:
            with self._changing():
                self._pace.begin(groups, groups_per_version=self._groups_per_version or groups)
        return self._steps(groups, function, wait, timeout)

    def _steps(
        self, groups: int, advantages: AdvantageFunction | None, wait: bool, timeout: float | None
    ) -> Iterator[Batch | float]:
        """Batches that are ready and not taken, and between them the seconds to wait."""
        tracker = self._tracker
        pause = self._place.seconds
        came, last_came = 0, time.monotonic()
        while True:
            with self._changing():
                if tracker is not self._tracker:
                    raise RuntimeError("a state was loaded while batches were iterated: call batches() again")
                if not wait:
                    self._list_at = 0.0
                read = self._read_until(groups)
                ready = self._deliverable(groups)
                over = not read and (not wait or self._run_ended)
            if len(ready) == groups or (ready and over):
                if self._inexact == "error":
                    require_exact(ready)
                yield make_batch(ready, advantages=advantages, pad_id=self._pad_id, sampling=self.manifest.sampling)
                if not wait and len(ready) < groups and all(group.key in tracker.closed for group in ready):
                    # What was there has been taken; what has come since is for the next call.
                    return
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
                if self._pace is not None:
                    with self._changing():
                        self._pace.wait(len(self._queue))
                yield pause
                pause = min(self._place.idle_seconds, 1.5 * pause)

    def _take(self, batch: Batch) -> bool:
        """Take the groups of a batch; False if another thread has taken one of them."""
        with self._changing():
            mine = batch.groups
            places = set(map(id, mine))
            left = deque(group for group in self._queue if id(group) not in places)
            if len(self._queue) - len(left) < len(mine):
                return False
            self._queue = left
            for group in mine:
                self._tracker.close(group.key)
            if self._pace is not None:
                self._pace.take(mine, ready=len(self._queue))
            counts = self._counts
            self._counts = replace(
                counts,
                groups=counts.groups + len(mine),
                trajectories=counts.trajectories + sum(len(group.trajectories) for group in mine),
                short_groups=counts.short_groups + sum(len(group.trajectories) < group.wanted for group in mine),
            )
            return True

    def _read_until(self, groups: int) -> bool:
        """Read until so many groups are ready, or to the end of a pass; True if there was something new."""
        new = False
        if self._pass is None:
            self._pass = self._ready_groups()
        while len(self._deliverable(groups)) < groups:
            try:
                group = next(self._pass, None)
            finally:
                self._note_given_up()
            if group is None:
                self._pass = None
                return new or self._lines > 0
            self._admit(group)
            new = True
        return True

    @property
    def _run_ended(self) -> bool:
        """True if the run will have no more groups."""
        if self._tracker.run_ended or self._rules.groups is not None or not self._reader.ended:
            return self._tracker.run_ended
        # Aggregates alone may be those of an interrupted run, which goes on later.
        if self._pace is not None:
            return self._pace.stopped
        plan = read_plan(self._storage, shards=self.manifest.shards)
        return plan is not None and plan.stopped

    def _deliverable(self, count: int) -> list[Group]:
        """At most so many ready groups, in the order in which they are delivered."""
        pace = self._pace
        if pace is None or pace.rules is None or not pace.rules.in_order:
            return list(itertools.islice(self._queue, count))
        settled = pace.pacer.state.settled
        ready: dict[tuple[int, int | None], Group] = {}
        found: list[Group] = []
        for group in self._queue:
            shard = pace.shard(group.key)
            # It was given up, and a resumed run has finished it: nothing waits for it.
            if group.order is None or group.order in settled[shard]:
                found.append(group)
            ready[shard, group.order] = group
        for place in itertools.islice(pace.pacer.in_order(), max(0, count - len(found))):
            if (next_group := ready.get(place)) is None:
                break
            found.append(next_group)
        return found[:count]

    def _note_given_up(self) -> None:
        """Take over which groups nobody will take."""
        if not self._tracker.given_up:
            return
        given_up, self._tracker.given_up = self._tracker.given_up, []
        keys = {group.key for group in given_up}
        self._queue = deque(group for group in self._queue if group.key not in keys)
        if (pace := self._pace) is None:
            return
        for group in given_up:
            for record in group.stale:
                self._tracker.count_stale(record)
            pace.settle(group.key, group.order)
        pace.give_up([record for group in given_up for record in group.stale])

    def _give_up_stale(self) -> None:
        """Give up the groups in the queue that are too old."""
        pace = self._pace
        assert pace is not None
        stale = {group.key: group for group in self._queue if pace.pacer.is_stale(group.trajectories)}
        self._queue = deque(group for group in self._queue if group.key not in stale)
        given_up: list[TrajectoryRecord] = []
        for group in stale.values():
            pace.settle(group.key, group.order)
            given_up += self._tracker.close(group.key, stale=True)
        for record in given_up:
            self._tracker.count_stale(record)
        pace.give_up(given_up)

    def _ready_groups(self) -> Iterator[Group]:
        """The groups that one pass over the journals makes ready."""
        self._lines = 0
        for line in self._new_lines():
            self._lines += 1
            if (group := self._offer(line)) is not None:
                yield group
        yield from self._tracker.end_pass(final=self._reader.ended)

    def _new_lines(self) -> Iterator[Line]:
        """Lines that came on the direct path, and those that a listing finds if one is due."""
        if (direct := self._direct) is not None:
            parts, gap = direct.take()
            for part in parts:
                if not self._reader.follows(part.file):
                    gap = True
                elif not self._reader.has_read(part.file):
                    self._direct_parts += 1
                    yield from self._reader.lines_of(part.file, part.lines)
            if not gap and time.monotonic() < self._list_at:
                return
        began = time.monotonic()
        yield from self._reader.lines()
        if direct is not None:
            # What is written comes by itself, if every shard has a worker; what was not written says the journal.
            self._list_at = began + self._place.seconds * (_COVERED_LISTINGS if direct.covers_run else 1)

    def _offer(self, line: Line) -> Group | None:
        tracker, where = self._tracker, line.where
        record = self._decoded(line) if line.record is None else line.record
        if isinstance(record, TrajectoryRecord):
            return tracker.finished(record, line.position, where=where)
        if isinstance(record, FailureRecord):
            tracker.failed(record, where=where)
        elif record is not None:
            tracker.dropped(record, line.position, where=where)
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
        """Put a ready group into the queue, or give it up."""
        pace = self._pace
        self._queue.append(group)
        if pace is not None:
            newest = max((v for record in group.trajectories for v in versions_of(record)), default=0)
            if pace.note_version(newest) or pace.pacer.is_stale(group.trajectories):
                self._give_up_stale()
        if self._inexact != "skip" or not self._queue or self._queue[-1] is not group:
            return
        exact = tuple(filter(is_exact, group.trajectories))
        left_out = len(group.trajectories) - len(exact)
        if left_out:
            del self._queue[-1]
        if left_out and exact:
            self._queue.append(replace(group, trajectories=exact))
        elif left_out:
            self._tracker.close(group.key)
            if pace is not None:
                pace.settle(group.key, group.order)
        counts = self._counts
        self._counts = replace(counts, inexact_trajectories=counts.inexact_trajectories + left_out)

    def _why_waiting(self, seconds: float) -> str:
        counts, ready = self.counts, len(self._queue)
        return (
            f"{self.location}: no prompt group has ended for {seconds:g} s: {counts.groups} were delivered, {ready} "
            f"wait for their batch, {counts.filtered_groups} were filtered out, {counts.stale_groups} were too old and "
            f"{counts.failed_groups} failed"
            f"{'' if self._rules.groups is None else f', of {self._rules.groups} of the dataset'}. If the run was "
            "stopped, continue it with --resume, or use batches(…, wait=False) for what is there"
            f"{self._why_held()}"
        )

    def _why_held(self) -> str:
        pace = self._pace
        if pace is None or pace.rules is None or pace.rules.max_lag is None:
            return ""
        return (
            f". The run waits for weights after every {pace.pacer.groups_per_version} groups; the newest that it knows "
            f"of have version {pace.version}: if several batches are taken between two publications, open it with "
            "groups_per_version"
        )


_STORED_COUNTS = ("groups", "trajectories", "short_groups", "inexact_trajectories")


def _checked_location(location: str) -> str:
    if location.startswith("pvc:"):
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
