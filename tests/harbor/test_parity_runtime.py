"""Rewards beside Harbor's own runtime: the same tasks in the same Docker, played by Harbor and by us.

They run where `KUBEROLL_HARBOR_PYTHON` is a Python that has `harbor` 0.26, `KUBEROLL_HARBOR_RUNTIME` is set, and Docker
and `docker compose` answer. Harbor takes about 16 s for a trial, of which 10 s are Docker's wait at the end. Harbor's
egress proxy is an image of a registry's, which these tests do not need: their tasks get a network in Harbor.

KUBEROLL_HARBOR_TASKS may name further folders of tasks, with colons between them; tasks with Dockerfiles are built.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from kuberoll_api.cli import main
from kuberoll_workers.harbor.task import find_tasks
from kuberoll_workers.sandboxes import drivers
from tests.harbor.kinds import KINDS, Impossible, write_tasks
from tests.harbor.loading import load
from tests.harbor.partial_kinds import PARTIAL_KINDS, Rewards, bash_layout, expected, write_partial_tasks
from tests.harbor.rewarding import both_rewards
from tests.sandboxes.layouts import BUSYBOX

PYTHON = os.environ.get("KUBEROLL_HARBOR_PYTHON", "")
FOLDERS = [Path(path) for path in os.environ.get("KUBEROLL_HARBOR_TASKS", "").split(":") if path]
_PARALLEL: Final = 4
_PREFIX: Final = "localhost/kuberoll-parity"

DIFFERENT: Final = {
    "background": "no process of the agent is there when the tests come",
    "entrypoint": "an image's ENTRYPOINT is not run; with Docker, Harbor's machine ends with it",
    "no-shell": "Harbor needs a shell and its tools in an image",
    "variables": "a working directory that the image lacks is made",
}
"""Kinds of `kinds.py` for which Harbor gives less than 1, or nothing."""


def _has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return (
        shutil.which("docker") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="KUBEROLL_HARBOR_PYTHON names no Python that has harbor"),
    pytest.mark.skipif(not os.environ.get("KUBEROLL_HARBOR_RUNTIME"), reason="KUBEROLL_HARBOR_RUNTIME is not set"),
    pytest.mark.skipif(BUSYBOX is None or not _has_compose(), reason="needs busybox-static and docker compose"),
]


def harbor_rewards(folder: Path, trials: Path) -> dict[str, tuple[Rewards, Rewards]]:
    """What Harbor gives for the tasks of a folder: with the solution, and without an agent."""
    asked = [
        {"directory": str(task), "agent": agent, "trials": str(trials)}
        for task in find_tasks(folder)
        for agent in ("oracle", "nop")
    ]
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("theirs_playing.py")), str(_PARALLEL)],
        input="".join(json.dumps(one) + "\n" for one in asked),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HARBOR_TELEMETRY": "off"},
    )
    answers = {
        (Path(answer["directory"]).name, answer["agent"]): answer["rewards"]
        for answer in map(json.loads, done.stdout.splitlines())
    }
    names = {name for name, _ in answers}
    return {name: (answers[name, "oracle"], answers[name, "nop"]) for name in names}


@pytest.fixture(autouse=True)
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(drivers.VARIABLE, "docker")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _public(tasks: Path) -> None:
    """Give tasks a network, which the tests do not use: without one Harbor needs an image of a registry."""
    for file in tasks.glob("*/task.toml"):
        file.write_text(file.read_text().replace("no-network", "public"))


def _ours(folder: Path) -> Mapping[str, tuple[Rewards, Rewards]]:
    return asyncio.run(both_rewards(folder))


def test_kinds_of_tasks(tmp_path: Path) -> None:
    write_tasks(tmp_path / "layouts")
    names = {}
    for image in (tmp_path / "layouts/images").iterdir():
        layout = image if (image / "index.json").exists() else image / "image"
        if (layout / "index.json").exists():
            names[image.name] = f"{_PREFIX}/{image.name}:1"
            load(layout, names[image.name])
    left = write_tasks(tmp_path / "engine", images=names)
    _public(tmp_path / "engine/tasks")
    theirs, ours = harbor_rewards(tmp_path / "engine/tasks", tmp_path / "trials"), _ours(tmp_path / "engine/tasks")
    assert set(theirs) == set(KINDS) - set(left)
    assert {name for name in theirs if theirs[name] != ours[name]} == set(DIFFERENT)


def test_partial_kinds_of_tasks(tmp_path: Path) -> None:
    try:
        bash_layout(tmp_path / "image")
    except Impossible as missing:
        pytest.skip(str(missing))
    load(tmp_path / "image", f"{_PREFIX}/bash:1")
    write_partial_tasks(tmp_path / "tasks", image=f"{_PREFIX}/bash:1")
    _public(tmp_path / "tasks")
    theirs = harbor_rewards(tmp_path / "tasks", tmp_path / "trials")
    assert theirs == {name: (kind.solution, kind.nothing) for name, kind in PARTIAL_KINDS.items()}
    assert _ours(tmp_path / "tasks") == {name: expected(kind) for name, kind in PARTIAL_KINDS.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_given_tasks(folder: Path, tmp_path: Path) -> None:
    """What the Dockerfiles begin with must be in a registry that is reached, or in Docker already."""
    built = CliRunner().invoke(main, ["images", "build", str(folder), "--tag", _PREFIX, "--builder", "docker"])
    assert built.exit_code == 0, built.output
    theirs = harbor_rewards(folder, tmp_path / "trials")
    assert asyncio.run(both_rewards(folder, built=_PREFIX)) == theirs
