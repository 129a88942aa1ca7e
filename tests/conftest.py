"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.containers.containerd import Containerd

# Read when gRPC is imported. Its handlers crash what is forked beside its threads; nobody here forks to use it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# On a busy machine the clock says nothing about the code.
settings.register_profile("kuberoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kuberoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the tests that take a minute or more, too.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes a minute or more: make test-long"))


@pytest.fixture(scope="session")
def containerd() -> Iterator[Containerd]:
    """A containerd with an image of Python; skips where this machine can run no containers."""
    from tests.containers import containerd as place
    from tests.containers.images import builder, load_python

    try:
        with place.running_containerd() as found:
            load_python(builder(), found)
            yield found
    except place.MissingTools as missing:
        pytest.skip(str(missing))


def _image(containerd: Containerd, role: str) -> str:
    from tests.containers.images import IMAGES, builder, name_of

    found = builder()
    found.hand_over(found.build(IMAGES[role]), containerd, name_of(role))
    return name_of(role)


@pytest.fixture(scope="session")
def operator_image(containerd: Containerd) -> str:
    """The operator's image, built and given to containerd; its name."""
    return _image(containerd, "operator")


@pytest.fixture(scope="session")
def worker_image(containerd: Containerd) -> str:
    """The worker's image, built and given to containerd; its name."""
    return _image(containerd, "worker")


@pytest.fixture(scope="session")
def generation_image(containerd: Containerd) -> str:
    """The image of generation on CPUs, built and given to containerd; its name."""
    return _image(containerd, "generation")
