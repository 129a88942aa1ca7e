"""Directories for tests that the root of machines can reach: pytest's own are closed to everybody else."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_place() -> Iterator[Path]:
    """A directory that everybody can pass through; it is removed with what is in it."""
    path = Path(tempfile.mkdtemp(prefix="kuberoll-images-"))
    try:
        path.chmod(0o711)
        yield path
    finally:
        shutil.rmtree(path)
