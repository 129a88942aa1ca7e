"""Leader election: never two, none for long, and handed over without waiting."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Conflict, NotFound, Unavailable
from kuberoll_operator.kube.lease import Elector, LeadershipLost
from kuberoll_operator.kube.resources import Resource
from kuberoll_operator.model import Object
from tests.cluster.api import Api
from tests.cluster.conftest import api, api_server  # noqa: F401
from tests.cluster.control_plane import ApiServer
from tests.examples import examples
from tests.operator.emulator import in_virtual_time


class OneLease:
    """As much of a client as an elector needs: one object with versions, which may be away."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.away: set[str] = set()
        self.requests: list[str] = []
        self.version = 0

    def of(self, identity: str) -> Client:
        server = self

        class Way:
            async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
                await self._arrive("get")
                return server.lease

            async def create(self, item: Object) -> Object:
                await self._arrive("create")
                if server.lease is not None:
                    raise Conflict("it is there", code=409)
                return self._store(item)

            async def replace(self, item: Object) -> Object:
                await self._arrive("replace")
                if server.lease is None:
                    raise NotFound("it is gone", code=404)
                if item["metadata"]["resourceVersion"] != str(server.version):
                    raise Conflict("another version", code=409)
                return self._store(item)

            def _store(self, item: Object) -> Object:
                server.version += 1
                metadata = {**item["metadata"], "resourceVersion": str(server.version)}
                server.lease = {**item, "metadata": metadata}
                return server.lease

            async def _arrive(self, verb: str) -> None:
                server.requests.append(verb)
                await asyncio.sleep(0.01)
                if identity in server.away:
                    await asyncio.sleep(3)
                    raise Unavailable("away")

        way: Any = Way()
        return way  # type: ignore[no-any-return]


def elector(server: OneLease, identity: str, *holder_clocks: Callable[[], float]) -> Elector:
    clock = asyncio.get_running_loop().time
    return Elector(
        server.of(identity),
        namespace="system",
        name="lease",
        identity=identity,
        clock=clock,
        holder_clocks=holder_clocks,
    )


async def lead(one: Elector, told: list[tuple[float, str]]) -> None:
    """Leads once, and tells when."""
    loop = asyncio.get_running_loop()
    await one.acquire()
    told.append((loop.time(), f"{one.identity} leads"))
    try:
        await one.hold()
    except LeadershipLost:
        told.append((loop.time(), f"{one.identity} lost"))


def test_who_cannot_renew_stops_before_the_next_begins() -> None:
    async def main() -> list[tuple[float, str]]:
        server, told = OneLease(), list[tuple[float, str]]()
        first, second = elector(server, "first"), elector(server, "second")
        leading = asyncio.create_task(lead(first, told))
        await asyncio.sleep(1)
        following = asyncio.create_task(lead(second, told))
        await asyncio.sleep(60)
        assert first.leading
        assert not second.leading
        server.away.add("first")
        while first.write_seconds():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        told.append((asyncio.get_running_loop().time(), "first stops"))
        assert not first.leading
        while not second.leading:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert not leading.done()
        server.away.clear()
        await leading
        following.cancel()
        return told

    (_, one), (stopped, two), (began, three), (_, four) = in_virtual_time(main())
    assert (one, two, three, four) == ("first leads", "first stops", "second leads", "first lost")
    assert stopped + 5 <= began + 2 + 0.2
    assert began - stopped < 15


@pytest.mark.parametrize("taken", [False, True])
def test_who_wakes_up_after_a_pause_writes_nothing_until_it_has_renewed(taken: bool) -> None:
    """The machine was paused: its monotonic clock stood still, and its time of day was set afterwards."""

    async def main() -> None:
        server, told, paused = OneLease(), list[tuple[float, str]](), 0.0
        loop = asyncio.get_running_loop()
        first = elector(server, "first", lambda: loop.time() + paused)
        second = elector(server, "second")
        leading = asyncio.create_task(lead(first, told))
        await asyncio.sleep(21.5)
        assert first.leading
        if taken:
            assert server.lease is not None
            server.version += 1
            metadata = {**server.lease["metadata"], "resourceVersion": str(server.version)}
            server.lease = {**server.lease, "metadata": metadata}
            server.lease["spec"] = {**server.lease["spec"], "holderIdentity": second.identity}
        paused = 60.0
        assert not first.leading
        assert first.write_seconds() == 0
        await asyncio.sleep(3)
        assert first.leading is not taken
        leading.cancel()

    in_virtual_time(main())


def test_a_clock_that_is_set_forward_takes_no_lease() -> None:
    async def main() -> None:
        server, told, ahead = OneLease(), list[tuple[float, str]](), 0.0
        loop = asyncio.get_running_loop()
        first, second = elector(server, "first"), elector(server, "second", lambda: loop.time() + ahead)
        tasks = [asyncio.create_task(lead(first, told))]
        await asyncio.sleep(1)
        tasks.append(asyncio.create_task(lead(second, told)))
        await asyncio.sleep(10)
        ahead = 3600.0
        await asyncio.sleep(10)
        assert first.leading
        assert not second.leading
        for task in tasks:
            task.cancel()

    in_virtual_time(main())


def test_who_was_too_late_goes_on_where_nobody_took_the_lease() -> None:
    async def main() -> None:
        server = OneLease()
        one = elector(server, "one")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        server.away.add("one")
        await asyncio.sleep(60)
        assert not one.leading
        assert one.write_seconds() == 0
        server.away.clear()
        await asyncio.sleep(6)
        assert one.leading
        assert not holding.done()
        holding.cancel()
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 0

    in_virtual_time(main())


def test_a_renewal_is_one_request() -> None:
    async def main() -> list[str]:
        server = OneLease()
        one = elector(server, "one")
        await one.acquire()
        server.requests.clear()
        holding = asyncio.create_task(one.hold())
        await asyncio.sleep(21)
        holding.cancel()
        return list(server.requests)

    assert in_virtual_time(main()) == ["replace"] * 10


def test_a_lease_that_was_deleted_is_made_again() -> None:
    async def main() -> None:
        server = OneLease()
        one = elector(server, "one")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        server.lease = None
        await asyncio.sleep(3)
        assert one.leading
        assert server.lease is not None
        holding.cancel()

    in_virtual_time(main())


def test_a_released_lease_is_taken_at_once() -> None:
    async def main() -> float:
        server, told = OneLease(), list[tuple[float, str]]()
        first, second = elector(server, "first"), elector(server, "second")
        await first.acquire()
        following = asyncio.create_task(lead(second, told))
        await asyncio.sleep(5)
        assert not told
        await first.release()
        released = asyncio.get_running_loop().time()
        assert not first.leading
        await asyncio.sleep(2.1)
        following.cancel()
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 1
        return told[0][0] - released

    assert in_virtual_time(main()) <= 2.1


def test_a_short_absence_of_the_server_costs_no_leadership() -> None:
    async def main() -> None:
        server = OneLease()
        one = elector(server, "one")
        await one.acquire()
        holding = asyncio.create_task(one.hold())
        for _ in range(5):
            server.away.add("one")
            await asyncio.sleep(4)
            assert one.leading
            server.away.clear()
            await asyncio.sleep(6)
        assert not holding.done()
        holding.cancel()

    in_virtual_time(main())


def test_leadership_ends_when_another_has_the_lease() -> None:
    async def main() -> None:
        server = OneLease()
        one = elector(server, "one")
        await one.acquire()
        assert server.lease is not None
        server.version += 1
        stolen = {**server.lease["spec"], "holderIdentity": "thief"}
        metadata = {**server.lease["metadata"], "resourceVersion": str(server.version)}
        server.lease = {**server.lease, "metadata": metadata, "spec": stolen}
        with pytest.raises(LeadershipLost):
            await one.hold()
        assert not one.leading
        await one.release()
        assert server.lease["spec"]["holderIdentity"] == "thief"

    in_virtual_time(main())


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=12))
def test_never_two_lead(away: list[tuple[str, int]]) -> None:
    async def main() -> None:
        server = OneLease()
        electors = [elector(server, name) for name in "abc"]

        async def campaign(one: Elector) -> None:
            while True:
                await lead(one, [])

        async def look() -> None:
            while True:
                await asyncio.sleep(0.05)
                assert sum(one.write_seconds() > 0 for one in electors) <= 1

        looking = asyncio.create_task(look())
        tasks = [asyncio.create_task(campaign(one)) for one in electors]
        for name, seconds in away:
            server.away = {name}
            await asyncio.sleep(seconds)
        server.away = set()
        await asyncio.sleep(40)
        assert sum(one.leading for one in electors) == 1
        for task in (*tasks, looking):
            if task.done():
                task.result()
            task.cancel()

    in_virtual_time(main())


def test_times_are_in_order() -> None:
    with pytest.raises(ValueError, match="renew_seconds"):
        Elector(OneLease().of("a"), namespace="n", name="l", identity="a", lease_seconds=5)


async def test_two_electors_hand_over_on_a_real_api_server(api_server: ApiServer, api: Api) -> None:  # noqa: F811
    namespace = f"lease-{uuid.uuid4().hex[:8]}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    way = await load_access(api_server.kubeconfig)
    async with Client(way) as one, Client(way) as two:
        options: dict[str, Any] = {"namespace": namespace, "name": "operator", "retry_seconds": 0.1}
        first, second = Elector(one, identity="first", **options), Elector(two, identity="second", **options)
        await first.acquire()
        holding, waiting = asyncio.create_task(first.hold()), asyncio.create_task(second.acquire())

        def renewed(item: Object | None) -> bool:
            return item is not None and item["spec"]["renewTime"] > item["spec"]["acquireTime"]

        lease = await api.wait("Lease", namespace, "operator", renewed)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == "first"
        assert not waiting.done()
        holding.cancel()
        await first.release()
        await waiting
        lease = await api.get("Lease", namespace, "operator")
        assert lease["spec"]["holderIdentity"] == "second"
        assert lease["spec"]["leaseTransitions"] == 1
        assert datetime.fromisoformat(lease["spec"]["renewTime"]).tzinfo == UTC
        await second.release()
    await api.delete("Namespace", None, namespace)
