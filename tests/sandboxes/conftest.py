"""Sandboxes for tests."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from kuberoll_workers.sandboxes.driver import Driver, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.sandboxes.contract import Machines, Processes, processes_here
from tests.sandboxes.layouts import BUSYBOX, busybox_layout
from tests.sandboxes.making import Making
from tests.sandboxes.programs import NoCompiler, musl_files

_IMAGES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"Env": ["PATH=/bin"]},
    "user": {"Env": ["PATH=/bin"], "User": "app", "WorkingDir": "/home/app"},
    # What an image starts by itself must not run.
    "entry": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/touch", "/ran"], "Cmd": ["/ran-too"]},
    # Variables that would keep many a program from starting.
    "preload": {
        "Env": [
            "PATH=/bin",
            "LD_PRELOAD=/srv/task.txt",
            "LD_LIBRARY_PATH=/srv",
            "LD_AUDIT=/srv/task.txt",
            "PYTHONHOME=/srv",
            "PYTHONPATH=/srv",
            "GREETING=hello, world",
        ]
    },
    "workdir": {"Env": ["PATH=/bin"], "WorkingDir": "/srv"},
}

Leasing = Callable[..., AbstractAsyncContextManager[Lease]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of images and of the runtime, made once."""
    return tmp_path_factory.mktemp("sandbox-cache")


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of busybox alone, whose variables would keep many a program from starting."""
    if BUSYBOX is None:
        pytest.skip("Debian's busybox-static is missing")
    return busybox_layout(tmp_path_factory.mktemp("busybox"), Env=["GREETING=hello", "LD_PRELOAD=/nope.so"])


@pytest.fixture
async def sandboxes(cache: Path, tmp_path: Path) -> AsyncIterator[Sandboxes]:
    """Sandboxes in namespaces."""
    found = Sandboxes(NamespaceDriver(cache=cache, scratch=tmp_path))
    try:
        await found.check()
    except SandboxUnavailable as error:
        await found.close()
        pytest.skip(str(error))
    yield found
    await found.close()
    assert left_in(tmp_path) == []


def left_in(scratch: Path) -> list[Path]:
    """What drivers have left in their directory."""
    return list(scratch.glob("kuberoll-sandboxes-*"))


@pytest.fixture
def lease(sandboxes: Sandboxes, busybox: str) -> Leasing:
    """Lease a sandbox of busybox; arguments are those of `SandboxSpec`."""

    @asynccontextmanager
    async def leased(**spec: Any) -> AsyncIterator[Lease]:
        wanted = SandboxSpec(**{"image": busybox, "memory": 256 << 20, "processes": 64, **spec})
        async with sandboxes.lease(wanted) as one:
            yield one

    return leased


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Images of busybox, by name."""
    if BUSYBOX is None:
        pytest.skip("Debian's busybox-static is missing")
    place = tmp_path_factory.mktemp("images")
    files = {"srv/task.txt": "a task\n"}
    return {name: busybox_layout(place / name, files=files, **config) for name, config in _IMAGES.items()}


@pytest.fixture(scope="session")
def musl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with programs that need musl."""
    place = tmp_path_factory.mktemp("musl")
    try:
        files = musl_files(place)
    except NoCompiler as missing:
        pytest.skip(str(missing))
    return busybox_layout(place / "image", files=files, Env=["PATH=/bin"])


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with Python, as a file of `docker save`."""
    from tests.containers.containerd import MissingTools
    from tests.containers.images import builder

    if shutil.which("buildah") is None:
        pytest.skip("no buildah: Debian has it")
    path = tmp_path_factory.mktemp("debian") / "image.tar"
    try:
        found = builder()
        found.buildah("push", found.base(), f"docker-archive:{path}:localhost/debian:tests")
    except MissingTools as missing:
        pytest.skip(str(missing))
    return f"docker-archive:{path}"


@pytest.fixture(scope="class")
def processes_of() -> Processes:
    """Finds the processes of a sandbox, which are this machine's."""
    return processes_here


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def driver(making: Making) -> AsyncIterator[Driver]:
    """The driver of a class of tests."""
    found = making.make()
    try:
        await found.check()
        yield found
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        await found.close()


@pytest.fixture(scope="class")
def machines(driver: Driver, images: dict[str, str]) -> Machines:
    """Makes sandboxes for a class of tests."""
    return Machines(driver, images)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def sandbox(machines: Machines) -> AsyncIterator[Sandbox]:
    """A sandbox that the tests of a class share."""
    async with machines.one(workdir="/new/place", lease_seconds=900) as found:
        yield found
