"""Sampling seeds, derived from the job, task, rollout and turn only.

Results must not depend on the order of trajectories, their concurrency or the number of workers.
"""

from __future__ import annotations

import hashlib

_MASK = 2**64 - 1


def job_seed(name: str, seed: int | None) -> int:
    """Base seed of a job: the given one, or one derived from the job's name."""
    return seed if seed is not None else _digest(name.encode())


def trajectory_seed(base: int, task_index: int, rollout_index: int) -> int:
    """Seed of one trajectory, a 63-bit number; engines take signed 64-bit ones."""
    return _digest(b"%d/%d/%d" % (base, task_index, rollout_index))


def task_seed(base: int, task_index: int) -> int:
    """Seed of the episodes of one task, a 63-bit number: all of a prompt group begin in the same state."""
    return _digest(b"task %d/%d" % (base, task_index))


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn, a 63-bit number: reusing one seed would repeat the same draws in each turn."""
    # SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    mixed = (seed + turn * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
