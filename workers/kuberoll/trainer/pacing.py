"""How far a run may be ahead of its consumer, decided from what the consumer has taken; nothing here reads files.

docs/explanation/on-policy.md has the rule and its proof. The bound on what may begin with each version of the weights
is that of AReaL ("AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning", 2025,
staleness-aware training), by shard and anchored to what was really taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.manifest import RunManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceRules:
    """What a run's manifest says about its pace.

    Attributes:
        max_lag: Maximum number of versions between a token and the newest weights; None: any.
        in_order: Groups are delivered in the order in which they begin, so that none becomes too old.
        max_ahead: Maximum number of groups that have begun and were not taken; None: any.
        groups: By shard, its number of groups; None: there is no end.
    """

    max_lag: int | None
    in_order: bool
    max_ahead: int | None
    groups: Sequence[int] | None


def pace_rules(manifest: RunManifest) -> PaceRules | None:
    """The rules of a run; None if nothing holds it back."""
    identity = manifest.identity
    max_lag, max_ahead = (identity.get(f"rollout.onPolicy.{name}") for name in ("maxLag", "maxAhead"))
    if max_lag is None and max_ahead is None:
        return None
    epochs = identity.get("dataset.epochs", 1)
    rows: list[int] | None = manifest.inputs.get("rows_of_shards")
    groups = None if epochs is None or rows is None else [count * epochs for count in rows]
    return PaceRules(
        max_lag=max_lag,
        in_order=identity.get("rollout.onPolicy.onStale") == "Finish",
        max_ahead=max_ahead,
        groups=groups,
    )


def filled(total: int, heights: Sequence[int], capacities: Sequence[int | None]) -> list[int]:
    """Units for each place, so that the lowest are filled first; of equal ones the first.

    Args:
        total: Number of units; fewer are given if the capacities are smaller.
        heights: Present height of each place.
        capacities: Maximum number of units of each place; None: any.
    """
    given = [0] * len(heights)
    open_places = [place for place, capacity in enumerate(capacities) if capacity is None or capacity > 0]
    while total > 0 and open_places:
        level = [heights[place] + given[place] for place in open_places]
        lowest = min(level)
        low = [place for place, height in zip(open_places, level, strict=True) if height == lowest]
        above = min((height for height in level if height > lowest), default=None)
        # As many whole layers over the lowest places as fit; at least a part of one.
        layers = total // len(low)
        if above is not None:
            layers = min(layers, above - lowest)
        for place in low:
            if (capacity := capacities[place]) is not None:
                layers = min(layers, capacity - given[place])
        if layers == 0:
            for place in low[:total]:
                given[place] += 1
            return given
        for place in low:
            given[place] += layers
        total -= layers * len(low)
        open_places = [
            place for place in open_places if (capacity := capacities[place]) is None or given[place] < capacity
        ]
    return given


@dataclass(slots=True)
class PaceState:
    """What a consumer has had of each shard, and the newest weights.

    Attributes:
        version: Number of the newest weights.
        delivered: By shard, the number of groups that were taken.
        taken_before: By shard, `delivered` when the newest weights were published.
        settled: By shard, the `group_order` of the groups that were taken, or that nobody will take.
    """

    version: int
    delivered: list[int]
    taken_before: list[int]
    settled: list[IntervalSet]

    @classmethod
    def new(cls, shards: int) -> PaceState:
        """The state of a consumer that has had nothing."""
        return cls(0, [0] * shards, [0] * shards, [IntervalSet() for _ in range(shards)])

    def publish(self, version: int) -> None:
        """Note that all replicas serve new weights."""
        self.version = version
        self.taken_before = list(self.delivered)

    @property
    def taken_since(self) -> int:
        """Number of groups that were taken since the newest weights were published."""
        return sum(self.delivered) - sum(self.taken_before)

    def settle(self, shard: int, order: int | None, *, delivered: bool) -> None:
        """Note that a group was taken, or that nobody will take it."""
        if order is not None:
            self.settled[shard].add(order)
        self.delivered[shard] += delivered

    def as_json(self) -> dict[str, Any]:
        """Plain JSON for the consumer's state."""
        return {
            "version": self.version,
            "delivered": self.delivered,
            "taken_before": self.taken_before,
            "settled": [found.bounds() for found in self.settled],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PaceState:
        """The state of `as_json`.

        Raises:
            ValueError, TypeError, KeyError: It is none.
        """
        delivered, taken_before = ([int(count) for count in value[name]] for name in ("delivered", "taken_before"))
        settled = [IntervalSet.of(bounds) for bounds in value["settled"]]
        return cls(int(value["version"]), delivered, taken_before, settled)


@dataclass(slots=True)
class Pacer:
    """The pace of a run, as its consumer sets it.

    Attributes:
        groups_per_version: Number of groups that the consumer takes between two publications; 0: it has not said.
    """

    rules: PaceRules
    state: PaceState
    groups_per_version: int = 0

    def remaining(self, shard: int) -> int | None:
        """Number of groups of a shard that are not settled; None: there is no end."""
        groups = self.rules.groups
        return None if groups is None else max(0, groups[shard] - len(self.state.settled[shard]))

    def room(self) -> list[int]:
        """By shard, the number of groups that may have begun and not be settled."""
        state, rules = self.state, self.rules
        shards = range(len(state.delivered))
        if self.groups_per_version == 0:
            return [0] * len(shards)
        # What one rule leaves is divided by the other: each alone has room for a batch, and so have both.
        room: list[int | None] = [self.remaining(shard) for shard in shards]
        if rules.max_ahead is not None:
            room = [*filled(rules.max_ahead, state.delivered if rules.in_order else [0] * len(room), room)]
        if rules.max_lag is not None:
            since = [delivered - before for delivered, before in zip(state.delivered, state.taken_before, strict=True)]
            window = max(0, (rules.max_lag + 1) * self.groups_per_version - sum(since))
            room = [*filled(window, state.delivered if rules.in_order else since, room)]
        return [count or 0 for count in room]

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Shard and `group_order` of the groups that are delivered next if groups are delivered in order.

        The shards take turns, and each gives its groups in the order in which they begin.
        """
        state = self.state
        remaining = {shard: self.remaining(shard) for shard in range(len(state.delivered))}
        turns = [(state.delivered[shard], shard) for shard, left in remaining.items() if left != 0]
        heapq.heapify(turns)
        begin = [0] * len(state.delivered)
        while turns:
            delivered, shard = heapq.heappop(turns)
            order = state.settled[shard].first_absent(begin[shard])
            yield shard, order
            begin[shard] = order + 1
            if (left := remaining[shard]) is not None:
                remaining[shard] = left = left - 1
            if left != 0:
                heapq.heappush(turns, (delivered + 1, shard))

    def lag(self, trajectories: Sequence[TrajectoryRecord]) -> int:
        """Versions between the oldest token of a group and the newest weights; 0 if its versions are unknown."""
        found = [version for record in trajectories for version in versions_of(record)]
        return max(0, self.state.version - min(found)) if found else 0

    def is_stale(self, trajectories: Sequence[TrajectoryRecord]) -> bool:
        """True if a group is too old to be delivered."""
        return self.rules.max_lag is not None and self.lag(trajectories) > self.rules.max_lag


def versions_of(record: TrajectoryRecord) -> set[int]:
    """Versions of the weights that sampled a trajectory, in any of its paths, as far as they are whole numbers."""
    branches = (branch.messages for branch in record.branches or ())
    return {
        int(version)
        for messages in (record.messages, *branches)
        for message in messages
        for version, *_ in message.policy_versions or ()
        if version.isdecimal()
    }
