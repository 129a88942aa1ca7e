"""Rewards of stored trajectories, computed anew by their environments: nothing is generated again.

Each response is handed to the environment as it was stored, from the row's first state on. What the environment
answers must be what it answered then: only then are the new rewards those of this trajectory.
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
from kuberoll_workers.output.journal import Journal, Observes
from kuberoll_workers.output.run_directory import RunDirectory, RunManifest, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import DirectoryStorage, Storage, open_storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.rollouts.failures import TrajectoryFailed, backoff, failure_of, worth_another_try
from kuberoll_workers.rollouts.settings import RetryPolicy

SUMMARY = "rescored.json"
PROBED = 16
"""Trajectories of each environment that are replayed twice, to see whether it answers the same twice."""

_EXAMPLES = 5
_PENDING_BYTES = 64 << 20
_ENVIRONMENTS = "environments["


class RescoreRefused(Exception):
    """The trajectories cannot be rescored so; the message says why and what to do."""


class Mismatch(Exception):
    """The environment does not answer what it answered when the trajectory was made: says where."""


@dataclass(slots=True, kw_only=True)
class RescoredManifest(RunManifest):
    """The manifest of a rescored run.

    Attributes:
        rescored_from: `location`, `job` and `created` of the run whose trajectories these are.
    """

    rescored_from: dict[str, Any] = field(default_factory=dict)


@contextmanager
def open_rescored(
    source: RunFiles, location: str, job: RolloutJob, *, inputs: Mapping[str, Any], resume: bool, force: bool
) -> Iterator[Storage]:
    """The place of a rescored run, held while it is written to.

    Args:
        inputs: What the job's dataset comes to.
        resume: Go on with what is there.

    Raises:
        RescoreRefused: It is the run itself.
        RunRefused: It holds something else.
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
    """See that a job has the dataset that a run was made from.

    Args:
        inputs: What the job's dataset comes to.

    Raises:
        RescoreRefused: It has another one.
    """
    manifest = source.manifest()
    if manifest is not None and manifest.inputs.get("digest") != inputs["digest"]:
        raise RescoreRefused(
            f"the job's dataset is not the one that {source.location} was made from ({manifest.inputs.get('rows')} "
            f"rows then, {inputs['rows']} now): give the manifest of the run, or, where only rows were added at the "
            "end, --force; trajectories whose prompt differs fail"
        )


def rescored_manifest(source: RunFiles, job: RolloutJob, *, inputs: Mapping[str, Any]) -> RescoredManifest:
    """What a rescored run is: the generation of its source, and the environments of the job."""
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
class FirstState:
    """What an episode begins with: its prompt's messages (role, content) and its state."""

    messages: list[dict[str, str]]
    metadata: Metadata


class FirstStates:
    """The first states of a dataset's tasks, on disk: 8 bytes of memory a task."""

    def __init__(self, file: IO[bytes], groups: Iterable[PromptGroup]) -> None:
        """Read the dataset once.

        Args:
            file: Where they are kept; for this alone.

        Raises:
            DatasetError: A row is not usable.
        """
        self._file = file
        self._offsets: array[int] = array("q")
        for group in groups:
            # A row that is there twice is one task, and was numbered the first time.
            if group.task_index == len(self._offsets):
                self._offsets.append(file.tell())
                row = group.row
                messages = [{"role": said["role"], "content": said["content"]} for said in row.messages]
                # Not as JSON: a generator's tuples are to be tuples again.
                pickle.dump((row.task_name, FirstState(messages, row.metadata)), file)

    def of(self, record: TrajectoryRecord) -> FirstState:
        """The first state of a trajectory's episode, a new object each time.

        Raises:
            TrajectoryFailed: The dataset has another prompt there, or none.
        """
        if not 0 <= record.task_index < len(self._offsets):
            raise _not_the_row(f"the dataset has {len(self._offsets)} tasks, and no task {record.task_index}")
        self._file.seek(self._offsets[record.task_index])
        name, state = pickle.load(self._file)
        prompt = [{"role": said.role, "content": said.content} for said in record.messages if said.turn == 0]
        if name != record.task_name or state.messages != prompt:
            raise _not_the_row(f"task {record.task_index} of the dataset has another prompt than the trajectory")
        assert isinstance(state, FirstState)
        return state


def _not_the_row(cause: str) -> TrajectoryFailed:
    return TrajectoryFailed(cause, kind="data", stage="prompt", tries=1)


@dataclass(frozen=True, slots=True)
class Replay:
    """What the environment said to a trajectory this time.

    Attributes:
        outcomes: One per turn.
        mismatch: Where it first answered otherwise than it did then; None: nowhere.
    """

    outcomes: list[StepOutcome]
    mismatch: str | None


class Replayer:
    """Plays stored responses to their environments."""

    def __init__(
        self, environments: Mapping[str, EnvironmentRunner], states: FirstStates, *, retries: RetryPolicy
    ) -> None:
        self._environments = environments
        self._states = states
        self._retries = retries
        # Waits between retries only; nothing of a trajectory depends on it.
        self._draw = random.Random()

    async def replay(self, record: TrajectoryRecord, *, force: bool) -> Replay:
        """Step the environment over the stored responses.

        Args:
            force: Go on after a mismatch, with the stored observations.

        Raises:
            TrajectoryFailed: A step failed for good, or the dataset has not its row.
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
                if tries >= self._retries.environment_attempts or not worth_another_try(error):
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
    """Each turn's response and observation."""
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
            return f"the episode now ends after turn {turn}, it went on to turn {record.turn_count}"
    elif response.truncated:
        # Such a trajectory ended with its response, whatever the environment said to it.
        return None
    elif record.stop_reason == "terminated" and not outcome.terminated:
        return f"the episode now goes on after turn {turn}, with which it ended"
    elif record.stop_reason != "terminated" and outcome.terminated:
        return f"the episode now ends with turn {turn}, where only a limit stopped it"
    return None


def _short(role: str, content: str) -> str:
    text = json.dumps(content, ensure_ascii=False)
    return f"{role} {text if len(text) <= 60 else text[:57] + '...'}"


def rescored(record: TrajectoryRecord, outcomes: list[StepOutcome]) -> TrajectoryRecord:
    """The same trajectory with the rewards, the last state and the answer of a replay; all else stays.

    Args:
        outcomes: One for each of its turns.
    """
    total = numpy.float32(0)
    for outcome in outcomes:
        # float32, as trainers add rewards up (rule 5 of the design).
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


def changed(old: TrajectoryRecord, new: TrajectoryRecord) -> bool:
    """Whether a trajectory's rewards are others now."""
    return (old.total_reward, old.rewards, old.reward_parts) != (new.total_reward, new.rewards, new.reward_parts)


@dataclass(slots=True)
class Tally:
    """What became of one environment's trajectories.

    Attributes:
        stored: In the new run; `old_sum` and `new_sum` are their total rewards before and after.
        earlier: Of these, stored by an earlier part of the same rescoring.
        changed: Of these, with other rewards than before; of the earlier ones, with another total.
        left: Of these, as they were, by reason.
        failed: Not in the new run: the environment could not score them.
        examples: The first few trajectories that were left, and why.
        unscorable: Why none of the environment's trajectories were rescored; empty where they could be.
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
        """The form in which it is stored."""
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
NOT_ASKED = "of an environment that was not asked"
UNSCORABLE = "of an unscorable environment"
MISMATCHED = "whose environment answers otherwise now"


class Rescoring:
    """The rescoring of one run into another place."""

    def __init__(
        self,
        source: RunFiles,
        output: Storage,
        replayer: Replayer,
        *,
        environments: Iterable[str],
        concurrency: int,
        seconds: Observes,
        force: bool = False,
        parquet: bool = False,
    ) -> None:
        """
        Args:
            environments: The names of those whose trajectories are rescored; the others' are taken over as they are.
            concurrency: Trajectories that are replayed at once.
            seconds: Observes the wall seconds of each write.
            force: Take the rewards of environments that answer otherwise, too.
            parquet: Turn each shard into Parquet when it is done.
        """
        self.tallies: dict[str, Tally] = {}
        self._source = source
        self._output = output
        self._replayer = replayer
        self._asked = frozenset(environments)
        self._places = asyncio.Semaphore(concurrency)
        self._force = force
        self._parquet = parquet
        self._seconds = seconds
        self._pending = 0

    async def run(self) -> dict[str, Tally]:
        """Rescore everything that is not in the output yet; what became of it, by environment.

        Raises:
            RecordError: A stored line is no trajectory.
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
            # Waits for what is under way before the journal closes, whatever goes wrong.
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            async for record in _off_the_loop(found):
                if record.key in stored:
                    self._count_earlier(record, stored[record.key])
                    continue
                await self._places.acquire()
                tasks.create_task(self._one(record, journal, failed)).add_done_callback(
                    lambda _: self._places.release()
                )

    async def _store(self, journal: Journal, record: TrajectoryRecord | FailureRecord) -> None:
        """Have a record written. Parts of an object store wait for each other, replays do not wait for parts."""
        written, size = journal.add(record)
        self._pending += size
        written.add_done_callback(lambda _: self._written(size))
        if self._pending > _PENDING_BYTES:
            await asyncio.shield(written)

    def _written(self, size: int) -> None:
        self._pending -= size

    def _journal(self, name: str) -> Journal:
        return self._output.journal(name, owner="rescore", seconds=self._seconds)

    def _tally(self, name: str) -> Tally:
        return self.tallies.setdefault(name, Tally())

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
        tally.changed += changed(record, new)

    async def _score(self, record: TrajectoryRecord, tally: Tally) -> tuple[TrajectoryRecord, str]:
        """The trajectory as it is stored now, and why it was left as it was; empty: it was not."""
        if record.task_name not in self._asked:
            return record, NOT_ASKED
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
        return rescored(record, replay.outcomes), ""

    async def _probe(self, trajectories: Trajectories) -> None:
        """Replay some trajectories of each environment twice: one that does not answer the same twice is unscorable."""
        probed: dict[str, list[TrajectoryRecord]] = {name: [] for name in self._asked}
        async for record in _off_the_loop(trajectories.finished()):
            some = probed.get(record.task_name)
            if some is not None and len(some) < PROBED and record.turn_count:
                some.append(record)
            if all(len(some) == PROBED for some in probed.values()):
                break
        for name, some in probed.items():
            # One after the other, so that what an environment draws or reads has gone on in between.
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
    """How two replays of a trajectory differ; one that failed says nothing."""
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
            return f"the episode ends with turn {turn}, and goes on"
    return None


async def _off_the_loop(found: Iterator[TrajectoryRecord]) -> AsyncIterator[TrajectoryRecord]:
    """Read in a thread, some at a time: a store may be slow."""
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
    )
