"""The environment whose agents work in sandboxes: one step is one whole task."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from kuberoll_api.model.agents import Agent as AgentOptions
from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.data.causes import Cause
from kuberoll_workers.environments.agents.functions import FunctionPhases
from kuberoll_workers.environments.agents.request import AgentRequest
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    Metadata,
    UnusableRow,
)
from kuberoll_workers.environments.outcome import SCALAR, EpisodeLost
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.harbor.agents import Agent, CommandAgent, Work
from kuberoll_workers.harbor.ahead import MachinesAhead
from kuberoll_workers.harbor.given import KEY as TASK_KEY
from kuberoll_workers.harbor.given import NOWHERE
from kuberoll_workers.harbor.machines import check_task, given_variables, reach, spec_of
from kuberoll_workers.harbor.playing import Player, TaskResult, state_of
from kuberoll_workers.harbor.rewards import KEY, worth
from kuberoll_workers.harbor.rows import FIELD
from kuberoll_workers.harbor.tools import ToolsLoop
from kuberoll_workers.sandboxes.drivers import find_sandboxes
from kuberoll_workers.sandboxes.errors import SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.images.presence import absence


class SandboxAgents(EnvironmentInterface):
    """Runs agents that work on tasks, each in a sandbox of its own."""

    row_metadata: ClassVar[Mapping[str, str]] = {FIELD: "the task: see kuberoll_workers.harbor.rows"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: `agent`, `name` and `sandbox`, as in the job; `config`, the environment's own; and `variables`, the
                names of the worker's variables that tasks may refer to.
        """
        self._options = SandboxOptions.model_validate(config["sandbox"])
        options = AgentOptions.model_validate(config["agent"])
        self._config = config["config"]
        self._agent = _agent_of(options, self._config)
        # A chat template that leaves tools out is refused before an engine is started.
        self.declares_tools = options.tools is not None  # type: ignore[misc]
        _check_here(config["name"])
        self.prepare_ahead = self._options.start_ahead
        sandboxes = find_sandboxes(config["name"])
        self.ahead = MachinesAhead(sandboxes)
        self._player = Player(
            sandboxes=sandboxes,
            options=self._options,
            variables=given_variables(config["variables"]),
            agent_seconds=options.timeouts.run_seconds,
        )
        self.meters = self._player.sandboxes.meters
        # How many sandboxes each episode under way has lost.
        self._lost: Counter[str] = Counter()

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        task = _task_of(metadata)
        check_task(task, self._options.network)
        machines = [task["machine"], *(step["verifier"].get("machine") for step in task["steps"])]
        for machine in machines:
            if machine is not None:
                network = reach(machine["network"], self._options.network)
                spec = spec_of(machine, self._options, self._player.variables, network=network)
                if (reason := self._player.sandboxes.refusal(spec)) is not None:
                    raise UnusableRow(reason)
                if (reason := absence(spec.image)) is not None:
                    hint = "; `kuberoll images build` builds the images of tasks" if "build" in machine else ""
                    raise UnusableRow(f"{reason}{hint}")

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Play one task for each request.

        Args:
            metadata: Requests, see `AgentRequest`.

        Raises:
            EpisodeLost: Its sandbox was lost.
        """
        results = await asyncio.gather(*map(self._play, message_log_batch, metadata))
        counted = [worth(result.rewards) for result, _ in results]
        names = list(dict.fromkeys(name for rewards in counted for name in rewards))
        rewards: Any = {name: [one.get(name, 0.0) for one in counted] for name in names}
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(results),
            metadata=[state for _, state in results],
            next_stop_strings=None,
            rewards=rewards[KEY] if names == [KEY] else rewards or {SCALAR: [0.0] * len(results)},
            terminateds=[True] * len(results),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Leave the batch as it is."""
        return batch, {}

    async def prepare(self, episodes: list[Episode]) -> None:  # type: ignore[override]
        """Begin to start the sandboxes of episodes."""
        for episode in episodes:
            task = _task_of(episode.metadata)
            self.ahead.prepare(episode.id, self._player.starting(task, directory_of(task)))

    async def discard(self, names: list[str]) -> None:  # type: ignore[override]
        """Remove the sandboxes of episodes that have not taken them."""
        await asyncio.gather(*map(self.ahead.discard, names))

    async def shutdown(self) -> None:  # type: ignore[override]
        """Remove all sandboxes."""
        await self.ahead.close()
        await self._player.sandboxes.close()

    async def _play(self, messages: Sequence[ChatMessage], metadata: Metadata) -> tuple[TaskResult, dict[str, Any]]:
        request = AgentRequest.decode(metadata or {})
        task = _task_of(request.metadata)
        episode = request.episode(messages, self._config)
        directory = directory_of(task)
        try:
            machine = self.ahead.machine(request.id, self._player.starting(task, directory))
            result = await self._player.play(task, directory, self._agent, episode, machine)
        except SandboxLost as error:
            # Not the agent's doing, nor the policy's: it plays again, in another sandbox.
            self._lost[request.id] += 1
            raise EpisodeLost(str(error), cause=Cause(error.reason, error.evidence)) from error
        state = {**state_of(result), "sandboxes_lost": self._lost.pop(request.id, 0)}
        return result, {**request.metadata, "result": state}


class FunctionAgent:
    """The user's own agent outside of the sandbox, with its handle."""

    def __init__(self, entrypoint: str, config: Mapping[str, Any]) -> None:
        self._phases = FunctionPhases(entrypoint, config)

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""
        episode = work.episode
        episode.state["sandbox"] = work.sandbox
        episode.state["work"] = work
        await self._phases.setup(episode)
        try:
            # What it returns is no reward: the tests decide.
            await self._phases.call(episode)
        finally:
            await self._phases.close(episode)


def _check_here(environment: str) -> None:
    """Check that this machine has sandboxes, before anything else is started for them.

    Raises:
        UnusableEnvironment: It has none; the message says what is missing.
    """

    async def check() -> None:
        sandboxes = find_sandboxes(environment)
        try:
            await sandboxes.check()
        finally:
            await sandboxes.close()

    # Whoever creates an environment may have an event loop.
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(asyncio.run, check()).result()
        except SandboxUnavailable as error:
            raise UnusableEnvironment(f"sandbox: {error}") from error


def _agent_of(options: AgentOptions, config: Mapping[str, Any]) -> Agent:
    if options.tools is not None:
        return ToolsLoop(options.tools)
    if options.entrypoint is not None:
        return FunctionAgent(options.entrypoint, config)
    assert options.command is not None
    return CommandAgent(options.command)


def _task_of(metadata: Metadata) -> Mapping[str, Any]:
    task = (metadata or {}).get(FIELD)
    if not isinstance(task, Mapping):
        raise UnusableRow(
            f"metadata.{FIELD} is missing: rows of an environment with a sandbox are tasks; let dataset.source.uri "
            f"name a directory of them, or let the row describe one (metadata.{TASK_KEY}: directory, or tests)"
        )
    return task


def directory_of(task: Mapping[str, Any]) -> Path:
    """The directory of a task: as it is, or beside the manifest, where modules of environments are.

    Raises:
        UnusableRow: It is not here.
    """
    name = task.get("directory")
    if name is None:
        return NOWHERE
    for place in ("", *sys.path):
        path = Path(place or os.curdir, name)
        if path.is_dir():
            return path.resolve()
    raise UnusableRow(f"the task's directory {name} is not here: the job must run where its tasks are")
