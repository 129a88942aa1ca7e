"""The distributions that exported responses were sampled from, of which a trainer may assume that they are one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import orjson

from kuberoll_workers.data.record import Branch, TrajectoryRecord
from kuberoll_workers.data.sampling import Distribution, in_words, resolved, unlike

Assumption: TypeAlias = Callable[[Distribution], object]
"""What a trainer assumes to be the same of the distributions of all rows of a file."""


def whole(found: Distribution) -> object:
    """The assumption of trainers that are told one distribution: it is the same in all rows."""
    return found


def but_temperature(found: Distribution) -> object:
    """The assumption of trainers that read a temperature for each token: only the rest is the same.

    Not of greedy responses, which have no temperature by which logits could be divided.
    """
    return {**found, "temperature": found["temperature"] == 0}


def with_sampling(record: TrajectoryRecord, usual: Distribution | None) -> TrajectoryRecord:
    """A trajectory whose `sampling`, and that of its branches, has the distribution of every response.

    Args:
        usual: That of responses which say none, of the run's manifest; None: unknown.
    """
    branches = record.branches and [replace(branch, sampling=_of_each(branch, usual)) for branch in record.branches]
    return replace(record, sampling=_of_each(record, usual), branches=branches)


def _of_each(path: TrajectoryRecord | Branch, usual: Distribution | None) -> list[dict[str, Any] | None]:
    found = resolved(path.sampling, sum(message.sampled for message in path.messages), usual)
    return [None if one is None else dict(one) for one in found]


def distributions(record: TrajectoryRecord) -> Iterator[Distribution | None]:
    """The distribution of each response in all paths of a trajectory; see `with_sampling`."""
    yield from record.sampling or ()
    for branch in record.branches or ():
        yield from branch.sampling or ()


def is_of(record: TrajectoryRecord, temperature: float) -> bool:
    """True if all responses are of the whole distribution at a temperature, of which trainers compute their own."""
    return all(next(unlike(found, temperature=temperature), None) is None for found in distributions(record))


def known_sampling(record: TrajectoryRecord) -> list[dict[str, Any] | None] | None:
    """The distribution of each response, None for one that is unknown; None if all are."""
    return record.sampling if any(found is not None for found in record.sampling or ()) else None


def sampling_text(record: TrajectoryRecord) -> str | None:
    """`known_sampling` as JSON, for a column: its fields depend on the response."""
    found = known_sampling(record)
    return None if found is None else orjson.dumps(found).decode()


class Samplings:
    """The different distributions of a file's rows.

    Attributes:
        found: Each once, in the order of the rows.
    """

    def __init__(self, assumption: Assumption | None) -> None:
        """`assumption` is the trainer's; None: it has none, or the user allows that rows differ in it."""
        self._assumption = assumption
        self.found: list[Distribution | None] = []

    def add(self, path: TrajectoryRecord) -> str | None:
        """Add a row; return how it was sampled otherwise than the first one, if the trainer assumes that it was not."""
        for one in path.sampling or ():
            if one not in self.found:
                self.found.append(one)
                first = self.found[0]
                if self._assumed(one) != self._assumed(first):
                    return (
                        f"task {path.task_index}, rollout {path.rollout_index} has responses with {in_words(one)}, and "
                        f"others have {in_words(first)}"
                    )
        return None

    def _assumed(self, found: Distribution | None) -> object:
        return None if self._assumption is None or found is None else self._assumption(found)
