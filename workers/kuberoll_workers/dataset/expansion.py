"""Expansion of rows to prompt groups and samples, and their assignment to shards."""

from __future__ import annotations

import functools
import hashlib
import itertools
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import orjson

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.prompts import AgentRow, Prompt, Sample, SampleGroup, prompt_messages
from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.data.tokenization import TemplateRefused, Tokenizer
from kuberoll_workers.dataset.gym_rows import names_agent, row_of_dataset, task_number
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition
from kuberoll_workers.output.run_state import RunState
from kuberoll_workers.rollouts.seeds import task_seed, trajectory_seed

Lacking = Literal["anything", "score", "score by an outage"]
"""What trajectories lack that are played: some of their turns or only a score, a score alone, or one that an outage
has cost them."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Samples of one row: `rollout_indexes` of the task `task_index`, of which the first `keep` to finish are kept."""

    row: Row
    task_index: int
    rollout_indexes: range
    keep: int


class _Tasks:
    """All tasks so far, at about 150 bytes each: a million of them take 143 MB."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._ends = array("q")
        # Content and place of the task's first row, for rows that name their task.
        self._contents = array("Q")
        self._sources = array("I")
        self._positions = array("q")
        self._source_numbers: dict[tuple[str, str], int] = {}

    def number(self, row: Row) -> int:
        """Number of the row's task, identified by its `task_id` if it has one, else by its content.

        Raises:
            DatasetError: Another row with the same `task_id` has different content.
        """
        if row.task_id is None:
            key, content = _digest(row.content, 16, b"content"), 0
        else:
            key, content = _digest(orjson.dumps(row.task_id), 16, b"task_id"), _digest(row.content, 8, b"content")
        number = self._numbers.setdefault(key, len(self._ends))
        if number == len(self._ends):
            self._ends.append(0)
            self._contents.append(content)
            source = (row.place.before, row.place.after)
            self._sources.append(self._source_numbers.setdefault(source, len(self._source_numbers)))
            self._positions.append(row.place.number)
        elif self._contents[number] != content:
            raise DatasetError(
                f"{row.where}: task_id: {row.task_id!r} is already the task of {self._place(number)}, and that row has "
                "different content; rows of one task must be equal. Give one of them another task_id (Gym: "
                "_ng_task_index)"
            )
        return number

    def take(self, number: int, count: int) -> range:
        """The next `count` rollout indexes of a task."""
        begun = self._ends[number]
        self._ends[number] = begun + count
        return range(begun, begun + count)

    def _place(self, number: int) -> RowPosition:
        before, after = list(self._source_numbers)[self._sources[number]]
        return RowPosition(before, self._positions[number], after)


def _digest(data: bytes, size: int, kind: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=size, person=kind).digest(), "little")


def expand(rows: Iterable[Row], repeats: Mapping[str, int], *, oversample: int = 0) -> Iterator[PromptGroup]:
    """Number tasks and rollouts; all samples of a row are adjacent (order aabbcc).

    Rows with the same `task_id`, or without one with the same content, are the same task, wherever they are; a
    duplicate continues the numbering of its rollouts. Memory: about 150 bytes per task.

    Args:
        repeats: Samples per row, by task name.
        oversample: Additional samples per row.

    Raises:
        DatasetError: Rows with the same `task_id` differ.
    """
    tasks = _Tasks()
    for row in rows:
        task = tasks.number(row)
        count = repeats[row.task_name]
        yield PromptGroup(row, task, tasks.take(task, count + oversample), count)


def sample_groups(
    groups: Iterable[PromptGroup],
    *,
    tokenizer: Tokenizer,
    shards: Collection[int],
    shard_count: int,
    done: RunState,
    seed: int | None,
    episode_seed: int = 0,
    ordered: bool = False,
    lacking: Lacking = "anything",
    whole: bool = False,
) -> Iterator[SampleGroup]:
    """Groups of some shards that still have to be run, tokenized on demand.

    Args:
        done: State of the run so far.
        seed: The job's base seed, for rows without one; None for random sampling.
        episode_seed: The base seed of episodes, which do not depend on how the policy is sampled.
        ordered: Number the groups of each shard, those that are done, too.
        lacking: What samples lack that are taken.
        whole: A group waits for all of its samples: leave out one that these would not complete.
    """
    numbers = {shard: itertools.count() for shard in shards}
    for group in groups:
        if (number := numbers.get(shard_of(group.task_index, shard_count))) is None:
            continue
        order = next(number) if ordered else None
        keys = [TrajectoryKey(group.task_index, index) for index in group.rollout_indexes]
        finished = [key for key in keys if key in done.stored]
        stored = len(finished)
        if stored >= group.keep or any(key in done.filtered for key in keys):
            continue
        keep, missing = group.keep - stored, [key for key in keys if key not in done.stored]
        if lacking != "anything":
            takes = done.unscored.is_outage if lacking == "score by an outage" else done.unscored.__contains__
            missing = [*filter(takes, missing)]
            if not missing or (whole and len(missing) < keep):
                continue
            keep = min(keep, len(missing))
        # One for all that are left of the group: to a reader its latest attempt is the one that is going on.
        attempt = max(done.attempts.get(key, 0) for key in keys)
        prompt = tokenize(group, tokenizer, seed=task_seed(episode_seed, group.task_index))
        base = group.row.seed if group.row.seed is not None else seed
        samples = tuple(
            Sample(
                prompt=prompt,
                rollout_index=key.rollout_index,
                seed=None if base is None else trajectory_seed(base, *key),
                attempt=attempt,
                partial=done.take_partial(key),
                group_order=order,
            )
            for key in missing
        )
        yield SampleGroup(
            samples=samples,
            keep=keep,
            decided=stored > 0,
            stored=functools.partial(done.stored_records, finished) if finished else None,
            order=order,
        )


def tokenize(group: PromptGroup, tokenizer: Tokenizer, *, seed: int = 0) -> Prompt:
    """Render a row's chat once, for all samples of its group.

    Raises:
        DatasetError: The model's chat template rejects the messages, or leaves the tools out.
    """
    row = group.row
    try:
        # Without messages, those of the environment's reset are the prompt.
        ids = tokenizer.render_chat(row.messages, tools=row.tools) if row.messages else token_array()
    except TemplateRefused as error:
        raise DatasetError(f"{row.where}: {error}") from error
    except Exception as error:
        # Templates are programs and raise arbitrary errors (an unknown role, a forbidden order).
        raise DatasetError(f"{row.where}: the model's chat template rejects these messages: {error}") from error
    return Prompt(
        task_index=group.task_index,
        task_name=row.task_name,
        idx=row.idx,
        messages=tuple(prompt_messages(row.messages, ids)),
        token_ids=ids,
        metadata=row.metadata,
        stop_strings=row.stop_strings,
        sampling=row.sampling,
        row=row.where,
        seed=seed,
        tools=row.tools,
        request=None if row.given is None else _request(row),
    )


def _request(row: Row) -> AgentRow:
    return AgentRow(fields=row_of_dataset(row), number=task_number(row), named=names_agent(row))
