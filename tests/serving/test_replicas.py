"""The list of replicas: what Serve leaves out for a moment stays, what is gone goes, and few ask the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.serving.controller import RunningReplica, replica_id
from kuberoll_workers.serving.replicas import ReplicaList, known_replicas


def replica(name: str, port: int = 1) -> RunningReplica:
    return RunningReplica(id=name, url=f"http://10.0.0.1:{port}")


names = st.sets(st.sampled_from("abcdef"))


@given(names, names, names)
def test_listed_or_known_and_busy(before: set[str], now: set[str], busy: set[str]) -> None:
    found = known_replicas({name: replica(name) for name in before}, [replica(name, 2) for name in now], busy)
    assert list(found) == sorted(now | (before & busy))
    assert all(found[name].url.endswith(":2") for name in now)


class Serve:
    def __init__(self) -> None:
        self.listed = ["a", "b"]
        self.states: Mapping[str, bool] = {}
        self.asked = 0
        self.now = 0.0

    async def list(self) -> list[RunningReplica]:
        self.asked += 1
        await asyncio.sleep(0)
        return [replica(name) for name in self.listed]

    async def busy(self) -> Mapping[str, bool]:
        return self.states


async def test_a_replica_that_is_told_something_stays_and_one_that_is_gone_goes() -> None:
    serve = Serve()
    replicas = ReplicaList(serve.list, serve.busy, clock=lambda: serve.now)
    assert [one.id for one in await replicas.read()] == ["a", "b"]
    serve.now, serve.listed, serve.states = 2, ["b"], {"a": True, "b": False}
    assert [one.id for one in await replicas.read()] == ["a", "b"]
    serve.now, serve.states = 4, {"b": False}
    assert [one.id for one in await replicas.read()] == ["b"]
    # It is not known any more.
    serve.now, serve.states = 6, {"a": True, "b": False}
    assert [one.id for one in await replicas.read()] == ["b"]


async def test_many_who_ask_at_once_cost_one_question() -> None:
    serve = Serve()
    replicas = ReplicaList(serve.list, serve.busy, clock=lambda: serve.now)
    await asyncio.gather(*(replicas.read() for _ in range(50)))
    assert serve.asked == 1
    serve.now = 0.9
    await replicas.read()
    assert serve.asked == 1
    serve.now = 1.0
    await replicas.read()
    assert serve.asked == 2


def test_ids_in_the_names_of_actors() -> None:
    assert replica_id("SERVE_REPLICA::kuberoll#Generation#5ij7l03e") == "5ij7l03e"
