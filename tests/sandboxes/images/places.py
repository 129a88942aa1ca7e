"""Directories for tests that the root of machines can reach: pytest's own are closed to everybody else."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_place() -> Iterator[Path]:
    """A directory that everybody can pass through; it is removed with what is in it."""
    # buildah makes a reference of the path, of which no part may end in `_`, as `mkdtemp`'s names sometimes do.
    path = Path(tempfile.gettempdir()) / f"kuberoll-images-{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    try:
        path.chmod(0o711)
        yield path
    finally:
        shutil.rmtree(path)
