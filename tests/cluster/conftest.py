"""A small real cluster: a control plane and a kubelet, whose containers are containers or local processes."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kuberoll_workers.local.watchdog import end_processes
from tests.cluster.api import Api, ApiError
from tests.cluster.control_plane import ApiServer, MissingBinaries, start_api_server, start_controller_manager
from tests.cluster.kubelet import Kubelet, running_kubelet
from tests.cluster.pods import MakeRuntime, containers, kind_of_pods, processes


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """etcd and kube-apiserver; skips where this machine has none."""
    try:
        server = start_api_server(tmp_path_factory.mktemp("control-plane"))
    except MissingBinaries as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def control_plane(api_server: ApiServer) -> ApiServer:
    """The API server with controllers: Jobs, Deployments, garbage collection, TTLs. It ends with the API server."""
    try:
        start_controller_manager(api_server)
    except MissingBinaries as missing:
        pytest.skip(str(missing))
    return api_server


@pytest.fixture(scope="session")
def session_id() -> Iterator[str]:
    """In the environment of all that the kubelet starts; ended with the tests, even when those are killed."""
    identity = uuid.uuid4().hex
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "kuberoll_workers.local.watchdog", identity],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ},
    )
    try:
        yield identity
    finally:
        end_processes(identity)
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        watchdog.wait(60)


@pytest.fixture(scope="session")
def make_runtime(control_plane: ApiServer, session_id: str, request: pytest.FixtureRequest) -> MakeRuntime:
    """What starts pods, as KUBEROLL_TEST_PODS says, or as this machine can."""
    if kind_of_pods() == "processes":
        return processes(session_id)
    return containers(request.getfixturevalue("containerd"))


@pytest.fixture(scope="session")
def kubelet(control_plane: ApiServer, make_runtime: MakeRuntime) -> Iterator[Kubelet]:
    with running_kubelet(control_plane, make_runtime) as kubelet:
        yield kubelet


@pytest.fixture(scope="session")
def light_pods(kubelet: Kubelet, request: pytest.FixtureRequest) -> None:
    """What the pods of jobs with light engines need: the workers' image, where they are containers."""
    if kubelet.in_containers:
        request.getfixturevalue("worker_image")


@pytest.fixture(scope="session")
def ray_pods(kubelet: Kubelet, request: pytest.FixtureRequest) -> None:
    """What generation pods with Ray need: their image, where they are containers."""
    if kubelet.in_containers:
        request.getfixturevalue("generation_image")


@pytest_asyncio.fixture
async def api(api_server: ApiServer) -> AsyncIterator[Api]:
    """An administrator."""
    async with Api(api_server.url, api_server.token, api_server.authority) as api:
        yield api


@pytest_asyncio.fixture
async def namespace(api: Api, control_plane: ApiServer) -> AsyncIterator[str]:
    """A namespace of the test's own, with its service account; deleted with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    await api.wait("ServiceAccount", name, "default", lambda item: item is not None)
    try:
        yield name
    finally:
        await api.delete("Namespace", None, name)
        for pod in await api.list("Pod", name):
            try:
                await api.delete("Pod", name, pod["metadata"]["name"], grace=0)
            except ApiError as error:
                if error.status != 404:
                    raise
