"""Memory-efficient sets of trajectory keys."""

from __future__ import annotations

from collections.abc import Iterable

from kuberoll_workers.data.record import TrajectoryKey

_ROLLOUT_BITS = 32


class KeySet:
    """A set of trajectory keys, at about 70 bytes each: a third of a set of tuples."""

    __slots__ = ("_packed",)

    def __init__(self, keys: Iterable[TrajectoryKey] = ()) -> None:
        self._packed: set[int] = set()
        for key in keys:
            self.add(key)

    def add(self, key: TrajectoryKey) -> None:
        self._packed.add(key.task_index << _ROLLOUT_BITS | key.rollout_index)

    def __contains__(self, key: TrajectoryKey) -> bool:
        return key.task_index << _ROLLOUT_BITS | key.rollout_index in self._packed

    def __len__(self) -> int:
        return len(self._packed)
