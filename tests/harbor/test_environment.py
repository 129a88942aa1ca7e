"""The environment of agents in sandboxes: what it refuses before an engine is started, and which driver it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.environment_types import SANDBOX_AGENT_TYPE
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_workers.data.sandbox_uses import SandboxUse, SandboxUses, uses_of
from kuberoll_workers.environments.agents.request import AgentRequest
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.environments.outcome import EpisodeLost
from kuberoll_workers.environments.registry import UnusableEnvironment, create
from kuberoll_workers.harbor.environment import SandboxAgents
from kuberoll_workers.harbor.playing import TaskResult
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.sandboxes import drivers
from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.errors import SandboxLost, SandboxUnavailable
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


@pytest.mark.processes
async def test_what_was_lost_on_the_way_is_in_the_state(
    agents: SandboxAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = metadata_of(tmp_path, "debian:bookworm-slim")
    use = SandboxUse(asked=100.0, start_seconds=1.0, seconds=5.0)
    played = TaskResult(rewards={"reward": 1.0}, steps=[], agent_timeouts=0, start_seconds=1.0, sandboxes=[use])
    outcomes: list[Any] = [SandboxLost("gone"), SandboxLost("gone again"), played, played]

    class Loses:
        """A player whose machines are lost."""

        def starting(self, *_: object) -> None:
            pass

        async def play(self, *_: object) -> TaskResult:
            if isinstance(outcome := outcomes.pop(0), TaskResult):
                return outcome
            raise outcome

    monkeypatch.setattr(agents, "_player", Loses())
    request = AgentRequest(
        id="one", metadata=metadata, tools=None, seed=1, base_url="", anthropic_base_url="", token="", model="policy"
    ).encode()

    async def step() -> SandboxUses | None:
        found = await agents.step([[{"role": "user", "content": "x"}]], [request])
        [state] = found.metadata or ()
        return uses_of(state)

    for _ in range(2):
        with pytest.raises(EpisodeLost):
            await step()
    assert await step() == SandboxUses([use], lost=2)
    assert await step() == SandboxUses([use], lost=0)


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
