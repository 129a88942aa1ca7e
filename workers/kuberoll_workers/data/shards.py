"""The shards of a job: the one that a task belongs to, and each shard's part of a number."""

from __future__ import annotations


def shard_of(task_index: int, shards: int) -> int:
    """The shard of a task. All its samples are in one shard, whoever runs it."""
    return task_index % shards


def share(total: int, shard: int, shards: int) -> int:
    """A shard's part of a number that is for all shards: they add up, and none is larger than another by 2."""
    return total // shards + (shard < total % shards)
