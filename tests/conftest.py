"""What all tests share."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import second_chance, summary
from tests.environments.local_ray import local_ray
from tests.examples import QUICK_EXAMPLES
from tests.starting import THRESHOLDS, start_faster

if TYPE_CHECKING:
    from tests.containers.containerd import Containerd

# Read when gRPC is imported. Its handlers crash what is forked beside its threads; nobody here forks to use it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Collections would look at everything that is imported again and again: a sixth of the time that it takes to import it.
gc.disable()

# What tests start imports no less than they do.
start_faster()

# A shell lets the commands that it starts in the background ignore Ctrl-C, and all processes of the tests would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine the clock says nothing about the code.
settings.register_profile("kuberoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("kuberoll"), max_examples=QUICK_EXAMPLES)


def pytest_addoption(parser: pytest.Parser) -> None:
    second_chance.add_option(parser)
    parser.addoption("--long", action="store_true", help="Run the tests that take a minute or more, too.")
    parser.addoption(
        "--engine-image",
        action="store_true",
        help="Run the tests that build the generation image, of some gigabytes, too.",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="Run only the quick tests, and property tests with few examples.",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Before test modules are imported: what they ask for is scaled to the profile (tests/examples.py).
    settings.load_profile("quick" if config.getoption("--quick") else "kuberoll")
    config.pluginmanager.register(summary)
    config.pluginmanager.register(second_chance)


TESTS = Path(__file__).parent

MARKS_OF_DIRECTORIES = {
    "cluster": "cluster",
    "containers": "images",
    "local": "processes",
    "monitoring": "processes",
    "pods": "processes",
}
"""Markers of all tests of a directory."""

MARKS_OF_FIXTURES = {"browser": "browser", "ray": "ray", "s3_server": "slow", "simulated_host": "ray"}
"""Markers that a test has by the fixtures it uses."""

SLOW_MARKS = frozenset({"browser", "cluster", "engine", "faults", "images", "long", "processes", "ray", "slow"})
"""Markers of tests that `--quick` leaves out."""

_MARKS_OF_MODULE = re.compile(r"^pytestmark = (.*)$", re.MULTILINE)
_MARK = re.compile(r"pytest\.mark\.(\w+)")

# Tests that start the same heavy parts run one after another in one process of pytest-xdist; these groups come first.
_GROUPS = ("images", "cluster", "engine", "ray")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Directories and modules whose tests all have a marker are not even imported by `--quick`."""
    if not config.getoption("--quick"):
        return None
    if collection_path.is_dir():
        return True if collection_path.parent == TESTS and collection_path.name in MARKS_OF_DIRECTORIES else None
    marks = _MARKS_OF_MODULE.search(collection_path.read_text()) if collection_path.suffix == ".py" else None
    return True if marks and not SLOW_MARKS.isdisjoint(_MARK.findall(marks[1])) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes a minute or more: make test-long"))
        for fixture, name in MARKS_OF_FIXTURES.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(name)
        if item.path.parent.name in MARKS_OF_DIRECTORIES:
            item.add_marker(MARKS_OF_DIRECTORIES[item.path.parent.name])
        if item.get_closest_marker("engine"):
            item.add_marker("ray")
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    second_chance.offer(config, items)
    if config.getoption("--quick"):
        slow = {item for item in items if SLOW_MARKS.intersection(mark.name for mark in item.iter_markers())}
        config.hook.pytest_deselected(items=[item for item in items if item in slow])
        items[:] = [item for item in items if item not in slow]
    items.sort(key=_order)


def pytest_collection_finish() -> None:
    gc.freeze()
    # By default collections take 9 of some 100 seconds of the quick tests, and with these thresholds 4.
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


def _group(item: pytest.Item) -> str:
    return next((name for name in _GROUPS if item.get_closest_marker(name)), item.nodeid.partition("::")[0])


def _order(item: pytest.Item) -> int:
    return next((place for place, name in enumerate(_GROUPS) if item.get_closest_marker(name)), len(_GROUPS))


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The module `ray`, with a Ray of this process for tests with real actors; they ask for no CPU."""
    with local_ray():
        import ray

        yield ray


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
def generation_image(request: pytest.FixtureRequest) -> str:
    """The generation image on CPUs, built and given to containerd; its name. Skips without `--engine-image`."""
    if not request.config.getoption("--engine-image"):
        pytest.skip("builds the generation image: --engine-image, make test-cluster")
    containerd: Containerd = request.getfixturevalue("containerd")
    return _image(containerd, "generation")
