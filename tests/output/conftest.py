"""What the tests of output share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture
def full_disk() -> Iterator[Path]:
    """A file that takes no byte. All processes have the same one, and who writes a journal locks it."""
    with FileLock(Path(tempfile.gettempdir(), "kuberoll-tests-full-disk.lock"), mode=0o666):
        yield Path("/dev/full")
