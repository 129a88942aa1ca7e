"""Rescoring: the environments recompute the rewards of stored trajectories, without generating again.

The environment receives the stored responses one by one, from the row's initial state on. Its observations must equal
the stored ones; only then do the new rewards belong to this trajectory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any, TypeVar

import numpy
import orjson

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.rescored_groups import ReplayedGroup, Rescored, groups_of, with_group_score
from kuberoll_workers.data.messages import Message, chat_message
from kuberoll_workers.data.record import FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import by_environment
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.dataset.task_file import TaskFile
from kuberoll_workers.environments.interface import ChatMessage, Episode, GroupScore, Metadata
from kuberoll_workers.environments.outcome import EpisodeLost, StepInvalid, StepOutcome
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import Journal, WriteObserver
from kuberoll_workers.output.run_directory import RunDirectory, RunManifest, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import DirectoryStorage, Storage, open_storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.rollouts.episodes import MAX_RECOVERIES
from kuberoll_workers.rollouts.failures import Stage, TrajectoryFailed, backoff, failure_of, is_retryable
from kuberoll_workers.rollouts.group_scores import member_of
from kuberoll_workers.rollouts.seeds import task_seed
from kuberoll_workers.rollouts.settings import RetryPolicy

_Result = TypeVar("_Result")

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
        # Its prompts and responses are those of the source.
        new.sources, new.sampling = old.sources, old.sampling
        origin |= {"job": old.job, "created": old.created, "versions": old.versions}
    else:
        new.sampling = None
    fields = {field.name: getattr(new, field.name) for field in dataclasses.fields(new)}
    return RescoredManifest(**fields, rescored_from=origin)


@dataclass(frozen=True, slots=True)
class InitialState:
    """Start of an episode: the prompt's chat messages, the initial state, and the row's tools."""

    messages: list[ChatMessage]
    metadata: Metadata
    tools: list[Tool] | None = None


class InitialStates:
    """Initial states of a dataset's tasks, on disk: 8 bytes of memory per task."""

    def __init__(self, file: IO[bytes], groups: Iterable[PromptGroup]) -> None:
        """Read the dataset once.

        Args:
            file: Exclusive file for the states.

        Raises:
            DatasetError: A row is invalid.
        """
        self._states = TaskFile(file, groups, _encoded_state)

    def of(self, record: TrajectoryRecord) -> InitialState:
        """Initial state of a trajectory's episode, a new object each time.

        Raises:
            TrajectoryFailed: The dataset has a different prompt for this task, or none.
        """
        stored = self._states.find(record.task_index)
        if stored is None:
            raise _not_the_row(f"the dataset has {len(self._states)} tasks, and no task {record.task_index}")
        name, state = pickle.loads(stored)
        if name != record.task_name or _texts(state.messages) != _texts(_prompt(record))[: len(state.messages)]:
            raise _not_the_row(f"task {record.task_index} of the dataset has another prompt than the trajectory")
        assert isinstance(state, InitialState)
        return state


def _encoded_state(row: Row) -> bytes:
    # Not as JSON, which would turn a generator's tuples into lists.
    return pickle.dumps((row.task_name, InitialState(row.messages, row.metadata, row.tools)))


def _not_the_row(cause: str) -> TrajectoryFailed:
    return TrajectoryFailed(cause, reason="RowChanged", stage="prompt")


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay of one trajectory.

    Attributes:
        outcomes: Outcome of each turn.
        mismatch: First difference from the stored trajectory; None if there is none.
        metadata: The episode's state at the end.
    """

    outcomes: list[StepOutcome]
    mismatch: str | None
    metadata: Metadata = None


class Replayer:
    """Replays stored responses to their environments."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentRunner],
        states: InitialStates,
        *,
        retries: RetryPolicy,
        seed: int = 0,
        max_turns: int = 1,
    ) -> None:
        """
        Args:
            seed: Base seed of the run's episodes.
            max_turns: `rollout.maxTurns` of the run, for environments that are told it.
        """
        self._environments = environments
        self._states = states
        self._retries = retries
        self._seed = seed
        self._max_turns = max_turns
        self._episodes = itertools.count(1)
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
        hooks = await self._retrying(environment.find_hooks)
        if not hooks.episodic:
            return await self._steps(record, environment, state, None, force=force)
        # A failed step leaves an episode in an unknown state, so all of it is tried again.
        return await self._retrying(lambda: self._episode(record, environment, state, force=force))

    async def scores_groups(self, name: str) -> bool:
        """True if an environment scores prompt groups.

        Raises:
            TrajectoryFailed: The environment cannot be created.
        """
        return (await self._retrying(self._environments[name].find_hooks)).score_group

    async def score_group(self, trajectories: list[TrajectoryRecord]) -> list[GroupScore]:
        """Score the replayed trajectories of one prompt group; they have no group rewards yet.

        Raises:
            TrajectoryFailed: It failed permanently.
        """
        environment = self._environments[trajectories[0].task_name]
        members = [member_of(record) for record in trajectories]
        return await self._retrying(lambda: environment.score_group(members), stage="group")

    async def _episode(
        self, record: TrajectoryRecord, environment: EnvironmentRunner, state: InitialState, *, force: bool
    ) -> Replay:
        prompt = _prompt(record)
        episode = Episode(
            # Its own name for each replay: the previous one may still be closing.
            id=f"{record.task_index}-{record.rollout_index}-{record.attempt}-{next(self._episodes)}",
            messages=state.messages,
            metadata=state.metadata,
            seed=task_seed(self._seed, record.task_index),
            max_turns=self._max_turns,
            tools=state.tools,
        )
        metadata = state.metadata
        try:
            start = await environment.begin(episode)
            if _texts(state.messages) + _texts(start.messages) != _texts(prompt) and not force:
                return Replay([], "reset returns other messages than before")
            if start.metadata is not None:
                metadata = start.metadata
            begun = InitialState(prompt, metadata)
            return await self._steps(record, environment, begun, episode.id, force=force)
        finally:
            environment.end(episode.id, metadata, "interrupted")

    async def _steps(
        self,
        record: TrajectoryRecord,
        environment: EnvironmentRunner,
        state: InitialState,
        episode: str | None,
        *,
        force: bool,
    ) -> Replay:
        metadata = state.metadata
        log: list[ChatMessage] = list(state.messages)
        outcomes: list[StepOutcome] = []
        mismatch: str | None = None
        if episode is None and _texts(state.messages) != _texts(prompt := _prompt(record)):
            if not force:
                return Replay([], "the environment's reset added messages to the prompt, and it has none now")
            log = list(prompt)
        for turn, (response, observation) in enumerate(_turns(record), start=1):
            log.append(chat_message(response))
            step = functools.partial(environment.step, log.copy(), metadata, episode=episode)
            outcome = await (self._retrying(step) if episode is None else step())
            outcomes.append(outcome)
            if outcome.metadata is not None:
                metadata = outcome.metadata
            mismatch = mismatch or _difference(record, turn, response, observation, outcome)
            if mismatch and not force:
                break
            log += map(chat_message, observation)
        return Replay(outcomes, mismatch, metadata)

    async def _retrying(self, operation: Callable[[], Awaitable[_Result]], *, stage: Stage = "environment") -> _Result:
        tries = losses = 0
        while True:
            try:
                return await operation()
            except EpisodeLost as error:
                # Another episode of its instance was at fault.
                losses += 1
                if losses > MAX_RECOVERIES:
                    raise failure_of(error, stage=stage, tries=losses) from error
                continue
            except Exception as error:
                tries += 1
                if tries >= self._retries.environment_attempts or not is_retryable(error):
                    raise failure_of(error, stage=stage, tries=tries) from error
            await asyncio.sleep(
                backoff(
                    tries,
                    base=self._retries.backoff_seconds,
                    longest=self._retries.max_backoff_seconds,
                    draw=self._draw,
                )
            )


def _prompt(record: TrajectoryRecord) -> list[ChatMessage]:
    """The prompt's messages, with those that `reset` added."""
    return [chat_message(message) for message in record.messages if message.turn == 0]


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and content of each: older versions did not store further fields."""
    return [(message["role"], message["content"]) for message in messages]


def _turns(record: TrajectoryRecord) -> list[tuple[Message, list[Message]]]:
    """Response and observation of each turn."""
    turns = [list(played) for turn, played in itertools.groupby(record.messages, lambda message: message.turn) if turn]
    if len(turns) != record.turn_count or any(len(played) < 2 for played in turns):
        played = sum(map(len, turns))
        raise _not_the_row(f"the trajectory has {played} messages for {record.turn_count} turns")
    return [(response, observation) for response, *observation in turns]


def _difference(
    record: TrajectoryRecord, turn: int, response: Message, stored: Sequence[Message], outcome: StepOutcome
) -> str | None:
    before, now = list(map(chat_message, stored)), list(outcome.observation)
    if before != now:
        return f"the observation of turn {turn} was {_short(before)}, is {_short(now)}"
    if turn < record.turn_count:
        if outcome.terminated:
            return f"the episode now ends after turn {turn}, but originally after turn {record.turn_count}"
    elif response.truncated:
        # The trajectory ended with its response, so the environment's answer does not matter.
        return None
    elif by_environment(record.stop_reason) and not outcome.terminated:
        return f"the episode now continues after turn {turn}, at which it originally ended"
    elif not by_environment(record.stop_reason) and outcome.terminated:
        return f"the episode now ends with turn {turn}, at which originally only a limit stopped it"
    return None


def _short(observation: Sequence[ChatMessage]) -> str:
    shown = []
    for message in observation:
        text = json.dumps(message["content"], ensure_ascii=False)
        shown.append(f"{message['role']} {text if len(text) <= 60 else text[:57] + '...'}")
    return ", ".join(shown)


def with_replay(
    record: TrajectoryRecord, outcomes: list[StepOutcome], *, metadata: Metadata = None
) -> TrajectoryRecord:
    """The same trajectory with rewards, final state and answer of a replay, and without a group's score.

    Args:
        outcomes: Outcome of each turn.
        metadata: The final state, for a trajectory whose stored state is its group's; else that of the last outcome.
    """
    total = numpy.float32(0)
    for outcome in outcomes:
        # float32, as trainers add rewards.
        total += numpy.float32(outcome.reward)
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.reward_parts)
    states = [outcome.metadata for outcome in outcomes if outcome.metadata is not None]
    stored = record.metadata if record.group_reward is None else metadata
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    return dataclasses.replace(
        record,
        total_reward=float(total),
        rewards=[outcome.reward for outcome in outcomes],
        reward_parts={name: [outcome.reward_parts.get(name, 0.0) for outcome in outcomes] for name in names},
        metadata=states[-1] if states else stored,
        answer=answers[-1] if answers else None,
        group_reward=None,
    )


def rewards_changed(old: TrajectoryRecord, new: TrajectoryRecord) -> bool:
    """True if the trajectory's rewards have changed."""
    parts = ("total_reward", "rewards", "reward_parts", "group_reward")
    return any(getattr(old, name) != getattr(new, name) for name in parts)


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
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            group_sizes: Rollout indexes of each row, by environment; needed for those that score prompt groups.
            environments: Names of the environments whose trajectories are rescored; all others are copied unchanged.
            concurrency: Maximum number of concurrent replays.
            seconds: Told the wall seconds of each write.
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
        self._sizes = dict(group_sizes or {})
        self._pending = 0

    async def run(self) -> dict[str, RescoreCounts]:
        """Rescore everything that is not in the output yet; returns the counts by environment.

        Raises:
            RecordError: A stored line is not a trajectory.
            JournalBroken: The output cannot be written.
        """
        trajectories = self._source.read()
        self._sizes = {name: size for name, size in self._sizes.items() if await self._scores_groups(name)}
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
        groups = await asyncio.to_thread(self._groups_of_shard, name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(journal.close)
            # Waits for running replays before the journal closes, even after an error.
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            async for record in _read_in_thread(found):
                group = groups.get(record.key)
                if record.key in stored:
                    self._count_earlier(record, stored[record.key])
                    if group is None or group.keys <= stored.keys():
                        continue
                await self._slots.acquire()
                task = tasks.create_task(self._one(record, journal, failed, group, stored))
                task.add_done_callback(lambda _: self._slots.release())

    def _groups_of_shard(self, name: str) -> Mapping[TrajectoryKey, ReplayedGroup]:
        if not self._sizes:
            return {}
        return groups_of(Trajectories([self._source.storage], shards=[name]).finished(), self._sizes)

    async def _scores_groups(self, name: str) -> bool:
        try:
            return name in self._selected and await self._replayer.scores_groups(name)
        except TrajectoryFailed:
            # Each of its trajectories fails for the same reason.
            return False

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

    async def _one(
        self,
        record: TrajectoryRecord,
        journal: Journal,
        failed: Journal,
        group: ReplayedGroup | None,
        stored: Collection[TrajectoryKey],
    ) -> None:
        try:
            rescored = Rescored(record, *await self._score(record, self._tally(record.task_name)))
        except TrajectoryFailed as failure:
            rescored = Rescored(record, failure)
        if group is None:
            await self._put(rescored, journal, failed)
            return
        group.replayed.append(rescored)
        if group.complete:
            for one in await self._score_group(group):
                # An interrupted rescoring may have stored some of them.
                if one.old.key not in stored:
                    await self._put(one, journal, failed)

    async def _put(self, rescored: Rescored, journal: Journal, failed: Journal) -> None:
        old, new = rescored.old, rescored.new
        tally = self._tally(old.task_name)
        if isinstance(new, TrajectoryFailed):
            await self._store(failed, _failure(old, new))
            tally.failed += 1
            return
        await self._store(journal, new)
        tally.store(old.total_reward, new.total_reward)
        if rescored.reason:
            tally.left[rescored.reason] += 1
        tally.changed += rewards_changed(old, new)

    async def _score_group(self, group: ReplayedGroup) -> list[Rescored]:
        """The replayed trajectories with the scores of their group; all are left unchanged if one has to be."""
        replayed = sorted(group.replayed, key=lambda one: one.old.key)
        for reason in (MISMATCHED, UNSCORABLE):
            if any(one.reason == reason for one in replayed):
                return [Rescored(one.old, one.old, reason) for one in replayed]
        new = {one.old.key: one.new for one in replayed if isinstance(one.new, TrajectoryRecord) and not one.reason}
        if not new:
            return replayed
        scored: dict[TrajectoryKey, TrajectoryRecord | TrajectoryFailed]
        try:
            scores = await self._replayer.score_group(list(new.values()))
            scored = {
                key: with_group_score(record, score) for (key, record), score in zip(new.items(), scores, strict=True)
            }
        except TrajectoryFailed as failure:
            scored = dict.fromkeys(new, failure)
        except StepInvalid as fault:
            scored = dict.fromkeys(new, failure_of(fault, stage="group", tries=1))
        return [dataclasses.replace(one, new=scored.get(one.old.key, one.new)) for one in replayed]

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
        return with_replay(record, replay.outcomes, metadata=replay.metadata), ""

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
        if a.observation != b.observation:
            return f"the observation of turn {turn} is {_short(a.observation)} and {_short(b.observation)}"
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
