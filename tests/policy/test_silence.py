"""Replicas that give no sign of life: what waits for one that is lost goes elsewhere, and slow ones are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy import outage
from kuberoll_workers.policy.agent_sessions import AgentSession, SessionSettings
from kuberoll_workers.policy.interface import FatalRequest, GenerationRequest, PolicyRefused, PolicyUnavailable
from kuberoll_workers.policy.routing import breaker, router, silence
from kuberoll_workers.policy.routing.router import ReplicaLost, RoutedPolicy
from kuberoll_workers.policy.routing.silence import SILENT_SECONDS, Loss, SilenceWatch
from tests.policy import test_routing_faults as faults
from tests.policy.test_routing_faults import Changing, Replica, answer, replicas, routed, serving, static
from tests.rollouts.fakes import until

NAMES = ("a", "b")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end", "hear", "check", "lose"]),
            st.sampled_from(NAMES),
            st.floats(min_value=0.0, max_value=2 * SILENT_SECONDS),
        ),
        max_size=60,
    )
)
def test_only_replicas_that_were_silent_for_long_with_requests_in_flight_are_asked_or_lost(
    events: list[tuple[str, str, float]],
) -> None:
    watch, now = SilenceWatch(), 0.0
    signs: dict[str, float] = {}
    checks: dict[str, float] = {}
    for event, name, passed in events:
        now += passed
        if event == "begin":
            watch.begin(name, now)
            signs.setdefault(name, now)
        elif event == "end":
            watch.end(name)
            signs.pop(name, None)
        elif event == "hear":
            watch.hear(name, now)
            signs.update({name: now} if name in signs else {})
        elif event == "check" and name in watch.due(now):
            since = watch.silent_since(name)
            assert since is not None
            checks[name] = since
        elif event == "lose" and name in checks:
            # What happened since the check began decides whether its result still counts.
            silent = signs.get(name) == checks[name]
            assert watch.lose(name, checks.pop(name), Loss("no answer", now, stalled=False)) is silent
        lost = watch.lost
        assert lost.keys() <= signs.keys()
        assert set(watch.due(now)) == {
            name for name, at in signs.items() if now - at >= SILENT_SECONDS and name not in lost
        }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence that is noticed soon."""
    monkeypatch.setattr(silence, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(router, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(router, "_CHECK_SECONDS", 0.5)
    monkeypatch.setattr(router, "_SESSION_PATIENCE_SECONDS", 0.1)


class Stopping(Replica):
    """A replica that can stop answering anything, its health included."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.working = asyncio.Event()
        self.working.set()
        self.opened = 0
        self.behave = self._wait

    async def _wait(self, _: web.Request, __: GenerationRequest) -> None:
        await self.working.wait()

    async def _healthz(self, request: web.Request) -> web.Response:
        await self.working.wait()
        return await super()._healthz(request)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        super().add_routes(router)
        router.add_post("/sessions", self._open)
        router.add_delete("/sessions/{id}", self._close)

    async def _open(self, _: web.Request) -> web.Response:
        self.opened += 1
        name = f"{self.number}-{self.opened}"
        urls = dict.fromkeys(("url", "openai_base_url", "anthropic_base_url"), f"{self.url}/sessions/{name}")
        return web.json_response({"id": name, "token": "t", "model": "m", **urls}, status=201)

    async def _close(self, _: web.Request) -> web.Response:
        await self.working.wait()
        return web.json_response({"opened_at": 0.0, "calls": 0, "trajectories": []})


def stopping(count: int) -> AbstractAsyncContextManager[list[Stopping]]:
    return serving([Stopping(number) for number in range(count)])


@pytest.mark.usefixtures("quick")
async def test_what_waits_for_a_lost_replica_is_sent_to_another() -> None:
    async with stopping(2) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        made[0].working.clear()
        began = policy._loop.time()
        answers = await asyncio.gather(*(answer(policy, f"{number}-0-0") for number in range(8)))
        assert set(answers) == {1}
        assert made[0].requests
        # Under another id, for an engine that only seems lost may still work on the first one.
        sent = [asked.request_id for replica in made for asked in replica.requests]
        assert len(sent) == len(set(sent)) == 8 + len(made[0].requests)
        assert policy._metrics._outcomes["lost"] == len(made[0].requests)
        # What they have cost: each was there until it was found out.
        lasted = policy._loop.time() - began
        assert silence.SILENT_SECONDS <= policy._metrics._vain["lost"] <= lasted * len(made[0].requests)
        assert policy._metrics._vain.keys() == {"lost"}
        assert policy.state().replicas.get("closed") == 1
        # It gets requests again when it works again.
        made[0].working.set()
        await until(lambda: policy.state().replicas.get("closed") == 2)


@pytest.mark.usefixtures("quick")
async def test_nodes_that_are_lost_again_and_again_are_no_fault_of_the_request() -> None:
    async with stopping(6) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 6)

        async def stop(_: web.Request, asked: GenerationRequest) -> None:
            # Whichever is asked next stops with this request, until one is left.
            replica = next(each for each in made if each.requests and each.requests[-1] is asked)
            if sum(each.working.is_set() for each in made) > 1:
                replica.working.clear()
            await replica.working.wait()

        for replica in made:
            replica.behave = stop
        # It is the only one in flight at each of the losses.
        answered = await answer(policy, "0-0-0")
        assert [each.number for each in made if each.working.is_set()] == [answered]
        assert policy._metrics._outcomes["lost"] == 5


@pytest.mark.usefixtures("quick")
async def test_a_request_that_stalls_every_engine_is_refused_in_the_end() -> None:
    async with replicas(6) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 6)

        async def stall(_: web.Request, asked: GenerationRequest) -> None:
            # The engine makes no step any more, and its replica says so.
            next(replica for replica in made if replica.requests and replica.requests[-1] is asked).healthy = False
            await asyncio.Event().wait()

        for replica in made:
            replica.behave = stall
        with pytest.raises(FatalRequest):
            await answer(policy, "0-0-0")
        assert sum(len(replica.requests) for replica in made) < 6


@pytest.mark.usefixtures("quick")
async def test_a_slow_replica_that_is_well_is_left_alone() -> None:
    async with replicas(2) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        release, checks = asyncio.Event(), 0

        async def hold(_: web.Request, __: GenerationRequest) -> None:
            await release.wait()

        for replica in made:
            replica.behave = hold
        problem_at = policy._problem_at

        async def counted(url: str | None) -> PolicyUnavailable | PolicyRefused | None:
            nonlocal checks
            checks += 1
            return await problem_at(url)

        policy._problem_at = counted  # type: ignore[method-assign]
        asking = asyncio.create_task(answer(policy, "0-0-0"))
        await until(lambda: checks >= 3)
        assert sum(len(replica.requests) for replica in made) == 1
        release.set()
        await asking
        assert sum(len(replica.requests) for replica in made) == 1


@pytest.mark.usefixtures("quick")
async def test_the_only_replica_may_yet_answer_and_the_outage_has_a_reason() -> None:
    async with stopping(1) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 1)
        made[0].working.clear()
        asking = asyncio.create_task(answer(policy, "0-0-0"))
        await until(lambda: policy.outage() is not None)
        found = policy.outage()
        assert found is not None
        assert "no answer within" in found.reason
        made[0].working.set()
        assert await asking == 0
        assert len(made[0].requests) == 1


@pytest.mark.usefixtures("quick")
async def test_a_replacement_of_a_lost_replica_gets_what_that_one_had() -> None:
    async with stopping(1) as made, replicas(2) as others:
        discovery = Changing(made[0])
        async with routed(discovery) as policy:
            await until(lambda: policy.state().replicas.get("closed") == 1)
            made[0].working.clear()
            asking = asyncio.create_task(answer(policy, "0-0-0"))
            await until(lambda: policy.outage() is not None)
            assert not asking.done()
            # The lost one has left the list, as a pod does whose node is gone.
            discovery.listed = [others[1]]
            assert await asking == 1
            await until(lambda: policy.state().replicas == {"closed": 1})


async def never(policy: RoutedPolicy, session: AgentSession) -> None:
    """An agent that waits for its policy."""
    async with policy.attend_session(session):
        await asyncio.Event().wait()


@pytest.mark.usefixtures("quick")
async def test_an_agent_whose_replica_is_lost_is_stopped_and_others_go_on() -> None:
    async with stopping(2) as made, routed(static(made)) as policy:
        await until(lambda: policy.state().replicas.get("closed") == 2)
        sessions = [await policy.open_session(f"{number}-0-0", SessionSettings()) for number in range(4)]
        assert {session.id[0] for session in sessions} == {"0", "1"}
        made[0].working.clear()
        playing = {session.id: asyncio.create_task(never(policy, session)) for session in sessions}
        lost = [task for name, task in playing.items() if name.startswith("0")]
        for task in lost:
            with pytest.raises(ReplicaLost, match="no answer within"):
                await task
        assert [task.done() for name, task in playing.items() if name.startswith("1")] == [False] * (4 - len(lost))
        for session in sessions:
            if session.id.startswith("1"):
                playing[session.id].cancel()
                await policy.close_session(session)
        # Nothing is expected of either any more.
        assert policy._silence.lost == {}
        assert policy._silence.due(1e9) == []
        assert policy._session_places.outage(1e9) is None


@pytest.mark.usefixtures("quick")
async def test_an_agent_goes_on_while_there_is_no_other_replica_and_with_one_that_leaves_the_list() -> None:
    async with stopping(1) as made, replicas(2) as others:
        discovery = Changing(made[0])
        async with routed(discovery) as policy:
            session = await policy.open_session("0-0-0", SessionSettings())
            playing = asyncio.create_task(never(policy, session))
            # Its replica is to end, and lets its agents finish.
            discovery.listed = [others[1]]
            policy._wake.set()
            await until(lambda: "replica-1" in policy._admission.replicas)
            checks = 0
            problem_at = policy._problem_at

            async def counted(url: str | None) -> PolicyUnavailable | PolicyRefused | None:
                nonlocal checks
                checks += url == made[0].url
                return await problem_at(url)

            policy._problem_at = counted  # type: ignore[method-assign]
            await until(lambda: checks >= 3)
            assert not playing.done()
            made[0].working.clear()
            with pytest.raises(ReplicaLost):
                await playing


@pytest.mark.usefixtures("quick")
async def test_errors_inside_of_a_session_are_those_of_the_agent() -> None:
    async with stopping(1) as made, routed(static(made)) as policy:
        session = await policy.open_session("0-0-0", SessionSettings())
        with pytest.raises(TimeoutError, match="its own"):
            async with policy.attend_session(session):
                raise TimeoutError("its own")
        await policy.close_session(session)


@contextmanager
def process_of_a_replica() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A replica in a process of its own, which never answers a request: its pid, and its URL."""
    script = (
        "import asyncio\n"
        f"from {faults.__name__} import Replica\n"
        "async def main():\n"
        "    replica = Replica(7)\n"
        "    async def hold(*_): await asyncio.Event().wait()\n"
        "    replica.behave = hold\n"
        "    await replica.start()\n"
        "    print(replica.url, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_a_process_that_is_stopped_is_told_of_until_it_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With since when, and what it had; also when nothing more waits for it."""
    monkeypatch.setattr(outage, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(breaker, "LONGEST_SECONDS", 0.1)
    with process_of_a_replica() as (process, url):
        async with replicas(1) as made:
            other = Replica(7)
            other.url = url
            async with routed(Changing(other, made[0])) as policy:
                await until(lambda: policy.state().replicas.get("closed") == 2)
                assert (policy.state().usable, list(policy.state().unanswering)) == (2, [])
                before = time.time()
                asking = [asyncio.create_task(answer(policy, f"{number}-0-0")) for number in range(8)]
                await until(lambda: sum(not task.done() for task in asking) < 8)
                waiting = sum(not task.done() for task in asking)
                os.kill(process.pid, signal.SIGSTOP)
                await asyncio.gather(*asking)
                assert policy.state().usable == 1
                [silent] = policy.state().unanswering
                assert silent.url == url
                assert 0 < silent.requests <= waiting
                assert before <= silent.since <= time.time()
                assert "no answer within" in silent.problem
                # It is told of in the same words while it lasts.
                await asyncio.sleep(0)
                assert policy.state().unanswering[0].since == silent.since
                os.kill(process.pid, signal.SIGCONT)
                await until(lambda: policy.state().usable == 2)
                assert list(policy.state().unanswering) == []


async def test_a_replica_that_cannot_be_reached_is_told_of_until_it_leaves_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "PATIENCE_SECONDS", 0.0)
    async with replicas(1) as made:
        away = Replica(8)
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            away.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            discovery = Changing(away)
            async with routed(discovery) as policy:
                await until(lambda: [item.url for item in policy.state().unanswering] == [away.url])
                assert (policy.state().usable, policy.state().unanswering[0].requests) == (0, 0)
                discovery.listed = [made[0]]
                await until(lambda: policy.state().usable == 1)
                assert list(policy.state().unanswering) == []


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_a_process_that_is_stopped_has_its_connections_and_is_lost() -> None:
    """Its system still takes connections, and acknowledges what is sent: nothing but the silence shows it."""
    with process_of_a_replica() as (process, url):
        async with replicas(1) as made:
            other = Replica(7)
            other.url = url
            async with routed(Changing(other, made[0])) as policy:
                await until(lambda: policy.state().replicas.get("closed") == 2)
                asking = [asyncio.create_task(answer(policy, f"{number}-0-0")) for number in range(8)]
                await until(lambda: sum(not task.done() for task in asking) < 8)
                os.kill(process.pid, signal.SIGSTOP)
                assert set(await asyncio.gather(*asking)) == {0}
                assert policy._metrics._outcomes["lost"] > 0
