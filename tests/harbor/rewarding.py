"""Rewards by name of tasks that are played with their solution, and without an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.harbor.agents import Agent, NoAgent, OracleAgent
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.harbor.rows import FIELD, row_of
from kuberoll_workers.harbor.task import Task, find_tasks, read_task
from kuberoll_workers.sandboxes.drivers import find_sandboxes

Rewards = Mapping[str, float] | None
"""By their names; None: the task could not be played, or scored."""


async def both_rewards(
    folder: Path, *, built: str | None = None, parallel: int = 2
) -> dict[str, tuple[Rewards, Rewards]]:
    """Play the tasks of a folder in this machine's sandboxes.

    Args:
        built: Where images are that `kuberoll images build` has made.

    Returns:
        By the names of their directories: with the solution, and without an agent.

    Raises:
        SandboxUnavailable: This machine has no sandboxes.
    """
    sandboxes = find_sandboxes("test")
    places = asyncio.Semaphore(parallel)
    options = SandboxOptions.model_validate({"network": {"mode": "All"}, "builtImages": built})
    player = Player(sandboxes=sandboxes, options=options, variables={}, agent_seconds=600.0)

    async def both(directory: Path) -> tuple[str, tuple[Rewards, Rewards]]:
        task = read_task(directory)
        async with places:
            return directory.name, (
                await _rewards(player, task, OracleAgent()),
                await _rewards(player, task, NoAgent()),
            )

    try:
        await sandboxes.check()
        return dict(await asyncio.gather(*map(both, find_tasks(folder))))
    finally:
        await sandboxes.close()


async def _rewards(player: Player, task: Task, agent: Agent) -> Rewards:
    row = row_of(task, str(task.directory))
    episode = AgentEpisode(
        id="test",
        messages=row["messages"],
        metadata={},
        tools=None,
        config={},
        seed=None,
        base_url="",
        anthropic_base_url="",
        token="",
        model="",
    )
    try:
        return (await player.play(row["metadata"][FIELD], task.directory, agent, episode)).rewards
    except EnvironmentFault:
        return None
