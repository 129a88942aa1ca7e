"""The driver of pods with a broker that does what a test says."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kuberoll_api.http_server import serving
from kuberoll_api.sandboxes import (
    BROKER_VARIABLE,
    IDENTITY_VARIABLE,
    PLACEMENT_VARIABLE,
    RENEW_SECONDS,
    TOKEN_VARIABLE,
    SandboxRequest,
)
from kuberoll_workers.data.causes import Evidence
from kuberoll_workers.sandboxes.driver import Ending, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.guest import settings as guest_settings
from kuberoll_workers.sandboxes.guest.settings import VARIABLE, Settings
from kuberoll_workers.sandboxes.pods import driver as driver_module
from kuberoll_workers.sandboxes.pods.driver import PodDriver
from tests.cluster.control_plane import free_port

SPEC = SandboxSpec(image="example.org/task:1", start_seconds=30)


class FakeBroker:
    """Answers by verb and kind of place; a number is a status, None cuts the connection, and a list is gone through."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []
        self.waits: list[str | None] = []
        self.changed = asyncio.Event()

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    def names(self) -> list[list[str]]:
        """What the heartbeats said."""
        return [body["names"] for verb, path, body in self.asked if verb == "PUT" and "/workers/" in path]

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        async with serving([web.route("*", "/{path:.*}", self._answer)], host="127.0.0.1", port=port) as found:
            yield f"http://127.0.0.1:{found}/v1/jobs/rollouts/tasks"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.asked.append((request.method, request.path, json.loads(text) if text else None))
        self.waits.append(request.query.get("wait"))
        self.changed.set()
        assert request.headers["Authorization"] == "Bearer secret"
        kind = "renew" if "/workers/" in request.path else request.method.lower()
        answer = self.answers.get(kind, 204)
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(answer, int):
            return web.json_response({"error": f"words of {answer}"}, status=answer)
        return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer).encode())


@asynccontextmanager
async def driver_of(url: str, **variables: str) -> AsyncIterator[PodDriver]:
    found = PodDriver(environment="tasks", variables={BROKER_VARIABLE: url, TOKEN_VARIABLE: "secret", **variables})
    try:
        yield found
    finally:
        await found.close()


def waiting(reason: str) -> dict[str, str]:
    return {"state": "Waiting", "reason": reason}


@pytest.mark.parametrize("missing", [BROKER_VARIABLE, TOKEN_VARIABLE])
async def test_a_worker_without_a_broker_says_what_is_missing(missing: str) -> None:
    variables = {BROKER_VARIABLE: "http://127.0.0.1:1", TOKEN_VARIABLE: "secret", missing: ""}
    driver = PodDriver(environment="tasks", variables=variables)
    for asked in (driver.check(), driver.create("sb-1", SPEC)):
        with pytest.raises(SandboxUnavailable, match=f"^{missing}: not set"):
            await asked
    await driver.remove("sb-1")
    await driver.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            {"state": "Ended", "reason": "Evicted; the node was low on memory", "event": "Evicted"},
            Ending("Evicted; the node was low on memory", Evidence(event="Evicted")),
        ),
        ({"state": "Ended", "reason": "of an older broker"}, Ending("of an older broker")),
        ({"state": "Running", "address": "10.0.0.1:8791"}, Ending("its pod seems to run")),
        (503, None),
        (404, None),
        (None, None),
        (b"no JSON", None),
    ],
)
async def test_the_broker_is_asked_what_became_of_a_sandbox(answer: Any, expected: Ending | None) -> None:
    broker = FakeBroker(get=[204, answer])
    async with broker.serving() as url, driver_of(url) as driver:
        assert await driver.ending("sb-1") is None
        await driver.check()
        assert await driver.ending("sb-1") == expected
    if answer is not None:
        assert broker.asked[1][:2] == ("GET", "/v1/jobs/rollouts/tasks/sandboxes/sb-1")


async def test_a_broker_that_is_not_there_yet_is_waited_for() -> None:
    port = free_port()
    async with driver_of(f"http://127.0.0.1:{port}/v1/jobs/rollouts/tasks") as driver:
        checking = asyncio.create_task(driver.check())
        await asyncio.wait((checking,), timeout=0.2)
        assert not checking.done()
        fake = FakeBroker(get=[503, None, 204])
        async with fake.serving(port):
            await checking
            assert len(fake.asked) >= 3


async def test_a_broker_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_FIRST_SECONDS", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    async with driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match=f"the broker {url} does not answer"):
            await driver.check()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413])
async def test_what_the_broker_refuses_is_said_at_once(status: int) -> None:
    fake = FakeBroker(get=status, put=status)
    async with fake.serving() as url, driver_of(url) as driver:
        for asked in (driver.check(), driver.create("sb-1", SPEC)):
            with pytest.raises(SandboxUnavailable, match=f"answers {status}: words of {status}"):
                await asked
        assert [entry[0] for entry in fake.asked] == ["GET", "PUT", "DELETE"]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"state": "Maybe"}', b"\xff", b"[1]"])
async def test_what_is_no_broker_is_named(body: bytes) -> None:
    fake = FakeBroker(put=body)
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match="is no broker of this release"):
            await driver.create("sb-1", SPEC)


async def test_whoever_waits_goes_on_asking_whatever_happens_to_the_broker() -> None:
    refused = {"state": "Refused", "reason": "the job is over"}
    fake = FakeBroker(put=[None, 503, 429, waiting("quota"), None, waiting("nodes"), refused])
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match=r"sb-1 of example.org/task:1 cannot be made: the job is over"):
            await driver.create("sb-1", SPEC)
        puts = [body for verb, _, body in fake.asked if verb == "PUT"]
        assert len(puts) >= 7
        assert all(body == puts[0] for body in puts)
        assert fake.asked[-1][0] == "DELETE"


async def test_a_sandbox_that_ended_is_lost() -> None:
    fake = FakeBroker(put={"state": "Ended", "reason": "its pod was deleted"})
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxLost, match="sb-1 ended while it started: its pod was deleted"):
            await driver.create("sb-1", SPEC)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (waiting("no node has room for its pod: 0/3 nodes"), "no node has room for its pod: 0/3 nodes"),
        (503, "answers 503: "),
        ({"state": "Running", "address": "127.0.0.1:1"}, "its server at 127.0.0.1:1 does not answer"),
    ],
)
async def test_a_start_that_takes_too_long_says_what_it_waits_for(answer: Any, words: str) -> None:
    fake = FakeBroker(put=answer)
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match=r"did not start within 0\.5 s: ") as raised:
            await driver.create("sb-1", SandboxSpec(image="a", start_seconds=0.5))
        assert words in str(raised.value)
        # A broker that answers at once is not asked without a pause.
        assert len(fake.asked) < 15


async def test_what_a_start_waits_for_is_known_before_its_time_is_over() -> None:
    fake = FakeBroker(put=[None, waiting("quota")])
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match="quota"):
            await driver.create("sb-1", SandboxSpec(image="a", start_seconds=1))
    # It was heard of once, and then waits as long as it may.
    first, second, third, *_ = fake.waits
    assert (first, second, third) == ("5", "5", "20")


async def test_a_start_that_is_cancelled_is_given_back() -> None:
    fake = FakeBroker(put=waiting("quota"))
    async with fake.serving() as url, driver_of(url) as driver:
        creating = asyncio.create_task(driver.create("sb-1", SPEC))
        await fake.until(lambda: fake.asked)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert fake.asked[-1][:2] == ("DELETE", "/v1/jobs/rollouts/tasks/sandboxes/sb-1")


async def test_what_cannot_be_given_back_is_named_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "RENEW_SECONDS", 0.01)
    assert RENEW_SECONDS == 10
    fake = FakeBroker(put=waiting("quota"), delete=[None, 503, 401])
    async with fake.serving() as url, driver_of(url) as driver:
        creating = {name: asyncio.create_task(driver.create(name, SPEC)) for name in ("sb-1", "sb-2", "sb-3")}
        await fake.until(lambda: ["sb-1", "sb-2", "sb-3"] in fake.names())
        for name in list(creating):
            with pytest.raises(SandboxError, match="its pod is removed later"):
                await driver.remove(name)
        await fake.until(lambda: fake.names()[-1] == [])
        for task in creating.values():
            task.cancel()
        await asyncio.gather(*creating.values(), return_exceptions=True)


async def test_a_heartbeat_outlives_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "RENEW_SECONDS", 0.01)
    fake = FakeBroker(put=waiting("quota"), renew=[None, 503, 401, b"\xff", 204])
    async with fake.serving() as url, driver_of(url) as driver:
        creating = asyncio.create_task(driver.create("No Name", SPEC))
        await fake.until(lambda: fake.asked)
        await asyncio.sleep(0)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await fake.until(lambda: len(fake.names()) >= 6)


async def test_a_driver_that_is_closed_gives_back_all_and_says_no_more() -> None:
    fake = FakeBroker(put=waiting("quota"))
    async with fake.serving() as url:
        async with driver_of(url) as driver:
            creating = [asyncio.create_task(driver.create(name, SPEC)) for name in ("sb-1", "sb-2")]
            await fake.until(lambda: len(fake.asked) >= 2)
        deleted = {path.rpartition("/")[2] for verb, path, _ in fake.asked if verb == "DELETE"}
        assert deleted == {"sb-1", "sb-2"}
        for task in creating:
            task.cancel()
        await asyncio.gather(*creating, return_exceptions=True)


@pytest.mark.parametrize("image", ["oci:/images/task", "docker-archive:/images/task.tar", "host:/"])
async def test_images_of_this_machine_are_refused_with_the_way_out(image: str) -> None:
    driver = PodDriver(environment="tasks", variables={})
    assert "push" in (driver.refusal(SandboxSpec(image=image)) or "")
    with pytest.raises(SandboxUnavailable, match="push"):
        await driver.create("sb-1", SandboxSpec(image=image))
    assert driver.refusal(SPEC) is None
    # A registry of that name.
    assert driver.refusal(SandboxSpec(image="host:5000/task")) is None


async def test_what_is_asked_for_is_what_was_meant() -> None:
    placement = {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot"}]}
    placements = {"tasks": placement, "others": {"nodeSelector": {"pool": "another"}}}
    spec = SandboxSpec(
        image="example.org/task:1",
        cpus=1.5,
        memory=1 << 30,
        storage=2 << 30,
        network="All",
        user="app",
        environment={"A": "$(B) $$"},
        read_only=True,
        lease_seconds=90,
        start_seconds=30,
        total_seconds=3600,
    )
    fake = FakeBroker(put={"state": "Refused", "reason": ""})
    async with fake.serving() as url, driver_of(url, **{PLACEMENT_VARIABLE: json.dumps(placements)}) as driver:
        for wanted in (spec, SPEC):
            with pytest.raises(SandboxUnavailable):
                await driver.create("sb-1", wanted)
    first, second = (SandboxRequest.model_validate(body) for verb, _, body in fake.asked if verb == "PUT")
    assert (first.cpus, first.memory, first.storage, first.network, first.read_only) == (
        1.5,
        1 << 30,
        2 << 30,
        "All",
        True,
    )
    assert (first.lease_seconds, first.start_seconds, first.total_seconds) == (90, 30, 3600)
    assert first.placement.node_selector == {"pool": "spot"}
    assert first.placement.tolerations == [{"key": "spot"}]
    assert first.identify == []
    told = Settings.of(first.variables[VARIABLE])
    assert (told.name, told.user, told.environment, told.of_the_image) == ("sb-1", "app", {"A": "$(B) $$"}, True)
    assert "PRIVATE" not in first.model_dump_json()
    assert second.identify[-2:] == ["/.kuberoll-user/user", "/dev/termination-log"]
    assert first.worker == second.worker


async def test_no_two_drivers_are_one_worker() -> None:
    names = {PodDriver(environment="tasks", variables={})._worker for _ in range(50)}
    assert len(names) == 50
    for name in names:
        SandboxRequest(environment="tasks", worker=name, image="a", command=["a"])


@pytest.mark.parametrize(
    "host", ["", "A" * 200, "-.-", "pod.name.", "x" * 47 + "-.-" + "y" * 10, "my_machine", "größe"]
)
async def test_a_machine_of_any_name_is_a_worker(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    name = PodDriver(environment="tasks", variables={})._worker
    SandboxRequest(environment="tasks", worker=name, image="a", command=["a"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "x" * 2000}, "image: "),
        ({"memory": 0}, "memory: "),
        ({"environment": {"A": "x" * 300_000}}, "variables"),
        ({"environment": {"A": "x" * 64_000, "B": "ü" * 11_000}}, r"variables.*Linux passes at most 130000"),
    ],
)
async def test_what_no_broker_takes_is_not_asked_for(fields: dict[str, Any], words: str) -> None:
    fake = FakeBroker()
    async with fake.serving() as url, driver_of(url) as driver:
        with pytest.raises(SandboxUnavailable, match=f"cannot be a pod: {words}"):
            await driver.create("sb-1", SandboxSpec(**{"image": "a", **fields}))
        assert "PUT" not in {verb for verb, _, _ in fake.asked}


# What the server inside is told by its image.


def told(settings: Settings, folder: Path, **variables: str) -> Settings:
    """What a server makes of its settings, as a process of an image."""
    code = "from kuberoll_workers.sandboxes.guest.settings import from_variable; print(from_variable().encode())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: settings.encode(), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return Settings.of(done.stdout)


def test_what_settings_do_not_say_the_image_says(tmp_path: Path) -> None:
    settings = Settings(name="a", certificate="c", workdir="", of_the_image=True, environment={"A": "mine"})
    variables = {"A": "image", "B": "image", "HOME": "/home/app", "LD_LIBRARY_PATH": "/srv"}
    own = {"LD_PRELOAD": "", "LD_AUDIT": "", "GLIBC_TUNABLES": "", "HOSTNAME": "sandbox", "PWD": "/"}
    cluster = {"KUBERNETES_PORT": "tcp://10.96.0.1:443", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    found = told(settings, tmp_path, **variables, **own, **cluster)
    found.environment.pop("PYTHONPATH")
    # Python adds this one of its own accord.
    found.environment.pop("LC_CTYPE", None)
    assert found.environment == {**variables, "A": "mine"}
    assert found.workdir == str(tmp_path)
    assert found.user == ""
    # A place that is not absolute is below the image's.
    assert told(settings._replace(workdir="below/../this"), tmp_path).workdir == f"{tmp_path}/this"
    assert told(settings._replace(workdir="/srv"), tmp_path).workdir == "/srv"
    # Root's home is whose it is.
    assert "HOME" not in told(settings, tmp_path, HOME="/root").environment
    assert told(settings._replace(of_the_image=False), tmp_path, B="image").environment == {"A": "mine"}


def test_whom_commands_run_as_is_said_by_settings_then_a_variable_then_a_file(tmp_path: Path) -> None:
    place, said = tmp_path / "user", tmp_path / "said"
    guest_settings.write_identity(str(place), str(said))
    assert place.read_text() == said.read_text() == f"{os.getuid()}:{os.getgid()}"
    place.write_text("1000:100")
    settings = Settings(name="a", certificate="c", of_the_image=True, identity=str(place))
    assert told(settings, tmp_path).user == "1000:100"
    known = told(settings, tmp_path, **{IDENTITY_VARIABLE: "2000:200"})
    assert known.user == "2000:200"
    assert IDENTITY_VARIABLE not in known.environment
    assert told(settings._replace(user="app"), tmp_path, **{IDENTITY_VARIABLE: "2000:200"}).user == "app"
    assert guest_settings.IDENTITY_VARIABLE == IDENTITY_VARIABLE


_OWN_ADDRESSES = """
import json, socket, subprocess, sys, time
from kuberoll_workers.sandboxes.guest.server import _is_from_here

for command in ("link set lo up", "link add one type veth peer name two", "link set one up", "link set two up"):
    subprocess.run(["ip", *command.split()], check=True)
subprocess.run(["ip", "address", "add", "10.9.8.7/24", "dev", "one"], check=True)
while "fe80" not in (said := subprocess.check_output(["ip", "-6", "-o", "address", "show", "dev", "one"], text=True)):
    continue
link = (said.split("inet6 ")[1].split("/")[0], socket.if_nametoindex("one"))
found = {}
with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
    port = listener.getsockname()[1]
    for host, scope in (("::1", 0), ("::ffff:127.0.0.1", 0), ("::ffff:127.9.9.9", 0), ("::ffff:10.9.8.7", 0), link):
        with socket.socket(socket.AF_INET6) as end:
            end.settimeout(30)
            # Until it is known that nobody else has the address.
            while end.connect_ex((host, port, 0, scope)):
                time.sleep(0.05)
            with listener.accept()[0] as other:
                found[host] = _is_from_here(other)
print(json.dumps(list(found.values())))
"""


def test_own_addresses_of_all_kinds_are_known() -> None:
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("only root makes networks, with Debian's util-linux and iproute2")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _OWN_ADDRESSES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Operation not permitted" in done.stderr or "Unknown device type" in done.stderr:
        pytest.skip("no network can be made here")
    assert done.stdout.strip() == "[true, true, true, true, true]", done.stderr
