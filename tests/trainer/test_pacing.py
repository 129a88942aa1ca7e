"""The arithmetic of a run's pace: every bound holds, and nothing waits for ever."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kuberoll.trainer.pacing import Pacer, PaceRules, PaceState, filled
from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.messages import Message
from kuberoll_workers.rollouts.pace import Pace, oldest_version


@given(
    total=st.integers(0, 60),
    places=st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)), min_size=1, max_size=6),
)
def test_the_lowest_are_filled_first(total: int, places: list[tuple[int, int | None]]) -> None:
    heights, capacities = [height for height, _ in places], [capacity for _, capacity in places]
    one_by_one = [0] * len(places)
    for _ in range(total):
        free = [place for place, most in enumerate(capacities) if most is None or one_by_one[place] < most]
        if not free:
            break
        one_by_one[min(free, key=lambda place: (heights[place] + one_by_one[place], place))] += 1
    assert filled(total, heights, capacities) == one_by_one


class Simulation:
    """Shards that begin what they may and end it in any order, and a trainer that takes batches and publishes."""

    def __init__(self, chance: random.Random, rules: PaceRules, *, shards: int, groups: int) -> None:
        self.chance = chance
        self.rules = rules
        self.pacer = Pacer(rules, PaceState.new(shards), groups_per_version=groups)
        self.paces = [Pace(max_lag=None, held=True) for _ in range(shards)]
        self.next = [0] * shards
        self.running: dict[tuple[int, int], int] = {}
        self.ended: dict[tuple[int, int], int] = {}
        self.taken: list[tuple[int, int]] = []
        self.lags: list[int] = []
        self.most_waiting = 0
        self.training = False
        self.stale = 0

    def begin(self, shard: int) -> bool:
        """Begin the next group of a shard, if it may."""
        order, most = self.next[shard], self.rules.groups
        if (most is not None and order >= most[shard]) or not self.paces[shard].may_begin(order):
            return False
        self.next[shard] += 1
        self.running[shard, order] = self.pacer.state.version
        return True

    def tell(self) -> None:
        """Write the plan, and have every shard read it."""
        room = self.pacer.room()
        for shard, pace in enumerate(self.paces):
            settled = IntervalSet.of(self.pacer.state.settled[shard].bounds())
            pace.update(version=self.pacer.state.version, room=room[shard], settled=settled, stopped=False)

    def end(self, place: tuple[int, int]) -> None:
        """End a group; some fail."""
        begun = self.running.pop(place)
        if self.chance.random() < 0.1:
            self.pacer.state.settle(*place, delivered=False)
            self.tell()
        else:
            self.ended[place] = begun

    def deliverable(self) -> list[tuple[int, int]]:
        """Groups that a batch would have, as many as there are of it."""
        for place in [place for place, begun in self.ended.items() if self.is_stale(begun)]:
            del self.ended[place]
            self.pacer.state.settle(*place, delivered=False)
            self.stale += 1
        if not self.rules.in_order:
            return list(self.ended)[: self.pacer.groups_per_version]
        found = []
        for place in islice(self.pacer.in_order(), self.pacer.groups_per_version):
            if place not in self.ended:
                break
            found.append(place)
        return found

    def is_stale(self, begun: int) -> bool:
        return self.rules.max_lag is not None and self.pacer.state.version - begun > self.rules.max_lag

    def over(self) -> bool:
        """True if every group of the dataset is settled."""
        return all(self.pacer.remaining(shard) == 0 for shard in range(len(self.next)))

    def step(self) -> bool:
        """Have something happen; False if nothing can."""
        choices = [("begin", shard) for shard in range(len(self.next))]
        self.chance.shuffle(choices)
        # What has begun runs on: whether something begins does not depend on it.
        if self.chance.random() < 0.5:
            for _, shard in choices:
                if self.begin(shard):
                    self.most_waiting = max(self.most_waiting, len(self.running) + len(self.ended))
                    return True
        if self.running and self.chance.random() < 0.7:
            self.end(self.chance.choice(list(self.running)))
            return True
        if self.training:
            self.training = False
            self.pacer.state.publish(self.pacer.state.version + 1)
            self.tell()
            return True
        batch = self.deliverable()
        last = self.over_but(batch)
        if batch and (len(batch) == self.pacer.groups_per_version or last):
            for place in batch:
                self.lags.append(self.pacer.state.version - self.ended.pop(place))
                self.taken.append(place)
                self.pacer.state.settle(*place, delivered=True)
            self.tell()
            self.training = True
            return True
        self.tell()
        return bool(self.running) or any(self.begin(shard) for _, shard in choices)

    def over_but(self, batch: list[tuple[int, int]]) -> bool:
        """True if the batch has all that is left."""
        left = [self.pacer.remaining(shard) for shard in range(len(self.next))]
        return None not in left and sum(filter(None, left)) == len(batch)


@given(
    seed=st.integers(0, 2**32),
    shards=st.integers(1, 5),
    groups=st.integers(1, 6),
    max_lag=st.none() | st.integers(0, 4),
    in_order=st.booleans(),
    ahead=st.none() | st.integers(0, 12),
    sizes=st.none() | st.lists(st.integers(0, 15), min_size=5, max_size=5),
)
@example(seed=1, shards=5, groups=6, max_lag=2, in_order=False, ahead=None, sizes=[0, 9, 15, 15, 15])
def test_every_bound_holds_and_nothing_waits_for_ever(
    seed: int,
    shards: int,
    groups: int,
    max_lag: int | None,
    in_order: bool,
    ahead: int | None,
    sizes: list[int] | None,
) -> None:
    max_ahead = None if ahead is None else groups + ahead
    if max_lag is None and max_ahead is None:
        max_ahead = 2 * groups
    rules = PaceRules(
        max_lag=max_lag,
        in_order=in_order and max_lag is not None,
        max_ahead=max_ahead,
        groups=None if sizes is None else sizes[:shards],
    )
    simulation = Simulation(random.Random(seed), rules, shards=shards, groups=groups)
    simulation.tell()
    for _ in range(600):
        if simulation.over():
            break
        # What is too old may be given up last.
        assert simulation.step() or simulation.over(), "nothing can happen any more"
    if sizes is None:
        assert simulation.taken
    assert len(simulation.taken) == len(set(simulation.taken))
    assert max(simulation.lags, default=0) <= (600 if max_lag is None else max_lag)
    if max_ahead is not None:
        assert simulation.most_waiting <= max_ahead
    if rules.in_order:
        # Nothing becomes too old, however long any of them takes.
        assert simulation.stale == 0


@given(st.lists(st.sampled_from(["take", "publish", "settle"]), max_size=40), st.integers(1, 4))
def test_a_state_is_restored(events: list[str], shards: int) -> None:
    state, orders = PaceState.new(shards), [0] * shards
    for number, event in enumerate(events):
        if event == "publish":
            state.publish(state.version + 1)
        else:
            state.settle(number % shards, orders[number % shards], delivered=event == "take")
            orders[number % shards] += 1
    restored = PaceState.from_json(state.as_json())
    assert restored.as_json() == state.as_json()
    # Nothing of it is forgotten: a restart within a version must not let more begin.
    assert {field.name for field in fields(PaceState)} == set(state.as_json())


def test_the_oldest_version_is_the_lowest_number() -> None:
    def said(*versions: str) -> Message:
        return Message("assistant", "a", [1], policy_versions=[(name, 0, 1) for name in versions], sampled=True)

    assert oldest_version([said("10"), said("9", "11"), Message("user", "b", [2])]) == 9
    assert oldest_version([Message("user", "b", [2])]) is None
    assert oldest_version([said("9"), said("step-3")]) is None


@pytest.mark.parametrize(
    ("max_lag", "oldest", "stale"),
    [(0, 5, False), (0, 4, True), (2, 3, False), (2, 2, True), (None, 0, False), (0, None, False)],
)
def test_what_is_too_old(max_lag: int | None, oldest: int | None, stale: bool) -> None:
    pace = Pace(max_lag=max_lag, held=True)
    pace.update(version=5, room=1, settled=IntervalSet(), stopped=False)
    assert pace.is_stale(oldest) is stale
