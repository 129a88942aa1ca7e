"""Rescoring: the environments recompute the rewards of stored trajectories, without generating again.

The environment receives the stored responses one by one, from the row's initial state on. Its observations must equal
the
stored ones; only then do the new rewards belong to this trajectory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any

import numpy
import orjson

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import Journal, WriteObserver
from kuberoll_workers.output.run_directory import RunDirectory, RunManifest, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import DirectoryStorage, Storage, open_storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.rollouts.failures import TrajectoryFailed, backoff, failure_of, is_retryable
from kuberoll_workers.rollouts.settings import RetryPolicy

SUMMARY = "rescored.json"
PROBED = 16
"""Number of trajectories of each environment that are replayed twice, to check that it is deterministic."""

_EXAMPLES = 5
_PENDING_BYTES = 64 << 20
_ENVIRONMENTS = "environments["


class RescoreRefused(Exception):
    """The trajectories cannot be rescored with these options; the message names the reason and the remedy."""


class Mismatch(Exception):
    """The environment does not answer what it answered when the trajectory was made: says where."""


@dataclass(slots=True, kw_only=True)
class RescoredManifest(RunManifest):
    """The manifest of a rescored run.

    Attributes:
        rescored_from: `location`, `job` and `created` of the original run.
    """

    rescored_from: dict[str, Any]


@contextmanager
def open_rescored(
    source: RunFiles, location: str, job: RolloutJob, *, inputs: Mapping[str, Any], resume: bool, force: bool
) -> Iterator[Storage]:
    """Open the output of a rescored run, and lock it until the block is left.

    Args:
        inputs: Summary of the job's dataset.
        resume: Continue an interrupted rescoring.

    Raises:
        RescoreRefused: The output is the original run.
        RunRefused: It contains a different run.
        StorageError: It cannot be used.
    """
    storage = open_storage(location)
    if _same_place(source.storage, storage):
        raise RescoreRefused(f"--output {location} is the run itself, which is never changed: choose another one")
    directory = RunDirectory(storage)
    try:
        directory.open(rescored_manifest(source, job, inputs=inputs), resume=resume, force=force)
        yield storage
    finally:
        directory.close()


def _same_place(one: Storage, other: Storage) -> bool:
    if isinstance(one, DirectoryStorage) and isinstance(other, DirectoryStorage):
        return one.path.resolve() == other.path.resolve()
    return one.location == other.location


def refuse_other_dataset(source: RunFiles, inputs: Mapping[str, Any]) -> None:
    """Check that the job's dataset is the one of the run.

    Args:
        inputs: Summary of the job's dataset.

    Raises:
        RescoreRefused: The dataset is a different one.
    """
    manifest = source.manifest()
    if manifest is not None and manifest.inputs.get("digest") != inputs["digest"]:
        raise RescoreRefused(
            f"the job's dataset is not the one that {source.location} was made from ({manifest.inputs.get('rows')} "
            f"rows then, {inputs['rows']} now): use the manifest of the run, or, if rows were only added at the end, "
            "--force; trajectories whose prompt differs fail"
        )


def rescored_manifest(source: RunFiles, job: RolloutJob, *, inputs: Mapping[str, Any]) -> RescoredManifest:
    """Manifest of a rescored run: the generation of its source, and the environments of the job."""
    old = source.manifest()
    shards = old.shards if old is not None else max(1, len(source.storage.shards()))
    new = new_manifest(job, shards=shards, inputs=inputs)
    origin: dict[str, Any] = {"location": source.location}
    if old is not None:
        kept = {key: value for key, value in old.identity.items() if not key.startswith(_ENVIRONMENTS)}
        scoring = {key: value for key, value in new.identity.items() if key.startswith(_ENVIRONMENTS)}
        new.identity, new.inputs = dict(sorted({**kept, **scoring}.items())), old.inputs
        origin |= {"job": old.job, "created": old.created, "versions": old.versions}
    fields = {field.name: getattr(new, field.name) for field in dataclasses.fields(new)}
    return RescoredManifest(**fields, rescored_from=origin)


@dataclass(frozen=True, slots=True)
class InitialState:
    """Start of an episode: the prompt's messages (role, content), and the initial state."""

    messages: list[dict[str, str]]
    metadata: Metadata


class InitialStates:
    """Initial states of a dataset's tasks, on disk: 8 bytes of memory per task."""

    def __init__(self, file: IO[bytes], groups: Iterable[PromptGroup]) -> None:
        """Read the dataset once.

        Args:
            file: Exclusive file for the states.

        Raises:
            DatasetError: A row is invalid.
        """
        self._file = file
        self._offsets: array[int] = array("q")
        for group in groups:
            # Equal rows are one task, which was added with the first of them.
            if group.task_index == len(self._offsets):
                self._offsets.append(file.tell())
                row = group.row
                messages = [{"role": message["role"], "content": message["content"]} for message in row.messages]
                # Not as JSON, which would turn a generator's tuples into lists.
                pickle.dump((row.task_name, InitialState(messages, row.metadata)), file)

    def of(self, record: TrajectoryRecord) -> InitialState:
        """Initial state of a trajectory's episode, a new object each time.

        Raises:
            TrajectoryFailed: The dataset has a different prompt for this task, or none.
        """
        if not 0 <= record.task_index < len(self._offsets):
            raise _not_the_row(f"the dataset has {len(self._offsets)} tasks, and no task {record.task_index}")
        self._file.seek(self._offsets[record.task_index])
        name, state = pickle.load(self._file)
        prompt = [
            {"role": message.role, "content": message.content} for message in record.messages if message.turn == 0
        ]
        if name != record.task_name or state.messages != prompt:
            raise _not_the_row(f"task {record.task_index} of the dataset has another prompt than the trajectory")
        assert isinstance(state, InitialState)
        return state


def _not_the_row(cause: str) -> TrajectoryFailed:
    return TrajectoryFailed(cause, kind="data", stage="prompt", tries=1)


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay of one trajectory.

    Attributes:
        outcomes: Outcome of each turn.
        mismatch: First difference from the stored trajectory; None if there is none.
    """

    outcomes: list[StepOutcome]
    mismatch: str | None


class Replayer:
    """Replays stored responses to their environments."""

    def __init__(
        self, environments: Mapping[str, EnvironmentRunner], states: InitialStates, *, retries: RetryPolicy
    ) -> None:
        self._environments = environments
        self._states = states
        self._retries = retries
        # Only for the backoff of retries; trajectories do not depend on it.
        self._draw = random.Random()

    async def replay(self, record: TrajectoryRecord, *, force: bool) -> Replay:
        """Step the environment over the stored responses.

        Args:
            force: Continue after a mismatch, with the stored observations.

        Raises:
            TrajectoryFailed: A step failed permanently, or the dataset does not have its row.
        """
        state = self._states.of(record)
        environment = self._environments[record.task_name]
        metadata = state.metadata
        log: list[ChatMessage] = list(state.messages)
        outcomes: list[StepOutcome] = []
        mismatch: str | None = None
        for turn, (response, observation) in enumerate(_turns(record), start=1):
            log.append({"role": "assistant", "content": response.content})
            outcome = await self._step(environment, log, metadata)
            outcomes.append(outcome)
            if outcome.metadata is not None:
                metadata = outcome.metadata
            mismatch = mismatch or _difference(record, turn, response, observation, outcome)
            if mismatch and not force:
                break
            log.append({"role": observation.role, "content": observation.content})
        return Replay(outcomes, mismatch)

    async def _step(self, environment: EnvironmentRunner, log: list[ChatMessage], metadata: Metadata) -> StepOutcome:
        tries = 0
        while True:
            try:
                return await environment.step(log.copy(), metadata)
            except Exception as error:
                tries += 1
                if tries >= self._retries.environment_attempts or not is_retryable(error):
                    raise failure_of(error, stage="environment", tries=tries) from error
            await asyncio.sleep(
                backoff(
                    tries,
                    base=self._retries.backoff_seconds,
                    longest=self._retries.max_backoff_seconds,
                    draw=self._draw,
                )
            )


def _turns(record: TrajectoryRecord) -> list[tuple[Message, Message]]:
    """Response and observation of each turn."""
    played = [message for message in record.messages if message.turn > 0]
    if len(played) != 2 * record.turn_count:
        raise _not_the_row(f"the trajectory has {len(played)} messages for {record.turn_count} turns")
    return list(zip(played[::2], played[1::2], strict=True))


def _difference(
    record: TrajectoryRecord, turn: int, response: Message, stored: Message, outcome: StepOutcome
) -> str | None:
    if (outcome.role, outcome.content) != (stored.role, stored.content):
        return (
            f"the observation of turn {turn} was {_short(stored.role, stored.content)}, "
            f"is {_short(outcome.role, outcome.content)}"
        )
    if turn < record.turn_count:
        if outcome.terminated:
            return f"the episode now ends after turn {turn}, but originally after turn {record.turn_count}"
    elif response.truncated:
        # The trajectory ended with its response, so the environment's answer does not matter.
        return None
    elif record.stop_reason == "terminated" and not outcome.terminated:
        return f"the episode now continues after turn {turn}, at which it originally ended"
    elif record.stop_reason != "terminated" and outcome.terminated:
        return f"the episode now ends with turn {turn}, at which originally only a limit stopped it"
    return None


def _short(role: str, content: str) -> str:
    text = json.dumps(content, ensure_ascii=False)
    return f"{role} {text if len(text) <= 60 else text[:57] + '...'}"


def with_replay(record: TrajectoryRecord, outcomes: list[StepOutcome]) -> TrajectoryRecord:
    """The same trajectory with rewards, final state and answer of a replay; everything else is unchanged.

    Args:
        outcomes: Outcome of each turn.
    """
    total = numpy.float32(0)
    for outcome in outcomes:
        # float32, as trainers add rewards.
        total += numpy.float32(outcome.reward)
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.reward_parts)
    states = [outcome.metadata for outcome in outcomes if outcome.metadata is not None]
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    return dataclasses.replace(
        record,
        total_reward=float(total),
        rewards=[outcome.reward for outcome in outcomes],
        reward_parts={name: [outcome.reward_parts.get(name, 0.0) for outcome in outcomes] for name in names},
        metadata=states[-1] if states else record.metadata,
        answer=answers[-1] if answers else None,
    )


def rewards_changed(old: TrajectoryRecord, new: TrajectoryRecord) -> bool:
    """True if the trajectory's rewards have changed."""
    return (old.total_reward, old.rewards, old.reward_parts) != (new.total_reward, new.rewards, new.reward_parts)


@dataclass(slots=True)
class RescoreCounts:
    """Counts of one environment's trajectories in a rescoring.

    Attributes:
        stored: Trajectories in the new run; `old_sum` and `new_sum` are their total rewards before and after.
        earlier: Those that an earlier part of the same rescoring stored.
        changed: Those whose rewards have changed; for earlier ones, the total.
        left: Those left unchanged, by reason.
        failed: Trajectories that the environment could not score; they are not in the new run.
        examples: The first few mismatches.
        unscorable: Why none of the environment's trajectories were rescored; empty if they could be.
    """

    stored: int = 0
    earlier: int = 0
    changed: int = 0
    failed: int = 0
    old_sum: float = 0.0
    new_sum: float = 0.0
    left: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    unscorable: str = ""

    @property
    def old_mean(self) -> float | None:
        return self.old_sum / self.stored if self.stored else None

    @property
    def new_mean(self) -> float | None:
        return self.new_sum / self.stored if self.stored else None

    def store(self, old: float, new: float) -> None:
        """Count a trajectory of the new run with its total reward before and after."""
        self.stored += 1
        self.old_sum += old
        self.new_sum += new

    def as_json(self) -> dict[str, Any]:
        """Form in which it is stored."""
        return {
            "trajectories": self.stored,
            "changed": self.changed,
            "left": dict(sorted(self.left.items())),
            "failed": self.failed,
            "reward": {"old_mean": self.old_mean, "new_mean": self.new_mean},
            **({"unscorable": self.unscorable} if self.unscorable else {}),
            "examples": self.examples,
        }


NO_TURNS = "without a turn"
NOT_SELECTED = "of an environment that was not selected"
UNSCORABLE = "of an unscorable environment"
MISMATCHED = "whose environment now answers differently"


class Rescoring:
    """Rescoring of one run into another location."""

    def __init__(
        self,
        source: RunFiles,
        output: Storage,
        replayer: Replayer,
        *,
        environments: Iterable[str],
        concurrency: int,
        seconds: WriteObserver,
        force: bool = False,
        parquet: bool = False,
    ) -> None:
        """
        Args:
            environments: Names of the environments whose trajectories are rescored; all others are copied unchanged.
            concurrency: Maximum number of concurrent replays.
            seconds: WriteObserver the wall seconds of each write.
            force: Accept rewards of environments that now answer differently.
            parquet: Convert finished shards to Parquet.
        """
        self.tallies: dict[str, RescoreCounts] = {}
        self._source = source
        self._output = output
        self._replayer = replayer
        self._selected = frozenset(environments)
        self._slots = asyncio.Semaphore(concurrency)
        self._force = force
        self._parquet = parquet
        self._seconds = seconds
        self._pending = 0

    async def run(self) -> dict[str, RescoreCounts]:
        """Rescore everything that is not in the output yet; returns the counts by environment.

        Raises:
            RecordError: A stored line is not a trajectory.
            JournalBroken: The output cannot be written.
        """
        trajectories = self._source.read()
        try:
            if not self._force:
                await self._probe(trajectories)
            failed = self._journal(records.FAILURES)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(failed.close)
                for shard, found in trajectories.by_shard():
                    await self._shard(shard, found, failed)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        if self._parquet:
            for shard in self._output.shards():
                await asyncio.to_thread(records.to_parquet, self._output, shard)
        self._output.write(SUMMARY, self._summary())
        return self.tallies

    async def _shard(self, name: str, found: Iterator[TrajectoryRecord], failed: Journal) -> None:
        earlier = Trajectories([self._output], shards=[name])
        stored = {record.key: record.total_reward for record in earlier.finished()}
        journal = self._journal(name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(journal.close)
            # Waits for running replays before the journal closes, even after an error.
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            async for record in _read_in_thread(found):
                if record.key in stored:
                    self._count_earlier(record, stored[record.key])
                    continue
                await self._slots.acquire()
                tasks.create_task(self._one(record, journal, failed)).add_done_callback(lambda _: self._slots.release())

    async def _store(self, journal: Journal, record: TrajectoryRecord | FailureRecord) -> None:
        """Schedule the write of a record. Replays do not wait for the parts of an object store."""
        written, size = journal.add(record)
        self._pending += size
        written.add_done_callback(lambda _: self._written(size))
        if self._pending > _PENDING_BYTES:
            await asyncio.shield(written)

    def _written(self, size: int) -> None:
        self._pending -= size

    def _journal(self, name: str) -> Journal:
        return self._output.journal(name, owner="rescore", seconds=self._seconds)

    def _tally(self, name: str) -> RescoreCounts:
        return self.tallies.setdefault(name, RescoreCounts())

    def _count_earlier(self, record: TrajectoryRecord, total: float) -> None:
        tally = self._tally(record.task_name)
        tally.earlier += 1
        tally.changed += total != record.total_reward
        tally.store(record.total_reward, total)

    async def _one(self, record: TrajectoryRecord, journal: Journal, failed: Journal) -> None:
        tally = self._tally(record.task_name)
        try:
            new, reason = await self._score(record, tally)
        except TrajectoryFailed as failure:
            await self._store(failed, _failure(record, failure))
            tally.failed += 1
            return
        await self._store(journal, new)
        tally.store(record.total_reward, new.total_reward)
        if reason:
            tally.left[reason] += 1
        tally.changed += rewards_changed(record, new)

    async def _score(self, record: TrajectoryRecord, tally: RescoreCounts) -> tuple[TrajectoryRecord, str]:
        """The trajectory to store, and why it was left unchanged; empty if it was rescored."""
        if record.task_name not in self._selected:
            return record, NOT_SELECTED
        if record.turn_count == 0:
            return record, NO_TURNS
        if tally.unscorable:
            return record, UNSCORABLE
        replay = await self._replayer.replay(record, force=self._force)
        if replay.mismatch is not None:
            if len(tally.examples) < _EXAMPLES:
                tally.examples.append(f"trajectory {record.task_index}-{record.rollout_index}: {replay.mismatch}")
            if not self._force:
                return record, MISMATCHED
        return with_replay(record, replay.outcomes), ""

    async def _probe(self, trajectories: Trajectories) -> None:
        """Replay some trajectories of each environment twice; an environment with different results is unscorable."""
        probed: dict[str, list[TrajectoryRecord]] = {name: [] for name in self._selected}
        async for record in _read_in_thread(trajectories.finished()):
            some = probed.get(record.task_name)
            if some is not None and len(some) < PROBED and record.turn_count:
                some.append(record)
            if all(len(some) == PROBED for some in probed.values()):
                break
        for name, some in probed.items():
            # One after the other, so that an environment's random or external state differs between the two.
            first, second = [
                await asyncio.gather(
                    *(self._replayer.replay(record, force=True) for record in some), return_exceptions=True
                )
                for _ in range(2)
            ]
            for record, one, other in zip(some, first, second, strict=True):
                difference = _disagreement(one, other)
                if difference:
                    where = f"trajectory {record.task_index}-{record.rollout_index}"
                    self._tally(name).unscorable = f"{where}, replayed twice: {difference}"
                    break

    def _summary(self) -> bytes:
        document = {"format": 1, "environments": {name: tally.as_json() for name, tally in self.tallies.items()}}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def _disagreement(one: Replay | BaseException, other: Replay | BaseException) -> str | None:
    """Difference between two replays of a trajectory; None if one of them failed."""
    if isinstance(one, BaseException) or isinstance(other, BaseException):
        for replay in (one, other):
            if isinstance(replay, BaseException) and not isinstance(replay, TrajectoryFailed):
                raise replay
        return None
    for turn, (a, b) in enumerate(zip(one.outcomes, other.outcomes, strict=True), start=1):
        if (a.role, a.content) != (b.role, b.content):
            return f"the observation of turn {turn} is {_short(a.role, a.content)} and {_short(b.role, b.content)}"
        if a.reward != b.reward:
            return f"the reward of turn {turn} is {a.reward:g} and {b.reward:g}"
        if a.terminated != b.terminated:
            return f"the episode ends with turn {turn} in one replay only"
    return None


async def _read_in_thread(found: Iterator[TrajectoryRecord]) -> AsyncIterator[TrajectoryRecord]:
    """Read in a thread, in chunks, because a store may be slow."""
    while some := await asyncio.to_thread(lambda: list(islice(found, 64))):
        for record in some:
            yield record


def _failure(record: TrajectoryRecord, failure: TrajectoryFailed) -> FailureRecord:
    return FailureRecord(
        task_index=record.task_index,
        rollout_index=record.rollout_index,
        task_name=record.task_name,
        idx=record.idx,
        kind=failure.kind,
        stage=failure.stage,
        cause=f"rescoring: {failure}",
        tries=failure.tries,
        attempt=record.attempt,
        turn_count=record.turn_count,
        seed=record.seed,
        messages=record.messages,
        metadata=record.metadata,
        frames=None if failure.traceback is None else list(failure.traceback.frames),
        traceback=None if failure.traceback is None else failure.traceback.text,
    )
