"""RoutedPolicy over real servers that refuse, break, vanish and come back."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

import pytest
from aiohttp import web

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.headers import COMMIT_HEADER, LOAD_HEADER
from kuberoll_workers.policy.interface import (
    FatalRequest,
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.policy.routing.discovery import Discovery, DnsDiscovery, EndpointDiscovery, StaticDiscovery
from kuberoll_workers.policy.routing.replica import Address
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.serving.ray_settings import free_ports
from tests.rollouts.fakes import until

PATIENCE = 240.0


class Replica:
    """A replica that answers with its own number, or does as `behave` says."""

    def __init__(self, number: int, *, kv_cache_tokens: int = 0) -> None:
        self.number = number
        self.url = ""
        self.requests: list[GenerationRequest] = []
        self.healthy = True
        self.others = 0
        self.commit: str | None = None
        self.listed: list[dict[str, str]] | None = None
        self.behave: Callable[[web.Request, GenerationRequest], Awaitable[web.StreamResponse | None]] | None = None
        self._kv_cache_tokens = kv_cache_tokens
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        self.add_routes(app.router)
        app.on_response_prepare.append(self._name_commit)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = "http://127.0.0.1:{1}".format(*self._runner.addresses[0][:2])

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/generate", self._generate)
        router.add_get("/healthz", self._healthz)
        router.add_get("/info", self._info)
        router.add_get("/replicas", self._replicas)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = wire.decode_request(await request.read())
        self.requests.append(asked)
        if self.behave is not None and (answer := await self.behave(request, asked)) is not None:
            return answer
        result = GenerationResult(
            token_ids=token_array([self.number]), logprobs=array("f", [0]), finish_reason="stop",
            policy_versions=(("7", 0, 1),),
        )  # fmt: skip
        return web.Response(
            body=wire.encode_result(result), content_type=wire.MSGPACK, headers={LOAD_HEADER: str(self.others)}
        )

    async def _name_commit(self, _: web.Request, response: web.StreamResponse) -> None:
        if self.commit is not None:
            response.headers[COMMIT_HEADER] = self.commit

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model": "m",
                "engine": "e",
                "max_model_len": 10,
                "vocab_size": 10,
                "policy_version": "0",
                "kv_cache_tokens": self._kv_cache_tokens,
                "max_ongoing_requests": 8,
            }
        )

    async def _replicas(self, _: web.Request) -> web.Response:
        if self.listed is None:
            return web.Response(status=404)
        return web.json_response({"replicas": self.listed, "version": "0"})


_Kind = TypeVar("_Kind", bound=Replica)


@asynccontextmanager
async def serving(made: list[_Kind]) -> AsyncIterator[list[_Kind]]:
    try:
        for replica in made:
            await replica.start()
        yield made
    finally:
        for replica in made:
            await replica.stop()


def replicas(count: int, **options: int) -> AbstractAsyncContextManager[list[Replica]]:
    return serving([Replica(number, **options) for number in range(count)])


@asynccontextmanager
async def routed(discovery: Discovery, *, sticky: bool = True) -> AsyncIterator[RoutedPolicy]:
    async with asyncio.timeout(PATIENCE):
        async with RoutedPolicy(discovery, lambda url: ServeClient(url, limit=100), sticky=sticky) as policy:
            yield policy


def static(made: Sequence[Replica]) -> StaticDiscovery:
    return StaticDiscovery([replica.url for replica in made])


def request(session: str, turn: int = 0, *, tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{session}-{turn}-0",
        session_id=session,
        token_ids=token_array([1] * tokens),
        sampling=SamplingParameters(max_tokens=4),
    )


async def answer(policy: RoutedPolicy, session: str, turn: int = 0, *, tokens: int = 4) -> int:
    """The number of the replica that answered."""
    return (await policy.generate(request(session, turn, tokens=tokens))).token_ids[0]


def refusing(
    status: int, times: int, *, body: str = "too much", **headers: str
) -> Callable[..., Awaitable[web.Response | None]]:
    left = times

    async def behave(_: web.Request, asked: GenerationRequest) -> web.Response | None:
        nonlocal left
        left -= 1
        return web.Response(status=status, text=body, headers=headers) if left >= 0 else None

    return behave


async def breaking(request: web.Request, _: GenerationRequest) -> None:
    assert request.transport is not None
    request.transport.abort()


async def everybody(policy: RoutedPolicy, sessions: int = 16, turns: int = 4) -> list[list[int]]:
    """Play so many trajectories; which replicas answered each of them."""

    async def play(number: int) -> list[int]:
        session = f"{number}-0-0"
        answers = [await answer(policy, session, turn, tokens=4 + 600 * turn) for turn in range(turns)]
        policy.end_session(session)
        return answers

    return await asyncio.gather(*(play(number) for number in range(sessions)))


async def test_turns_stay_together_and_trajectories_are_spread() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        answers = await everybody(policy)
        assert all(len(set(of_one)) == 1 for of_one in answers)
        assert sorted(len(replica.requests) for replica in made) == [32, 32]
        assert len(policy._admission.sessions) == 0


async def test_a_replica_is_idle_without_requests_of_anybody() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        assert policy.state().idle == 2
        go_on = asyncio.Event()

        async def hold(_: web.Request, __: GenerationRequest) -> None:
            await go_on.wait()

        for replica in made:
            replica.behave, replica.others = hold, 3
        asking = asyncio.ensure_future(answer(policy, "a"))
        await until(lambda: any(replica.requests for replica in made))
        assert policy.state().idle == 1
        go_on.set()
        await asking
        # It said that others' requests are there.
        assert policy.state().idle == 1


async def test_a_storm_of_refusals_costs_time_and_nothing_else() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        made[0].behave = refusing(503, 8)
        made[1].behave = refusing(429, 8)
        answers = await everybody(policy, sessions=40)
        assert len(answers) == 40
        ids = [asked.request_id for replica in made for asked in replica.requests]
        # A refused request is the same one when it comes back.
        assert len(set(ids)) == 160 == len(ids) - 16


async def test_a_replica_that_only_refuses_is_gone_round() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        made[0].behave = refusing(503, 1 << 30)
        answers = await everybody(policy)
        assert {number for of_one in answers for number in of_one} == {1}


async def test_broken_connections_are_tried_again_under_another_id() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        first = await answer(policy, "0-0-0")
        made[first].behave = breaking
        made[first].healthy = False
        assert await answer(policy, "0-0-0", 1) == 1 - first
        assert made[1 - first].requests[-1].request_id == "0-0-0-1-0.1"
        # It stays where it is now, for its prefix is there.
        made[first].behave, made[first].healthy = None, True
        await until(lambda: policy.state().replicas.get("closed", 0) == 2)
        assert await answer(policy, "0-0-0", 2, tokens=2000) == 1 - first


async def test_a_replica_that_disappears_in_mid_run_loses_nothing() -> None:
    async with replicas(3) as made, routed(static(made)) as policy:

        async def slowly(_: web.Request, asked: GenerationRequest) -> None:
            await asyncio.sleep(0.001)

        for replica in made:
            replica.behave = slowly
        running = asyncio.create_task(everybody(policy, sessions=60, turns=10))
        await until(lambda: len(made[0].requests) > 20)
        await made[0].stop()
        answers = await running
        assert len(answers) == 60
        assert all(len(of_one) == 10 for of_one in answers)
        assert policy.state().replicas.get("closed", 0) == 2
        # Each moved once at most.
        assert all(sum(a != b for a, b in itertools.pairwise(of_one)) <= 1 for of_one in answers)


async def test_a_replica_that_comes_back_is_used_again() -> None:
    async with replicas(1) as made, routed(static(made)) as policy:
        await answer(policy, "0-0-0")
        port = int(made[0].url.rpartition(":")[2])
        await made[0].stop()
        waiting = asyncio.create_task(answer(policy, "0-0-0", 1))
        await until(lambda: policy.state().replicas.get("closed", 0) == 0)
        assert not waiting.done()
        await made[0].start(port)
        assert await waiting == 0


async def test_no_replica_yet() -> None:
    (port,) = free_ports(1)
    replica = Replica(5)
    async with routed(StaticDiscovery([f"http://127.0.0.1:{port}"])) as policy:
        waiting = asyncio.create_task(answer(policy, "0-0-0"))
        await until(lambda: policy.state().waiting == 1)
        try:
            await replica.start(port)
            assert await waiting == 5
        finally:
            await replica.stop()


class Changing:
    """A list of replicas that changes."""

    def __init__(self, *listed: Replica) -> None:
        self.listed: list[Replica] | None = list(listed)

    async def addresses(self) -> list[Address]:
        if self.listed is None:
            raise PolicyUnavailable("no answer")
        return [Address(f"replica-{replica.number}", replica.url) for replica in self.listed]


async def test_a_replica_that_leaves_finishes_what_it_has() -> None:
    async with replicas(2) as made:
        discovery = Changing(made[0])
        async with routed(discovery) as policy:
            release = asyncio.Event()

            async def hold(_: web.Request, asked: GenerationRequest) -> None:
                await release.wait()

            made[0].behave = hold
            held = asyncio.create_task(answer(policy, "0-0-0"))
            await until(lambda: len(made[0].requests) == 1)
            discovery.listed = None
            policy._wake.set()
            discovery.listed = [made[1]]
            await until(lambda: policy.state().replicas == {"leaving": 1, "closed": 1})
            assert await answer(policy, "1-0-0") == 1
            release.set()
            assert await held == 0
            assert await answer(policy, "0-0-0", 1, tokens=5000) == 1
            await until(lambda: policy.state().replicas == {"closed": 1})


async def test_the_endpoint_tells_its_replicas() -> None:
    async with replicas(3) as made:
        made[0].listed = [{"id": f"r{replica.number}", "url": replica.url} for replica in made[1:]]
        async with (
            ServeClient(made[0].url, limit=1) as asking,
            routed(EndpointDiscovery(asking, made[0].url)) as policy,
        ):
            await until(lambda: policy.state().replicas.get("closed") == 2)
            answers = await everybody(policy)
            assert {number for of_one in answers for number in of_one} == {1, 2}
            assert made[0].requests == []


@pytest.mark.parametrize("listed", [None, []])
async def test_an_endpoint_that_cannot_tell_is_the_only_replica(listed: list[dict[str, str]] | None) -> None:
    async with replicas(1) as made:
        made[0].listed = listed
        async with (
            ServeClient(made[0].url, limit=1) as asking,
            routed(EndpointDiscovery(asking, made[0].url)) as policy,
        ):
            assert await answer(policy, "0-0-0") == 0


async def test_names_are_looked_up() -> None:
    async with replicas(1) as made:
        host = made[0].url.removeprefix("http://").replace("127.0.0.1", "localhost")
        assert Address(made[0].url.removeprefix("http://"), made[0].url) in await DnsDiscovery(host).addresses()
        async with routed(DnsDiscovery(made[0].url.removeprefix("http://"))) as policy:
            assert await answer(policy, "0-0-0") == 0
    with pytest.raises(ValueError, match="it is a name and a port"):
        DnsDiscovery("policy.example")


async def test_a_request_that_kills_every_engine_is_refused_in_the_end() -> None:
    async with replicas(5) as made, routed(static(made)) as policy:

        def deadly(replica: Replica) -> Callable[..., Awaitable[None]]:
            async def behave(request: web.Request, asked: GenerationRequest) -> None:
                if asked.session_id == "poison":
                    replica.healthy = False
                    await breaking(request, asked)

            return behave

        for replica in made:
            replica.behave = deadly(replica)
        with pytest.raises(FatalRequest, match="in flight when the engine died 2 times in a row"):
            await answer(policy, "poison")
        assert sum(not replica.healthy for replica in made) == 2
        assert await answer(policy, "1-0-0") in {replica.number for replica in made if replica.healthy}


class Mortal(Replica):
    """A replica that dies of a poisonous request, once all of those who are to see it are there, and comes back."""

    def __init__(self, witnesses: int, *, shared_deaths: int) -> None:
        super().__init__(0)
        self.deaths = 0
        self.behave = self._live
        self._witnesses, self._shared_deaths = witnesses, shared_deaths
        self._there = 0
        self._changed = asyncio.Condition()

    async def _healthz(self, request: web.Request) -> web.Response:
        answer = await super()._healthz(request)
        self.healthy = True
        return answer

    async def _live(self, request: web.Request, asked: GenerationRequest) -> None:
        life = self.deaths
        if life >= self._shared_deaths:
            if asked.session_id == "poison":
                await self._die(request, asked)
            return
        async with self._changed:
            self._there += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._there == self._witnesses or self.deaths > life)
        if asked.session_id == "poison":
            await self._die(request, asked)
        async with self._changed:
            await self._changed.wait_for(lambda: self.deaths > life)
        await breaking(request, asked)

    async def _die(self, request: web.Request, asked: GenerationRequest) -> None:
        async with self._changed:
            self.deaths += 1
            self.healthy = False
            self._there = 0
            self._changed.notify_all()
        await breaking(request, asked)


@pytest.mark.slow
async def test_the_request_that_kills_engines_is_found_among_others() -> None:
    innocents = [f"{number}-0-0" for number in range(6)]
    # Twice with all of them in flight, so that the deaths alone do not tell which of them it is.
    replica = Mortal(1 + len(innocents), shared_deaths=2)
    await replica.start()
    try:
        async with routed(static([replica])) as policy:
            answers = [asyncio.create_task(answer(policy, session)) for session in ("poison", *innocents)]
            results = await asyncio.gather(*answers, return_exceptions=True)
            assert isinstance(results[0], FatalRequest)
            assert results[1:] == [0] * len(innocents)
            # Once more, alone among suspects, and never again.
            assert replica.deaths == 3
            assert await answer(policy, "after-0-0") == 0
    finally:
        await replica.stop()


@pytest.mark.slow
async def test_others_that_came_in_between_are_not_suspected() -> None:
    replica = Mortal(2, shared_deaths=2)
    await replica.start()
    try:
        async with routed(static([replica])) as policy:
            poison = asyncio.create_task(answer(policy, "poison"))
            first = asyncio.create_task(answer(policy, "1-0-0"))
            await until(lambda: replica.deaths == 1)
            first.cancel()
            second = asyncio.create_task(answer(policy, "2-0-0"))
            with pytest.raises(FatalRequest):
                await poison
            # It alone was in flight both times.
            assert replica.deaths == 2
            assert await second == 0
    finally:
        await replica.stop()


async def test_failures_of_engines_that_are_well_come_to_the_caller() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        for replica in made:
            replica.behave = refusing(500, 1 << 30)
        with pytest.raises(PolicyUnavailable, match="answered 500"):
            await answer(policy, "0-0-0")
        assert sum(len(replica.requests) for replica in made) == 3


async def test_refusals_come_to_the_caller_at_once() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        for replica in made:
            replica.behave = refusing(400, 1 << 30, body='{"error": {"type": "x", "message": "no"}}')
        with pytest.raises(PolicyRefused, match="no"):
            await answer(policy, "0-0-0")
        assert sum(len(replica.requests) for replica in made) == 1
        assert policy._admission.in_flight == 0


async def test_cancelling_gives_the_place_free() -> None:
    async with replicas(1, kv_cache_tokens=10) as made, routed(static(made)) as policy:
        release = asyncio.Event()

        async def hold(_: web.Request, asked: GenerationRequest) -> None:
            await release.wait()

        made[0].behave = hold
        tasks = [asyncio.create_task(answer(policy, f"{number}-0-0", tokens=8)) for number in range(4)]
        await until(lambda: len(made[0].requests) == 1 and policy.state().waiting == 3)
        for task in (tasks[0], tasks[1]):
            task.cancel()
        await asyncio.wait(tasks[:2])
        await until(lambda: len(made[0].requests) == 2 and policy.state().waiting == 1)
        assert policy._admission.in_flight == 1
        release.set()
        await asyncio.gather(*tasks[2:])


async def test_least_loaded_listens_to_what_replicas_say() -> None:
    async with replicas(2) as made, routed(static(made), sticky=False) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        made[0].others = 50
        answers = await everybody(policy, sessions=1, turns=20)
        assert answers[0].count(1) >= 18


async def test_everything_is_let_go_of_at_the_end() -> None:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(replicas(2))
        policy = await stack.enter_async_context(routed(static(made)))
        await everybody(policy)
    assert not policy._tasks
