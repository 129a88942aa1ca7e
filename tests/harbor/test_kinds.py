"""Tasks of many kinds, by `kuberoll tasks check`: the solution is worth 1, and doing nothing 0."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_api.cli import main
from kuberoll_workers.sandboxes import drivers
from tests.harbor.kinds import KINDS, write_tasks
from tests.sandboxes.conftest import debian  # noqa: F401 - a fixture
from tests.sandboxes.engines import MissingTools, Podman, running
from tests.sandboxes.layouts import BUSYBOX

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(BUSYBOX is None or sys.platform != "linux", reason="needs Debian's busybox-static"),
]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, but for those whose images this machine cannot make."""
    directory = tmp_path_factory.mktemp("kinds")
    try:
        images = {"python": request.getfixturevalue("debian")}
    except pytest.skip.Exception:
        images = {}
    left = write_tasks(directory, images=images)
    assert len(KINDS) - len(left) >= 20, left
    return directory / "tasks"


@pytest.fixture(params=["namespaces", pytest.param("docker", marks=pytest.mark.images)])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each driver, as the variables of a machine choose it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(drivers.VARIABLE, request.param)
    if request.param == "namespaces":
        yield
        return
    # Its path is short enough for sockets.
    place = Path(tempfile.mkdtemp(prefix="kuberoll-test-", dir="/tmp"))
    try:
        with running(Podman, place / "podman") as engine:
            monkeypatch.setenv("DOCKER_HOST", engine.url)
            yield
    except MissingTools as missing:
        pytest.skip(str(missing))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_the_solution_of_each_is_worth_1_and_doing_nothing_0(folder: Path, driver: None) -> None:
    done = CliRunner().invoke(main, ["tasks", "check", str(folder)])
    assert done.exit_code == 0, done.output
    _, *rows, summary = done.stdout.splitlines()
    assert {row.split()[0]: row.split()[1:3] for row in rows} == {
        f"kinds/{path.name}": ["1", "0"] for path in folder.iterdir()
    }
    assert summary.endswith(" 0 not")
