"""Sandboxes that are pods: the driver and the broker as they are, an emulated API server, and Podman's containers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kuberoll_api.sandboxes import BROKER_VARIABLE, TOKEN_VARIABLE
from kuberoll_operator.model import Object
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.pods.driver import PodDriver
from kuberoll_workers.sandboxes.runtime import find_runtime
from tests.cluster.control_plane import free_port
from tests.operator.broker.test_app import broker, put_job, until_ready
from tests.operator.emulator import Emulator
from tests.operator.support import NAMESPACE
from tests.sandboxes.contract import Machines, Traces
from tests.sandboxes.engines import MissingTools, Podman
from tests.sandboxes.engines import running as running_engine
from tests.sandboxes.kubelet import Kubelet
from tests.sandboxes.layouts import BUSYBOX
from tests.sandboxes.making import Making
from tests.sandboxes.pod_contract import PodContract

pytestmark = pytest.mark.images


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster in the small."""

    kubelet: Kubelet
    server: Emulator
    url: str
    token: str

    async def pod(self, sandbox: str) -> Object:
        """See `PodCluster.pod`."""
        found = self.server.get("pods", NAMESPACE, f"tasks-{sandbox}")
        assert found is not None
        return found

    async def end(self, sandbox: str, way: str) -> None:
        """See `PodCluster.end`."""
        if way == "delete":
            self.server.remove("pods", NAMESPACE, f"tasks-{sandbox}")
        else:
            pod = await self.pod(sandbox)
            await self.kubelet.kill(pod["metadata"]["uid"])


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


class TestPods(PodContract):
    """The contract of pods."""

    ways_to_end = ("delete", "kill")
    events = frozenset({("delete", "Deleted"), ("delete", "Error"), ("kill", "Error")})

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
