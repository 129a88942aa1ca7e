"""The plan of a run's consumer: which prompt groups it has had, and how many more may begin.

It is a file of the run that the consumer, a trainer, writes whenever it takes groups or publishes weights, and that the
workers read. The journals remain the truth: a plan that is lost or old holds workers back and changes no trajectory.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kuberoll_workers.output.storage import Storage

PLAN: Final = "consumer.json"
"""Name of the file within the run."""

_FORMAT: Final = 1


class PlanUnreadable(ValueError):
    """The file is no plan; the message names the file and the remedy."""


class ConsumerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer has had of a run, for metrics.

    Attributes:
        taken_groups: Groups that it has taken.
        ready_groups: Groups that have ended and that it has not taken.
        stale_trajectories, stale_tokens: Finished trajectories that were too old, and tokens that the policy generated
            for them.
        lag: Trajectories that it has taken, by their lag in versions.
        waited_seconds: Seconds for which it has waited for groups.
        publications: Number of weights that it has published.
        publish_seconds: Seconds of publishing, by phase.
    """

    taken_groups: int = 0
    ready_groups: int = 0
    stale_trajectories: int = 0
    stale_tokens: int = 0
    lag: dict[int, int] = {}
    waited_seconds: float = 0.0
    publications: int = 0
    publish_seconds: dict[str, float] = {}


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


def read_plan(storage: Storage) -> ConsumerPlan | None:
    """The plan of a run; None if it has none yet.

    Raises:
        PlanUnreadable: The file is no plan, or one of another version of KubeRoll.
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
    return plan
