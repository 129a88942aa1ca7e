"""The plan of a run's consumer: which prompt groups it has had, and how many more may begin.

It is a file of the run that the consumer, a trainer, writes whenever it takes groups or publishes weights, and that the
workers read. The journals remain the truth: a plan that is lost or old holds workers back and changes no trajectory.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kuberoll_workers.data.consumer_counts import ConsumerCounts
from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.output.storage import Storage

PLAN: Final = "consumer.json"
"""Name of the file within the run."""

_FORMAT: Final = 1


class PlanUnreadable(ValueError):
    """The file is no plan; the message names the file and the remedy."""


class ConsumerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan.

    Attributes:
        consumer: Name of the consumer.
        version: The newest weights, which every replica serves: their number.
        room: By shard, the number of groups that may have begun and not be settled; None: any.
        settled: By shard, first and exclusive end of each interval of groups, by their `group_order`, that were taken,
            or that nobody will take.
        waiting: True if the consumer waits for groups.
        stopped: True if the consumer needs no more groups, ever.
        counts: For metrics.
    """

    format: int = _FORMAT
    consumer: str
    version: int
    room: list[int] | None
    settled: list[list[int]]
    waiting: bool = False
    stopped: bool = False
    counts: ConsumerCounts = ConsumerCounts()


def write_plan(storage: Storage, plan: ConsumerPlan) -> None:
    """Replace the plan of a run."""
    storage.write(PLAN, msgspec.json.encode(plan))


def read_plan(storage: Storage, *, shards: int) -> ConsumerPlan | None:
    """The plan of a run of so many shards; None if it has none yet.

    Raises:
        PlanUnreadable: The file is no plan, or one of another version of KubeRoll, or of another run.
    """
    contents = storage.read(PLAN)
    if contents is None:
        return None
    try:
        plan = msgspec.json.decode(contents, type=ConsumerPlan)
    except msgspec.DecodeError as error:
        raise PlanUnreadable(f"{storage.where(PLAN)}: no plan of a consumer: {error}; remove it") from error
    if plan.format != _FORMAT:
        raise PlanUnreadable(
            f"{storage.where(PLAN)}: format {plan.format}: this KubeRoll knows format {_FORMAT}; use one version for "
            "trainer and workers"
        )
    try:
        for bounds in plan.settled:
            IntervalSet.of(bounds)
    except ValueError as error:
        raise PlanUnreadable(f"{storage.where(PLAN)}: settled: {error}; remove it") from error
    rooms = shards if plan.room is None else len(plan.room)
    if not len(plan.settled) == rooms == shards:
        raise PlanUnreadable(
            f"{storage.where(PLAN)}: found {len(plan.settled)} shards with {rooms} rooms, and the run has {shards} "
            "shards: it is of another run; remove it"
        )
    return plan
