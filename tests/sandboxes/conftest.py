"""Sandboxes for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.sandboxes.layouts import BUSYBOX, busybox_layout

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
