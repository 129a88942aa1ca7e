"""Rule for which of several stored lines of a trajectory counts; docs/reference/run-files.md states it for users.

A trajectory has several lines if it failed or was dropped before it finished, if a crash interrupted the rewriting of a
file, if a worker that was believed dead stored a trajectory that another one had run again, or if files were merged.
The rule depends only on the content of lines, never on their position or on the format of a shard.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    TrajectoryKey,
    TrajectoryRecord,
    Unstorable,
    encode_line,
)
from kuberoll_workers.data.stop_reasons import ENDINGS

EndedRecord = TrajectoryRecord | FailureRecord | DroppedRecord


class Rank(NamedTuple):
    """Rank of a line among the lines of its trajectory: the greatest counts.

    Attributes:
        final: 3 for a trajectory that its consumer found too old, even if it finished; 2 for a finished one, which is
            never run again; 1 for a filtered group, whose samples are all final; 0 for trajectories that a resumed run
            retries.
        attempt: Number of the attempt; a later one starts after the earlier one has failed.
        failed: True for a failure, which is more informative than a dropped trajectory.
        digest: Digest of the content, which breaks ties independently of the reward.
    """

    final: int
    attempt: int
    failed: bool
    digest: bytes


def rank(record: EndedRecord) -> Rank:
    """The rank of a stored line."""
    final = ENDINGS[record.reason if isinstance(record, DroppedRecord) else record.stop_reason].precedence
    try:
        contents = encode_line(record)
    except Unstorable:
        # KubeRoll also reads lines that it would not write.
        contents = repr(record).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(contents, digest_size=8).digest()
    return Rank(final, record.attempt, isinstance(record, FailureRecord), digest)


class Precedence:
    """Choice among the lines of each trajectory that has several.

    Attributes:
        duplicates: Number of lines that do not count, because another line of the same trajectory does.
        environments: Names of environments in the lines of a task, for tasks whose lines disagree.
    """

    def __init__(self, keys: Iterable[TrajectoryKey], lines: Callable[[], Iterable[EndedRecord]]) -> None:
        """Compare the keys of all lines, and rank the lines of the trajectories that have several.

        Memory is 16 bytes for each line, and some 300 for each trajectory that has several.

        Args:
            keys: Keys of all lines.
            lines: Reads the lines; called only if a key repeats.
        """
        self._best: dict[TrajectoryKey, Rank] = {}
        self.duplicates = 0
        names: dict[int, set[str]] = {}
        several = repeated(keys)
        for record in lines() if several else ():
            if record.key in several:
                found = rank(record)
                self.duplicates += record.key in self._best
                self._best[record.key] = max(found, self._best.get(record.key, found))
                names.setdefault(record.task_index, set()).add(record.task_name)
        self.environments = {task: of_task for task, of_task in names.items() if len(of_task) > 1}

    def selector(self) -> Callable[[EndedRecord], bool]:
        """A predicate for each line in turn: True if it counts. Of equal lines the first counts."""
        done: set[TrajectoryKey] = set()

        def counts(record: EndedRecord) -> bool:
            best = self._best.get(record.key)
            if best is None:
                return True
            if record.key in done or rank(record) != best:
                return False
            done.add(record.key)
            return True

        return counts


def repeated(keys: Iterable[TrajectoryKey]) -> set[TrajectoryKey]:
    """Keys that occur more than once."""
    tasks, rollouts = array("q"), array("q")
    for key in keys:
        tasks.append(key.task_index)
        rollouts.append(key.rollout_index)
    task, rollout = _integers(tasks), _integers(rollouts)
    order: npt.NDArray[np.int64] = np.lexsort((rollout, task))
    task, rollout = task[order], rollout[order]
    again = (task[1:] == task[:-1]) & (rollout[1:] == rollout[:-1])
    pairs = zip(task[1:][again].tolist(), rollout[1:][again].tolist(), strict=True)
    return {TrajectoryKey(*pair) for pair in pairs}


def _integers(values: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64)
