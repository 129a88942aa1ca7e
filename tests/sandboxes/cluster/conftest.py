"""A real cluster for tests, and images that its nodes can have."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.cluster.control_plane import MissingBinaries
from tests.sandboxes.cluster.real import VARIABLE, RealCluster, real_cluster
from tests.sandboxes.contract import Processes, Traces
from tests.sandboxes.making import Making


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no kubeconfig of a cluster for tests")
    try:
        with real_cluster(tmp_path_factory.mktemp("cluster")) as found:
            yield found
    except MissingBinaries as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def images(cluster: RealCluster, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same in the registries of the nodes."""
    place = tmp_path_factory.mktemp("pushed")
    return {name: cluster.images.push(name, layout, place) for name, layout in images.items()}


@pytest.fixture(scope="session")
def musl(cluster: RealCluster, musl: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same in the registries of the nodes."""
    return cluster.images.push("musl", musl, tmp_path_factory.mktemp("pushed-musl"))


@pytest.fixture(scope="session")
def debian(cluster: RealCluster, debian: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same in the registries of the nodes."""
    return cluster.images.push("debian", debian, tmp_path_factory.mktemp("pushed-debian"))


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def making(cluster: RealCluster) -> AsyncIterator[Making]:
    """How drivers of a broker's workers are made."""
    async with cluster.serving() as found:
        yield found


@pytest.fixture(scope="class")
def traces(cluster: RealCluster) -> Traces:
    """Finds the pods that there are."""
    return cluster.traces


@pytest.fixture(scope="class")
def processes_of(cluster: RealCluster) -> Processes:
    """Finds the pod of a sandbox, in place of its processes."""
    return lambda name: [1] if cluster.runs(name) else []
