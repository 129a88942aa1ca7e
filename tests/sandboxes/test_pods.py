"""Sandboxes that are pods: the driver and the broker as they are, an emulated API server, and Podman's containers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kuberoll_api.sandboxes import BROKER_VARIABLE, TOKEN_VARIABLE
from kuberoll_workers.sandboxes.connection import connect
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.pods.driver import PodDriver
from kuberoll_workers.sandboxes.runtime import find_runtime
from tests.cluster.control_plane import free_port
from tests.operator.broker.test_app import broker, put_job, until_ready
from tests.operator.emulator import Emulator
from tests.operator.support import NAMESPACE
from tests.sandboxes.contract import DriverContract, Machines, Traces
from tests.sandboxes.engines import MissingTools, Podman
from tests.sandboxes.engines import running as running_engine
from tests.sandboxes.kubelet import Kubelet
from tests.sandboxes.layouts import BUSYBOX
from tests.sandboxes.making import Making

pytestmark = pytest.mark.images


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster in the small."""

    kubelet: Kubelet
    server: Emulator
    url: str
    token: str


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    found = Path(tempfile.mkdtemp(prefix="kuberoll-test-", dir="/tmp"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[Podman]:
    try:
        with running_engine(Podman, place / "podman") as found:
            assert isinstance(found, Podman)
            yield found
    except MissingTools as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def images(engine: Podman, images: dict[str, str]) -> dict[str, str]:
    """The same in the engine, by names for a registry."""
    return {name: loaded(engine, name, layout) for name, layout in images.items()}


@pytest.fixture(scope="module")
def musl(engine: Podman, musl: str) -> str:
    """The same in the engine."""
    return loaded(engine, "musl", musl)


@pytest.fixture(scope="module")
def debian(engine: Podman, debian: str) -> str:
    """The same in the engine."""
    return loaded(engine, "debian", debian)


def loaded(engine: Podman, name: str, reference: str) -> str:
    """Have an image in the engine; returns its name there."""
    image = engine.run("pull", "--quiet", reference).split()[-1]
    engine.run("tag", image, f"localhost/tests/{name}:1")
    return f"localhost/tests/{name}:1"


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def cluster(engine: Podman, place: Path, cache: Path) -> AsyncIterator[Cluster]:
    server = Emulator()
    token = put_job(server)
    runtime = find_runtime(cache).directory
    async with AsyncExitStack() as stack:
        kubeconfig = await stack.enter_async_context(server.running(place))
        kubelet = Kubelet(server, engine, place / "pods", runtime)
        await stack.enter_async_context(kubelet.running())
        _, url, _ = await stack.enter_async_context(broker(kubeconfig))
        await until_ready(url)
        yield Cluster(kubelet, server, url, token)


@pytest.fixture(scope="class")
def making(cluster: Cluster) -> Making:
    variables = {BROKER_VARIABLE: f"{cluster.url}/v1/jobs/{NAMESPACE}/tasks", TOKEN_VARIABLE: cluster.token}
    arguments = {"environment": "tasks", "variables": variables}
    return Making(f"{PodDriver.__module__}:{PodDriver.__name__}", arguments)


@pytest.fixture(scope="class")
def traces(cluster: Cluster) -> Traces:
    return cluster.kubelet.traces


class TestPods(DriverContract):
    """The contract, less what a cluster does: limits of processes, and who reaches whom."""

    limits_storage = False
    limits_processes = False
    isolates = False
    prepares = False
    keeps_loader_variables = False
    has_writable_workdir = False
    follows_killed = False

    async def test_its_server_hears_nobody_from_inside(self, machines: Machines) -> None:
        async with machines.one() as sandbox:
            host, _, port = sandbox._pool.ticket.address.removeprefix("tcp:").rpartition(":")
            # It speaks first, to whom it hears.
            outside = _stranger(host, int(port))
            assert await asyncio.to_thread(outside.recv, 1) == b"\x16"
            for address in ("127.0.0.1", "127.1.2.3", host):
                done = await sandbox.exec(f"nc -w 3 {address} {port} </dev/null 2>/dev/null | wc -c")
                assert done.text == "0\n"
            # More than the strangers of whom it closes the oldest.
            crowd = f"for n in $(seq 50); do nc {host} {port} >/dev/null 2>&1 & done; wait"
            await sandbox.exec(f"{crowd}; {crowd}", user="app")
            for _ in range(3):
                await sandbox.ping(seconds=10)
                (await connect(sandbox._pool.ticket, sandbox._pool._context)).close()
            outside.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                # The rest of its greeting, and no end.
                while data := outside.recv(4096):
                    continue
                assert data, "it was closed"
            outside.close()

    async def test_connections_break_when_nobody_is_there(self, sandbox: Sandbox) -> None:
        async with sandbox._pool.connection() as connection:
            end = connection._writer.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            # Of an idle one, and of one with something on its way.
            assert idle + interval * count <= 15
            assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000

    async def test_an_end_that_others_make_is_a_loss(self, machines: Machines, cluster: Cluster) -> None:
        for way in ("delete", "kill"):
            async with machines.one() as sandbox, sandbox.start(["sleep", "1000"]) as process:
                waiting = asyncio.create_task(process.wait())
                if way == "delete":
                    cluster.server.remove("pods", NAMESPACE, f"tasks-{sandbox.name}")
                else:
                    pod = cluster.server.get("pods", NAMESPACE, f"tasks-{sandbox.name}")
                    assert pod is not None
                    await cluster.kubelet._podman("kill", f"{pod['metadata']['uid']}-sandbox")
                with pytest.raises(SandboxLost):
                    await waiting

    async def test_a_pod_that_ends_while_it_starts_says_why(
        self, machines: Machines, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "runtime"
        broken.mkdir()
        monkeypatch.setattr(cluster.kubelet, "_runtime", broken)
        assert BUSYBOX is not None
        await asyncio.to_thread(shutil.copy, BUSYBOX, broken / "ld")
        with pytest.raises(SandboxLost, match=r"ended while it started: .*exit code 127, ld: applet not found"):
            await machines.driver.create(machines.name(), machines.spec())

    async def test_whom_an_image_is_for_is_asked_once(self, machines: Machines, cluster: Cluster) -> None:
        for _ in range(2):
            async with machines.one("user") as sandbox:
                assert (await sandbox.exec("id -un; echo $HOME; env | grep KUBEROLL")).text == "app\n/home/app\n"
                pod = cluster.server.get("pods", NAMESPACE, f"tasks-{sandbox.name}")
        assert pod is not None
        assert [item["name"] for item in pod["spec"]["initContainers"]] == ["runtime"]

    async def test_texts_with_dollars_arrive(self, machines: Machines) -> None:
        text = "$$5 $(HOME) $$(X) $ $"
        async with machines.one(environment={"TEXT": text}) as sandbox:
            assert (await sandbox.exec('printf %s "$TEXT"')).text == text


def _stranger(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=10)


async def test_the_broker_may_be_replaced(engine: Podman, images: dict[str, str], place: Path, cache: Path) -> None:
    server, port = Emulator(), free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {BROKER_VARIABLE: f"{url}/v1/jobs/{NAMESPACE}/tasks", TOKEN_VARIABLE: put_job(server)}
    kubelet = Kubelet(server, engine, place / "other-pods", find_runtime(cache).directory)
    driver = PodDriver(environment="tasks", variables=variables)
    (place / "other").mkdir()
    try:
        async with server.running(place / "other") as kubeconfig:
            # It is not there yet.
            checking = asyncio.create_task(driver.check())
            await asyncio.sleep(0.2)
            assert not checking.done()
            async with broker(kubeconfig, port=port):
                await checking
                spec = SandboxSpec(image=images["plain"])
                creating = asyncio.create_task(driver.create("sb-1", spec))
                await server.until(lambda: server.all("pods"))
            # Its pod starts while there is none.
            async with kubelet.running():
                await server.until(lambda: any((pod.get("status") or {}).get("podIP") for pod in server.all("pods")))
                async with broker(kubeconfig, port=port):
                    sandbox = Sandbox(await creating)
                    assert (await sandbox.exec(["echo", "here"])).text == "here\n"
                    await sandbox.close()
                    await driver.remove("sb-1")
                    assert not server.all("pods")
            assert len([item for item in server.writes("pods") if item.method == "POST"]) == 1
    finally:
        await driver.close()
