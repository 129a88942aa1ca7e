"""The work queue: client-go's promises, held for every order of calls."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kuberoll_operator.queue import FIRST_BACKOFF, LONGEST_BACKOFF, WorkQueue
from tests.operator.emulator import in_virtual_time

KEYS = st.sampled_from("abc")


class Promises(RuleBasedStateMachine):
    """Against a model that knows of each key: when it is due at the latest, and who works on it."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.queue: WorkQueue[str] = WorkQueue(clock=lambda: self.now, jitter=lambda: 0.5)
        self.wanted: dict[str, float] = {}
        self.timers: dict[str, float] = {}
        self.active: set[str] = set()

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.wanted.setdefault(key, self.now)

    @rule(key=KEYS, seconds=st.integers(-1, 20))
    def add_after(self, key: str, seconds: int) -> None:
        self.queue.add_after(key, seconds)
        if seconds <= 0:
            self.wanted.setdefault(key, self.now)
        else:
            self.timers[key] = min(self.timers.get(key, 1e9), self.now + seconds)

    @rule(seconds=st.integers(1, 10))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        for key, due in list(self.timers.items()):
            if due <= self.now:
                del self.timers[key]
                self.wanted.setdefault(key, due)
        taken = self.queue.take()
        if taken is None:
            # Whoever is wanted is being worked on.
            assert set(self.wanted) <= self.active
            return
        assert taken in self.wanted
        assert taken not in self.active
        assert self.queue.age(taken) == self.now - self.wanted.pop(taken)
        self.active.add(taken)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.queue.done(key)
        self.active.discard(key)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if hasattr(self, "queue"):
            due = self.queue.next_due()
            assert due == min(self.timers.values(), default=None) or (due is None) == (not self.timers)
            assert self.queue.depth() == len(self.wanted) or self.timers


TestPromises = Promises.TestCase


@given(st.integers(1, 80), st.floats(0, 0.999))
def test_pauses_double_up_to_a_bound_and_are_spread(failures: int, jitter: float) -> None:
    queue: WorkQueue[str] = WorkQueue(clock=lambda: 0.0, jitter=lambda: jitter)
    pause = [queue.failed("a") for _ in range(failures)][-1]
    longest = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (failures - 1))
    assert longest / 2 <= pause <= longest
    queue.forget("a")
    assert queue.failed("a") <= FIRST_BACKOFF


def test_a_pause_is_at_least_what_the_server_asks_for() -> None:
    queue: WorkQueue[str] = WorkQueue(clock=lambda: 0.0)
    assert queue.failed("a", at_least=7.0) == 7.0


def test_of_several_timers_the_earliest_counts() -> None:
    async def main() -> list[float]:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        for seconds in (30, 5, 10):
            queue.add_after("a", seconds)
        found = []
        await queue.get()
        found.append(loop.time())
        queue.done("a")
        queue.add_after("a", 600)
        await queue.get()
        found.append(loop.time())
        return found

    assert in_virtual_time(main()) == [5.0, 605.0]


def test_a_key_is_worked_on_by_one_at_a_time_and_again_after_a_change() -> None:
    async def main() -> list[str]:
        queue: WorkQueue[str] = WorkQueue()
        told: list[str] = []

        async def work(name: str) -> None:
            for _ in range(2):
                key = await queue.get()
                told.append(f"{name} begins {key}")
                await asyncio.sleep(1)
                told.append(f"{name} ends {key}")
                queue.done(key)

        workers = [asyncio.create_task(work(name)) for name in ("one", "two")]
        queue.add("a")
        await asyncio.sleep(0.5)
        # Changed while it is worked on, several times: worked on once more.
        for _ in range(3):
            queue.add("a")
        await asyncio.sleep(5)
        for worker in workers:
            worker.cancel()
        return told

    told = in_virtual_time(main())
    assert [line.split()[1] for line in told] == ["begins", "ends"] * 2


def test_ages_count_from_when_the_key_was_added() -> None:
    now = 0.0
    queue: WorkQueue[str] = WorkQueue(clock=lambda: now)
    assert queue.oldest_age() == 0
    queue.add("a")
    now = 3.0
    queue.add("b")
    assert (queue.oldest_age(), queue.depth()) == (3.0, 2)
    assert queue.take() == "a"
    now = 4.0
    assert (queue.oldest_age(), queue.depth(), queue.age("a")) == (4.0, 1, 4.0)
    queue.done("a")
    assert queue.oldest_age() == 1.0
