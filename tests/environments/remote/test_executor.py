"""The worker's side of isolation Remote: servers that die, hang, lie or are busy, and the episodes that they hold."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from kuberoll_workers.environments.batches import CloseBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.interface import Episode, EpisodeEnd
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import EpisodeLost, StepInvalid, StepRaised, StepTimedOut
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.remote.addresses import UrlAddresses
from kuberoll_workers.environments.remote.executor import RemoteExecutor
from tests.environments.episodic import events_in
from tests.environments.remote.servers import ServerProcess, gather, rooms
from tests.rollouts.fakes import until

pytestmark = pytest.mark.slow

LOG = [{"role": "user", "content": "a prompt"}, {"role": "assistant", "content": "go"}]
INFO = {"protocol": 2, "name": "fake"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def executor(urls: Sequence[str], **settings: Any) -> AsyncIterator[Any]:
    made = RemoteExecutor(
        UrlAddresses(urls),
        **{"name": "rooms", "timeout": 30.0, "check_seconds": 1.0, "patience": 120.0, **settings},
    )
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def fake(step: Handler, info: Any = INFO) -> AsyncIterator[str]:
    """A server that somebody else wrote."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def describe(_: web.Request) -> web.Response:
        return web.json_response(info)

    @web.middleware
    async def repeat_call(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        response.headers.setdefault(protocol.CALL_HEADER, request.headers.get(protocol.CALL_HEADER, "none"))
        return response

    application = web.Application(middlewares=[repeat_call])
    application.router.add_get("/healthz", health)
    application.router.add_get("/v1/info", describe)
    for method in ("step", "reset", "close"):
        application.router.add_post(f"/v1/{method}", step)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def two(tmp_path: Path) -> Any:
    """Two servers of one environment with state in its objects."""
    servers = [rooms("Rooms", tmp_path) for _ in range(2)]
    try:
        for server in servers:
            server.ready()
        yield servers
    finally:
        for server in servers:
            server.close()


def child_server(name: str, directory: Path, *, processes: int = 1, seconds: float = 30) -> Any:
    """An executor with a server as a child process."""
    spec = PlainSpec(
        name="rooms",
        type=None,
        entrypoint=f"tests.environments.episodic:{name}",
        config={"directory": str(directory)},
    )
    access = ProcessAccess(writable=[str(directory)])
    return make_executor(spec, isolation="Remote", processes=processes, timeout=seconds, access=access)


async def all_up(remote: Any) -> None:
    """Wait until both servers answer."""
    await remote.hooks()
    await until(lambda: remote.parallel == 4)


def reset(name: str) -> ResetBatch:
    return ResetBatch([Episode(id=name, messages=[], metadata={"row": 1}, seed=1, max_turns=9)])


def step(name: str | None, reply: str = "go") -> StepBatch:
    log = [*LOG[:-1], {"role": "assistant", "content": reply}]
    return StepBatch([StepItem(log, {"room": name}, name)])


def close(name: str) -> CloseBatch:
    return CloseBatch([EpisodeEnd(id=name, metadata={"room": name}, reason="terminated")])


def always(body: bytes, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    return answer


@pytest.mark.processes
async def test_an_episode_stays_with_its_server_and_both_have_as_many(tmp_path: Path, two: list[ServerProcess]) -> None:
    names = [f"e{n}" for n in range(8)]
    async with executor([server.url for server in two]) as remote:
        await all_up(remote)
        for name in names:
            await remote.run(reset(name))
        for _ in range(2):
            await gather(*(remote.run(step(name)) for name in names))
        for name in names:
            await remote.run(close(name))
    homes: dict[str, set[int]] = {}
    for event in events_in(tmp_path):
        homes.setdefault(event.episode, set()).add(event.process)
    assert all(len(homes[name]) == 1 for name in names)
    assert sorted(Counter(next(iter(homes[name])) for name in names).values()) == [4, 4]


@pytest.mark.processes
async def test_episodes_of_a_killed_server_are_lost_and_others_are_not(two: list[ServerProcess]) -> None:
    names = [f"e{n}" for n in range(4)]
    async with executor([server.url for server in two]) as remote:
        await all_up(remote)
        for name in names:
            await remote.run(reset(name))
        two[0].restart()
        results = await asyncio.gather(*(remote.run(step(name)) for name in names), return_exceptions=True)
        lost = [name for name, result in zip(names, results, strict=True) if isinstance(result, EpisodeLost)]
        assert len(lost) == 2, results
        for name in lost:
            await remote.run(close(name))
            await remote.run(reset(name))
        for name in names:
            [outcome] = await remote.run(step(name))
            assert outcome.content == ("step 1" if name in lost else "step 2")
        two[0].ready()
        # It is used again, with the next episodes.
        await all_up(remote)


@pytest.mark.processes
async def test_a_call_without_state_is_repeated_elsewhere(tmp_path: Path) -> None:
    servers = [rooms("PlainRooms", tmp_path) for _ in range(2)]
    try:
        for server in servers:
            server.ready()
        async with executor([server.url for server in servers]) as remote:
            await all_up(remote)
            hanging = [asyncio.create_task(remote.run(step(f"r{n}", "hang-once"))) for n in range(2)]
            await until(lambda: any(event.method == "hang" for event in events_in(tmp_path)))
            [dead] = {
                server
                for server in servers
                for event in events_in(tmp_path)
                if event.method == "hang"
                and event.process in {one.pid for one in psutil.Process(server.process.pid).children(recursive=True)}
            }
            dead.kill()
            results = await asyncio.gather(*hanging)
            assert [outcome.content for [outcome] in results] == ["step 1", "step 1"]
    finally:
        for server in servers:
            server.close()


async def test_an_agent_s_call_is_not_repeated_elsewhere() -> None:
    """The first one may still run."""
    calls = 0

    async def leave(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with fake(leave) as one, fake(leave) as other, executor([one, other], repeats=False) as remote:
        with pytest.raises(EpisodeLost, match="the server of the episode is gone"):
            await remote.run(step(None))
    assert calls == 1


@pytest.mark.processes
async def test_a_server_that_hangs_is_taken_out_and_tried_again(two: list[ServerProcess]) -> None:
    async with executor([server.url for server in two]) as remote:
        await all_up(remote)
        for name in ("a", "b"):
            await remote.run(reset(name))
        two[0].kill(signal.SIGSTOP)
        try:
            results = await asyncio.gather(*(remote.run(step(name)) for name in "ab"), return_exceptions=True)
            assert sorted(isinstance(result, EpisodeLost) for result in results) == [False, True]
            await remote.run(reset("c"))
        finally:
            two[0].kill(signal.SIGCONT)
        await all_up(remote)


@pytest.mark.parametrize(("status", "kind"), [(401, "operator"), (502, "infrastructure"), (404, "environment")])
@pytest.mark.parametrize("path", ["/v1/info", "/v1/step"])
async def test_whose_doing_a_status_is_that_no_server_of_an_environment_gives(
    path: str, status: int, kind: str
) -> None:
    async def describe(_: web.Request) -> web.Response:
        return web.json_response(INFO) if path != "/v1/info" else web.Response(status=status)

    async def step_or_refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    application = web.Application()
    application.router.add_get("/healthz", lambda _: _answered("ok"))
    application.router.add_get("/v1/info", describe)
    application.router.add_post("/v1/step", step_or_refuse)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with executor([f"http://127.0.0.1:{runner.addresses[0][1]}"]) as remote:
            with pytest.raises(StepRaised) as failed:
                await remote.run(step(None))
    finally:
        await runner.cleanup()
    assert failed.value.cause.kind == kind
    assert failed.value.cause.evidence.http_status == (None if kind == "environment" else status)


async def _answered(text: str) -> web.Response:
    return web.Response(text=text)


async def test_a_timeout_is_the_environment_s(tmp_path: Path) -> None:
    made = child_server("PlainRooms", tmp_path, seconds=3.0)
    try:
        with pytest.raises(StepTimedOut, match=r"step took longer than stepTimeoutSeconds \(3 s\)"):
            await made.run(step("a", "hang"))
        [outcome] = await made.run(step("a"))
        assert outcome.content == "step 1"
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "violates its protocol"),
        (b'{"outcomes": []}', "0 outcomes for 1 trajectories"),
        (b'{"outcomes": [{"reward": "1"}]}', "violates its protocol"),
        (pickle.dumps(os.getcwd), "violates its protocol"),
        (b'{"starts": [{}]}', "violates its protocol"),
        (b'{"outcomes": [{"metadata": {"a": NaN}}]}', "violates its protocol"),
    ],
)
async def test_a_server_that_lies_fails_the_call(body: bytes, says: str) -> None:
    async with fake(always(body)) as url, executor([url]) as remote:
        with pytest.raises(StepRaised, match=says):
            await remote.run(step(None))


@pytest.mark.parametrize(
    "outcome",
    [
        b'{"reward": 1e39}',
        b'{"metadata": [1]}',
        b'{"content": "' + b"x" * ((1 << 20) + 1) + b'"}',
        b'{"reward": 1, "reward_parts": {"a": 1e300}}',
    ],
)
async def test_a_value_that_cannot_be_stored_fails_its_own_trajectory(outcome: bytes) -> None:
    body = b'{"outcomes": [' + outcome + b', {"content": "well"}]}'
    async with fake(always(body)) as url, executor([url]) as remote:
        bad, well = await remote.run(StepBatch([StepItem(LOG, None), StepItem(LOG, None)]))
        assert isinstance(bad, StepInvalid)
        assert well.content == "well"


async def test_faults_of_another_server_are_bounded() -> None:
    frames = [{"file": "f" * 5000, "line": 1, "function": "g\x1b[31m"}] * 50
    fault = {"kind": "raised", "text": "t" * 50_000, "traceback": {"frames": frames, "text": "\x1b" * 50_000}}
    body = web.json_response(fault).body
    assert isinstance(body, bytes)
    async with fake(always(body, protocol.STATUS_FAULT)) as url, executor([url]) as remote:
        with pytest.raises(StepRaised) as raised:
            await remote.run(step(None))
    assert len(str(raised.value)) < 5000
    assert raised.value.traceback is not None
    assert len(raised.value.traceback.frames) <= 9
    assert "\x1b" not in raised.value.traceback.frames[0].function


@pytest.mark.parametrize("late", [False, True])
async def test_only_the_answer_to_the_same_call_is_taken(late: bool) -> None:
    """A server that answers each call with the outcome of the one before it, or with one that names no call."""
    before = "none"

    async def confused(request: web.Request) -> web.Response:
        nonlocal before
        call, before = before, request.headers[protocol.CALL_HEADER]
        headers = {protocol.CALL_HEADER: call if late else ""}
        return web.json_response({"outcomes": [{"reward": 1.0}]}, headers=headers)

    async with fake(confused) as url, executor([url]) as remote:
        for _ in range(3):
            with pytest.raises(StepRaised, match="names another call in Kuberoll-Call"):
                await remote.run(step(None))


async def test_no_redirect_is_followed() -> None:
    async def away(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://169.254.169.254/latest")

    async with fake(away) as url, executor([url]) as remote:
        with pytest.raises(StepRaised, match="answered 307"):
            await remote.run(step(None))


async def test_a_busy_server_is_asked_again() -> None:
    asked = 0

    async def busy(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503) if asked < 3 else web.Response(body=b'{"outcomes": [{"content": "at last"}]}')

    async with fake(busy) as url, executor([url]) as remote:
        [outcome] = await remote.run(step(None))
        assert outcome.content == "at last"


async def test_episodes_of_two_runs_do_not_meet() -> None:
    seen: list[str] = []

    async def note(request: web.Request) -> web.Response:
        body = await request.json()
        if "episodes" in body:
            seen.append(body["episodes"][0]["id"])
            return web.json_response({"starts": [{}]})
        seen.append(body["steps"][0]["episode"] if "steps" in body else body["ends"][0]["id"])
        return web.json_response({"outcomes": [{}]})

    async with fake(note, {**INFO, "recovery": "restart"}) as url:
        for scope in ("one", "other"):
            async with executor([url], scope=scope) as remote:
                await remote.run(reset("0-0-0"))
                await remote.run(step("0-0-0"))
                await remote.run(close("0-0-0"))
    assert seen == ["one.0-0-0"] * 3 + ["other.0-0-0"] * 3


@pytest.mark.parametrize(
    ("info", "patience", "says"),
    [
        ({"protocol": 1}, 120.0, "version 1 of the protocol; this worker needs 2"),
        ({"protocol": 2, "recovery": "hope"}, 1.0, "no server has answered"),
    ],
)
async def test_a_server_that_does_not_fit_is_not_used(info: Any, patience: float, says: str) -> None:
    async with fake(always(b""), info) as url, executor([url], patience=patience) as remote:
        with pytest.raises(StepRaised, match=says):
            await remote.hooks()


async def test_nobody_answers() -> None:
    async with executor(["http://127.0.0.1:9"], patience=0.5) as remote:
        with pytest.raises(StepRaised, match=r"no server has answered for 0.5 s: http://127.0.0.1:9"):
            await remote.run(step(None))


async def test_an_environment_that_its_child_server_cannot_create_is_refused_at_once() -> None:
    spec = PlainSpec(name="rooms", type=None, entrypoint="tests.environments.episodic:Rooms", config={})
    made = make_executor(spec, isolation="Remote", processes=1, timeout=30)
    try:
        with pytest.raises(StepRaised, match="its constructor raised KeyError: 'directory'") as raised:
            await made.hooks()
        assert raised.value.traceback is not None
        assert raised.value.traceback.frames[-1].file.endswith("episodic.py")
    finally:
        await made.close()


async def test_a_child_server_needs_no_short_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a Unix socket has at most 107 characters."""
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    remote = child_server("PlainRooms", tmp_path)
    try:
        [outcome] = await remote.run(step(None))
        assert outcome.content == "step 1"
    finally:
        await remote.close()
    assert list(long.iterdir()) == []


async def test_the_child_server_comes_again_and_ends_with_its_executor(tmp_path: Path) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    made = child_server("Rooms", tmp_path, processes=2)
    try:
        await made.run(reset("a"))
        mine = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
        assert len(mine) >= 4
        mine[0].kill()
        mine[0].wait()
        with pytest.raises(EpisodeLost):
            await made.run(step("a"))
        await made.run(close("a"))
        await made.run(reset("a"))
        [outcome] = await made.run(step("a"))
        assert outcome.content == "step 1"
        await made.run(close("a"))
    finally:
        await made.close()
    left = {one.pid for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}
    assert left <= before
    assert [event.method for event in events_in(tmp_path)][-4:] == ["reset", "step", "close", "shutdown"]


@dataclass
class Slow:
    """Answers steps when it is released; notes whose episodes it holds, and which it has closed."""

    released: asyncio.Event = field(default_factory=asyncio.Event)
    stepping: set[str] = field(default_factory=set)
    open: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "episodes" in body:
            self.open += [episode["id"] for episode in body["episodes"]]
            return web.json_response({"starts": [{} for _ in body["episodes"]]})
        if "ends" in body:
            self.closed += [end["id"] for end in body["ends"]]
            return web.json_response({})
        self.stepping.add(body["steps"][0]["episode"])
        await self.released.wait()
        return web.json_response({"outcomes": [{"content": "late"}]})


SLOW_INFO = {**INFO, "recovery": "restart", "reset": True, "close": True}


async def test_a_server_that_answers_too_late_closes_the_episodes_that_it_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kuberoll_workers.environments.remote.executor._MARGIN_SECONDS", 0.5)
    slow = Slow()
    async with fake(slow, SLOW_INFO) as url, executor([url], timeout=0.1) as remote:
        for name in ("a", "b"):
            await remote.run(reset(name))
        with pytest.raises(EpisodeLost, match=r"the server of the episode a is gone: .*: no answer for 0\.7 s"):
            await remote.run(step("a"))
        # It is down now, and alive: it is told when it is used again.
        await remote.run(close("a"))
        await until(lambda: "a" in slow.closed)
        # An episode of the same name is not ended by what was owed to the one before.
        await remote.run(reset("a"))
        slow.released.set()
        [outcome] = await remote.run(step("a"))
        assert outcome.content == "late"
        for name in ("a", "b"):
            await remote.run(close(name))
    assert sorted(slow.closed) == sorted(slow.open) == ["a", "a", "b"]


async def test_a_slow_server_holds_up_no_other_one() -> None:
    slow, quick = Slow(), Slow()
    quick.released.set()
    async with (
        fake(slow, SLOW_INFO) as one,
        fake(quick, SLOW_INFO) as other,
        executor([one, other], timeout=60.0) as remote,
    ):
        await remote.hooks()
        await until(lambda: remote.parallel == 2)
        names = [f"e{n}" for n in range(8)]
        for name in names:
            await remote.run(reset(name))
        steps = {name: asyncio.create_task(remote.run(step(name))) for name in names}
        # The others end while these wait.
        for name in quick.open:
            await steps[name]
            await remote.run(close(name))
        await until(lambda: slow.stepping == set(slow.open))
        assert not any(steps[name].done() for name in slow.open)
        slow.released.set()
        for name in slow.open:
            await steps[name]
            await remote.run(close(name))
    assert (len(slow.open), len(quick.open)) == (4, 4)
    assert sorted([*slow.closed, *quick.closed]) == names


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_token_is_in_no_message(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a server, or a proxy before it, sends back."""

    async def echo(request: web.Request) -> web.Response:
        text = f"I do not like your {request.headers['Authorization']}"
        body = json.dumps({"kind": "raised", "text": text}) if status == 422 else text
        return web.Response(text=body, status=status)

    async with fake(echo, SLOW_INFO) as url, executor([url], token="a-secret-1234") as remote:
        with pytest.raises(StepRaised, match="I do not like your Bearer ") as raised:
            await remote.run(step(None))
        with pytest.raises(StepRaised):
            await remote.run(reset("a"))
    assert "a-secret-1234" not in f"{raised.value} {raised.value!r} {caplog.text}"


class Fickle:
    """A healthy server that closes the connections of calls, or says that it is busy, while `trouble` says so."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.calls = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        if self.trouble == "busy":
            return web.Response(status=protocol.STATUS_BUSY, text="no instance was free")
        if self.trouble == "gone":
            assert request.transport is not None
            request.transport.abort()
        count = len(json.loads(await request.read()).get("steps", ()))
        return web.json_response({"outcomes": [{"content": "ok", "reward": 1.0, "terminated": True}] * count})


@pytest.mark.parametrize("trouble", ["gone", "busy"])
async def test_a_server_that_was_lost_or_busy_rests_while_others_answer(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr("kuberoll_workers.environments.remote.balance.FIRST_SECONDS", 3600.0)
    monkeypatch.setattr("kuberoll_workers.environments.remote.balance.LONGEST_SECONDS", 3600.0)
    bad, good = Fickle(trouble), Fickle()
    async with fake(bad) as one, fake(good) as other, executor([one, other]) as remote:
        await remote.hooks()
        await until(lambda: remote.parallel == 2)
        # One for each.
        await gather(remote.run(step(None)), remote.run(step(None)))
        assert bad.calls == 1
        # It answers to checks, and has no calls.
        await until(lambda: remote.parallel == 2)
        for _ in range(10):
            for [outcome] in await gather(remote.run(step(None)), remote.run(step(None))):
                assert outcome.content == "ok"
        assert bad.calls == 1
        # A rest is no refusal: where nobody else is, it is asked.
        bad.trouble, good.trouble = "", "busy"
        [outcome] = await remote.run(step(None))
        assert outcome.content == "ok"
        assert bad.calls == 2
