"""Pods in containers, without an API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.containers.containerd import Containerd
from tests.containers.node import ContainerNode
from tests.containers.runtime import ContainerRuntime


@pytest_asyncio.fixture
async def node(containerd: Containerd, tmp_path: Path) -> AsyncIterator[ContainerNode]:
    """A node whose pods end with the test."""
    # Pods of any user pass through.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    found = ContainerNode(ContainerRuntime(containerd, tmp_path / "logs"), tmp_path)
    await found.start()
    try:
        yield found
    finally:
        await found.close()
