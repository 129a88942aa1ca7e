"""The environment of agents in sandboxes: what it refuses before an engine is started, and which driver it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.environments import SANDBOX_AGENT_TYPE, Environment
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.environments.registry import UnusableEnvironment, create
from kuberoll_workers.harbor.environment import SandboxAgents
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.sandboxes import drivers
from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.harbor.writing import write_task

TOML = """
schema_version = "1.4"
[task]
name = "kuberoll/hello"
[environment]
docker_image = "{image}"
network_mode = "{network}"
"""


def metadata_of(folder: Path, image: str, network: str = "no-network") -> dict[str, Any]:
    write_task(folder / "hello", changed={"task.toml": TOML.format(image=image, network=network)})
    found: dict[str, Any] = row_of(read_task(folder / "hello"), "hello")["metadata"]
    return found


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SandboxAgents:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(drivers.VARIABLE, "namespaces")
    spec = Environment.model_validate({"name": "tasks", "agent": {"command": ["true"]}, "sandbox": {}})
    assert spec.constructor[0] == SANDBOX_AGENT_TYPE
    try:
        made = create(spec)
    except UnusableEnvironment as error:
        pytest.skip(str(error))
    assert isinstance(made, SandboxAgents)
    return made


@pytest.mark.processes
def test_a_network_that_the_driver_has_not_is_refused_before_an_engine(agents: SandboxAgents, tmp_path: Path) -> None:
    agents._options = Sandbox.model_validate({"network": {"mode": "All"}})
    with pytest.raises(UnusableRow, match="network All needs Docker or Podman"):
        agents.check_row(metadata_of(tmp_path, "debian:bookworm-slim", "public"))


@pytest.mark.processes
def test_rows_are_refused_that_could_not_be_played(agents: SandboxAgents, tmp_path: Path) -> None:
    for metadata, reason in (
        (metadata_of(tmp_path, f"oci:{tmp_path}/nowhere"), "no OCI layout is there"),
        (metadata_of(tmp_path, "debian:bookworm-slim", "public"), "network_mode is public"),
        ({"answer": 4}, "metadata.harbor is missing"),
        (None, "metadata.harbor is missing"),
    ):
        with pytest.raises(UnusableRow, match=reason):
            agents.check_row(metadata)
    # Whether a registry has an image is known when it is asked.
    agents.check_row(metadata_of(tmp_path, "debian:bookworm-slim"))


def test_which_driver_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, kind in (("namespaces", NamespaceDriver), ("docker", DockerDriver)):
        monkeypatch.setenv(drivers.VARIABLE, name)
        assert isinstance(drivers.find_driver("task"), kind)
    monkeypatch.setenv(drivers.VARIABLE, "vagrant")
    with pytest.raises(SandboxUnavailable, match="must be docker, namespaces or pods"):
        drivers.find_driver("task")
    monkeypatch.delenv(drivers.VARIABLE)
    for answers, kind in ((True, DockerDriver), (False, NamespaceDriver)):
        monkeypatch.setattr(drivers, "has_engine", lambda variables, answers=answers: answers)
        assert isinstance(drivers.find_driver("task"), kind)


def test_a_machine_without_sandboxes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drivers.VARIABLE, "vagrant")
    spec = Environment.model_validate({"name": "tasks", "agent": {"command": ["true"]}, "sandbox": {}})
    with pytest.raises(UnusableEnvironment, match="sandbox: KUBEROLL_SANDBOX_DRIVER is 'vagrant'"):
        create(spec)
