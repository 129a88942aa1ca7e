"""The example's tasks: they can be solved, and doing nothing solves none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kuberoll_api.cli import main
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_workers.environments import create
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.harbor.checking import Checked, check_tasks
from kuberoll_workers.harbor.dataset import TASKS
from kuberoll_workers.harbor.images import builds_of, tagged
from kuberoll_workers.harbor.task import Task, read_tasks
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.images.presence import absence
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.sandboxes.layouts import BUSYBOX, busybox_layout

EXAMPLE = Path(__file__).parents[2] / "examples" / "tasks"
READ = read_tasks(EXAMPLE)

_COPY = re.compile(r"^COPY (?:--chown=\S+ )?(.+) /work/\S*$", re.MULTILINE)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout that the example names, with busybox by the name of each of its images."""
    if BUSYBOX is None:
        pytest.skip("Debian's busybox-static is missing")
    monkeypatch.chdir(tmp_path)
    busybox_layout(tmp_path / "images")
    index = tmp_path / "images" / "index.json"
    [image] = json.loads(index.read_text())["manifests"]
    names = [tagged("localhost/kuberoll-tasks", build.digest) for build in builds_of(READ)]
    named = [{**image, "annotations": {"org.opencontainers.image.ref.name": name}} for name in names]
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": named}))
    return tmp_path / "images"


@pytest.mark.processes
def test_the_example_is_valid_once_its_images_are_built(images: Path) -> None:
    command = ["validate", "--dataset", str(EXAMPLE / "tasks.yaml")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    absence.cache_clear()
    (images / "index.json").unlink()
    result = CliRunner().invoke(main, command)
    assert result.exit_code != 0
    assert "examples/tasks/greeting/task.toml:1: image oci:" in result.output
    assert "`kuberoll images build` builds the images of tasks" in result.output


def test_each_of_the_tasks_has_an_image_of_its_own() -> None:
    assert [task.name for task in READ] == ["kuberoll/failing-clients", "kuberoll/greeting", "kuberoll/settings"]
    assert len(builds_of(READ)) == 3


@pytest.mark.processes
def test_the_rows_of_the_example_are_its_environment_s(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absence.cache_clear()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    manifest = EXAMPLE / "tasks.yaml"
    job = RolloutJob.model_validate(YAML(typ="safe").load(manifest))
    [spec] = job.spec.environments
    try:
        environment = create(spec)
    except UnusableEnvironment as error:
        pytest.skip(str(error))
    assert job.spec.dataset.source is not None
    assert job.spec.dataset.source.uri is not None
    rows = [row for _, row in TASKS.rows(manifest.parent / job.spec.dataset.source.uri, str(manifest.parent))]
    assert len(rows) == 3
    for row in rows:
        assert isinstance(row, dict)
        environment.check_row(row["metadata"])


def stand_in(task: Task, directory: Path) -> str:
    """An image of busybox in place of a task's, with what its Dockerfile copies: without builder and registry."""
    context = task.directory / "environment"
    names = [name for words in _COPY.findall((context / "Dockerfile").read_text()) for name in words.split()]
    assert sorted(names) == sorted(path.name for path in context.iterdir() if path.name != "Dockerfile")
    files = {f"work/{name}": (context / name).read_text() for name in names}
    return busybox_layout(
        directory, files=files, owner=1000 if "adduser" in (context / "Dockerfile").read_text() else 0
    )


@pytest.mark.processes
@pytest.mark.skipif(BUSYBOX is None, reason="Debian's busybox-static is missing")
async def test_the_solution_of_each_is_worth_1_and_doing_nothing_0(tmp_path: Path) -> None:
    sandboxes = Sandboxes(NamespaceDriver(cache=tmp_path / "cache", scratch=tmp_path))
    found: list[Checked] = []
    try:
        for task in READ:
            options = Sandbox(image=stand_in(task, tmp_path / task.directory.name))
            await check_tasks([task], options, sandboxes, parallel=1, done=found.append)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        await sandboxes.close()
    assert [(one.task, one.problem, one.solution.reward, one.nothing.reward) for one in found] == [
        (task.name, None, 1.0, 0.0) for task in READ
    ]
