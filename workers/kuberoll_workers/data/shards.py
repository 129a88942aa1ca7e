"""Shards of a job: the shard of a task, and each shard's share of a number."""

from __future__ import annotations


def shard_of(task_index: int, shards: int) -> int:
    """Shard of a task. All its samples belong to one shard, whichever worker runs it."""
    return task_index % shards


def share(total: int, shard: int, shards: int) -> int:
    """A shard's share of a number: the shares add up, and differ by at most 1."""
    return total // shards + (shard < total % shards)
