"""From rows to prompt groups to samples, and which shard each belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.collection.dataset import DatasetError, Row
from kuberoll_workers.collection.run_state import RunState
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.data.tokenizer import Tokenizer
from kuberoll_workers.rollouts.seeds import trajectory_seed


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The samples that one row asks for: `rollout_indexes` of the task `task_index`, the first `keep` to finish."""

    row: Row
    task_index: int
    rollout_indexes: range
    keep: int


def expand(rows: Iterable[Row], repeats: Mapping[str, int], *, oversample: int = 0) -> Iterator[PromptGroup]:
    """Number tasks and rollouts; all samples of a row come together (order aabbcc).

    Rows of the same content are the same task, wherever they stand; a duplicate continues the numbering of its
    rollouts. Memory: about 100 bytes a task.

    Args:
        repeats: Samples per row, by task name.
        oversample: Samples of each row beyond those.
    """
    tasks: dict[bytes, tuple[int, int]] = {}
    for row in rows:
        digest = hashlib.blake2b(row.content, digest_size=16).digest()
        index, begun = tasks.get(digest, (len(tasks), 0))
        count = repeats[row.task_name]
        end = begun + count + oversample
        tasks[digest] = (index, end)
        yield PromptGroup(row, index, range(begun, end), count)


def shard_of(task_index: int, shards: int) -> int:
    """The shard of a task. All its samples are in one shard, whoever runs it."""
    return task_index % shards


def share(total: int, shard: int, shards: int) -> int:
    """A shard's part of a number that is for all shards: they add up, and none is larger than another by 2."""
    return total // shards + (shard < total % shards)


def sample_groups(
    groups: Iterable[PromptGroup],
    *,
    tokenizer: Tokenizer,
    shards: Collection[int],
    shard_count: int,
    done: RunState,
    seed: int | None,
) -> Iterator[SampleGroup]:
    """The groups of some shards that are still to be run, tokenized when they are asked for.

    Args:
        done: What is there already.
        seed: The job's base seed; None: no seeds.
    """
    wanted = frozenset(shards)
    for group in groups:
        if shard_of(group.task_index, shard_count) not in wanted:
            continue
        keys = [TrajectoryKey(group.task_index, index) for index in group.rollout_indexes]
        stored = sum(key in done.stored for key in keys)
        if stored >= group.keep or any(key in done.filtered for key in keys):
            continue
        prompt = tokenize(group, tokenizer)
        samples = tuple(
            Sample(
                prompt=prompt,
                rollout_index=key.rollout_index,
                seed=None if seed is None else trajectory_seed(seed, *key),
                attempt=done.attempts.get(key, 0),
                partial=done.take_partial(key),
            )
            for key in keys
            if key not in done.stored
        )
        yield SampleGroup(samples=samples, keep=group.keep - stored, decided=stored > 0)


def tokenize(group: PromptGroup, tokenizer: Tokenizer) -> Prompt:
    """Render a row's chat once, for all samples of its group.

    Raises:
        DatasetError: The model's chat template refuses the messages.
    """
    row = group.row
    try:
        ids = tokenizer.render_chat(row.messages)
    except Exception as error:
        # Templates are programs: they raise what they like (a role they do not know, an order they forbid).
        raise DatasetError(f"{row.where}: the model's chat template refuses these messages: {error}") from error
    return Prompt(
        task_index=group.task_index,
        task_name=row.task_name,
        idx=row.idx,
        messages=tuple(prompt_messages(row.messages, ids)),
        token_ids=ids,
        metadata=row.metadata,
        stop_strings=row.stop_strings,
        sampling=row.sampling,
    )


def prompt_messages(messages: list[dict[str, Any]], ids: Any) -> Iterator[Message]:
    """The prompt's messages, the last of them carrying the ids of the whole prompt.

    A template may write tokens between messages that belong to none, so ids are not split by message.
    """
    for number, message in enumerate(messages, start=1):
        own = ids if number == len(messages) else token_array()
        yield Message(role=message["role"], content=message["content"], token_ids=own)
