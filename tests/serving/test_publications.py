"""The log of published weights: one order for all, whoever writes at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.contract import WeightsSource
from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.publications import Publications, VersionTaken
from kuberoll_workers.serving.weights import LiveWeights, WeightsFollower
from tests.rollouts.fakes import until


class Dictionary:
    """A store in this process; `before_add` runs once, just before a value is added."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.before_add: Callable[[], object] | None = None
        self.broken = False

    def list_keys(self) -> list[str]:
        if self.broken:
            raise ConnectionError("no store")
        return list(self.values)

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def add(self, key: str, value: bytes) -> bool:
        hook, self.before_add = self.before_add, None
        if hook is not None:
            hook()
        return self.values.setdefault(key, value) is value

    def remove(self, key: str) -> None:
        self.values.pop(key, None)


def weights(version: str, uri: str | None = None) -> WeightsSource:
    return WeightsSource(uri=uri or f"/mnt/{version}", version=version)


changes = st.tuples(st.just("publish"), st.sampled_from("abc")) | st.tuples(st.just("configure"), st.sampled_from("xy"))


@given(st.lists(changes, max_size=40))
def test_the_last_change_counts_and_the_log_stays_short(made: list[tuple[str, str]]) -> None:
    store = Dictionary()
    log = Publications(store)
    log.configure("start", None)
    configuration, wanted, number = "start", None, 1
    for kind, name in made:
        if kind == "publish":
            wanted = weights(name)
            entry = log.publish(wanted)
        else:
            if configuration != name:
                configuration, wanted = name, weights(f"of-{name}")
            entry = log.configure(name, weights(f"of-{name}"))
        assert entry == log.newest()
        assert (entry.configuration, entry.weights) == (configuration, wanted)
        assert entry.number >= number
        number = entry.number
        assert len(store.values) <= 8


def test_what_comes_between_reading_and_writing_is_not_overwritten() -> None:
    store = Dictionary()
    log = Publications(store)
    log.configure("x", None)
    store.before_add = lambda: log.publish(weights("a"))
    assert (log.publish(weights("b")).number, log.newest()) == (3, log.publish(weights("b")))
    store.before_add = lambda: log.publish(weights("c"))
    entry = log.configure("y", weights("of-y"))
    assert (entry.number, entry.configuration, entry.weights) == (5, "y", weights("of-y"))
    # The other one has done the same.
    store.before_add = lambda: log.configure("z", weights("of-z"))
    assert log.configure("z", weights("of-z")).number == 6


def test_writers_at_the_same_time_get_different_numbers() -> None:
    log = Publications(Dictionary())
    log.configure("x", None)
    entries = []

    def write(name: str) -> None:
        entries.extend([log.publish(weights(f"{name}-{number}")) for number in range(25)])

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry.number for entry in entries}) == 8 * 25
    newest = log.newest()
    assert newest is not None
    assert newest.number == 1 + 8 * 25 == max(entry.number for entry in entries)


def test_a_version_names_one_directory() -> None:
    log = Publications(Dictionary())
    with pytest.raises(RuntimeError, match="before a replica has started"):
        log.publish(weights("a"))
    log.configure("x", None)
    entry = log.publish(weights("a"))
    assert log.publish(weights("a")) == entry
    with pytest.raises(VersionTaken, match="version a is already /mnt/a"):
        log.publish(weights("a", "/mnt/b"))


class Replica:
    """A simulated engine that follows a log."""

    def __init__(self, store: Dictionary, **args: object) -> None:
        settings = SimulatedEngine.model_validate({"firstTokenSeconds": 0.0})
        engine = Simulated(model="none", tokenizer="none", settings=settings, engine_args={})
        self.live = LiveWeights(engine)
        self.follower = WeightsFollower(Publications(store), self.live, args)

    async def serves(self, version: str) -> None:
        await self.follower.follow()
        async with asyncio.timeout(240):
            await until(lambda: self.live.served_version == version)


async def test_a_late_replica_loads_the_newest_weights() -> None:
    store = Dictionary()
    early = Replica(store)
    await early.follower.start(weights("1"))
    assert early.live.served_version == "1"
    Publications(store).publish(weights("2"))
    late = Replica(store)
    await late.follower.start(weights("1"))
    assert late.live.served_version == "2"
    await early.serves("2")


async def test_a_changed_configuration_replaces_published_weights_for_good() -> None:
    store = Dictionary()
    first, second = Replica(store), Replica(store)
    for replica in (first, second):
        await replica.follower.start(weights("1"))
    Publications(store).publish(weights("published"))
    for version in ("2", "1"):
        first.follower.configure(weights(version))
        await first.serves(version)
        # Serve has not told this one yet.
        assert await second.follower.follow() != weights(version)
        second.follower.configure(weights(version))
        await second.serves(version)
        late = Replica(store)
        await late.follower.start(weights(version))
        assert late.live.served_version == version
    # Also for all: the application's arguments.
    Publications(store).publish(weights("other"))
    other = Replica(store, model="other")
    await other.follower.start(weights("1"))
    assert other.live.served_version == "1"


async def test_news_that_come_while_the_log_is_read_are_not_missed() -> None:
    store = Dictionary()
    replica = Replica(store)
    await replica.follower.start(None)
    log, reading = Publications(store), threading.Event()
    released = threading.Event()
    get = store.get

    def slow(key: str) -> bytes | None:
        value = get(key)
        reading.set()
        released.wait(60)
        return value

    store.get = slow  # type: ignore[method-assign]
    replica.follower.follow_soon()
    await asyncio.to_thread(reading.wait, 240)
    store.get = get  # type: ignore[method-assign]
    log.publish(weights("1"))
    replica.follower.follow_soon()
    released.set()
    async with asyncio.timeout(240):
        await until(lambda: replica.live.served_version == "1")
    await replica.follower.stop()


async def test_a_store_that_is_away_for_a_while_costs_nothing_but_time() -> None:
    store = Dictionary()
    replica = Replica(store)
    await replica.follower.start(None)
    store.broken = True
    replica.follower.configure(weights("1"))
    with pytest.raises(ConnectionError):
        await replica.follower.follow()
    assert replica.live.served_version == "0"
    store.broken = False
    await replica.serves("1")
    newest = Publications(store).newest()
    assert newest is not None
    assert newest.weights == weights("1")
    await replica.follower.stop()


def test_an_entry_is_withdrawn_once_and_only_while_it_is_the_newest() -> None:
    log = Publications(Dictionary())
    log.configure("start", None)
    assert log.withdraw(1) is None
    first = log.publish(weights("1"))
    second = log.publish(weights("2"))
    assert log.withdraw(first.number) is None
    restored = log.withdraw(second.number)
    assert restored is not None
    assert (restored.weights, log.newest()) == (weights("1"), restored)
    # Other replicas that it broke come too late.
    assert log.withdraw(second.number) is None
    log.publish(weights("3"))
    # The weights of another configuration may be those of another model.
    other = log.configure("other", weights("4"))
    assert log.withdraw(other.number) is None


async def test_weights_that_break_an_engine_are_not_wanted_by_the_next_replica() -> None:
    class Breaking(Simulated):
        async def load_weights(self, uri: str | None, version: str) -> None:
            if version == "2":
                raise PolicyUnavailable("half of them are loaded")
            await super().load_weights(uri, version)

    log = Publications(Dictionary())
    engine = Breaking(model="none", tokenizer="none", settings=SimulatedEngine(), engine_args={})
    live = LiveWeights(engine)
    follower = WeightsFollower(log, live, {})
    await follower.start(None)
    log.publish(weights("1"))
    await follower.follow()
    await until(lambda: live.served_version == "1")
    log.publish(weights("2"))
    await follower.follow()
    await until(lambda: (newest := log.newest()) is not None and newest.weights == weights("1"))
    # It is broken, whatever is wanted.
    await follower.follow()
    assert live.problem == "PolicyUnavailable: half of them are loaded"
    await follower.stop()
    following = LiveWeights(Simulated(model="none", tokenizer="none", settings=SimulatedEngine(), engine_args={}))
    replacement = WeightsFollower(log, following, {})
    await replacement.start(None)
    assert following.served_version == "1"
    await replacement.stop()
