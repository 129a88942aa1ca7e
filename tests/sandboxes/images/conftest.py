"""What tests of images share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxes.images.places import open_place


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the root of machines can reach."""
    with open_place() as path:
        yield path
