"""The check of tasks: the reference solution must be worth more than doing nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.harbor.task import Task
from kuberoll_workers.harbor.trials import NOTHING, SOLUTION, Trial, play_trial
from kuberoll_workers.sandboxes.leases import Sandboxes

_log = logging.getLogger(__name__)
_AGENT_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A task that was played without a policy.

    Attributes:
        reward: Its reward; of several named ones without `reward` their sum; None: it has failed.
        problem: Why it has failed.
        remark: What went wrong, although it has not failed.
    """

    reward: float | None = None
    problem: str | None = None
    remark: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of a task has found.

    Attributes:
        solution: With the reference solution.
        nothing: With an agent that does nothing.
    """

    task: str
    solution: Played
    nothing: Played

    @property
    def problem(self) -> str | None:
        """What is wrong with the task; None: nothing."""
        for name, played in (("the solution", self.solution), ("no agent", self.nothing)):
            if played.problem is not None:
                return f"with {name}: {played.problem}"
        assert self.solution.reward is not None
        assert self.nothing.reward is not None
        if self.solution.reward <= self.nothing.reward:
            reason = self.solution.remark or "the tests do not see the difference"
            return f"the solution is worth no more than doing nothing: {reason}"
        return None


async def check_tasks(
    tasks: Sequence[Task],
    options: SandboxOptions,
    sandboxes: Sandboxes,
    *,
    parallel: int,
    done: Callable[[Checked], None],
) -> None:
    """Play each task with its reference solution, and with an agent that does nothing.

    Args:
        options: What its machines may have.
        done: Called with what was found of each, as it comes.

    Raises:
        SandboxUnavailable: This machine has no sandboxes.
    """
    await sandboxes.check()
    player = Player(sandboxes=sandboxes, options=options, variables={}, agent_seconds=_AGENT_SECONDS)
    places = asyncio.Semaphore(parallel)

    async def check(task: Task) -> None:
        async with places:
            solution = await _played(player, task, SOLUTION)
            nothing = await _played(player, task, NOTHING)
        done(Checked(task=task.name, solution=solution, nothing=nothing))

    await asyncio.gather(*map(check, tasks))


async def _played(player: Player, task: Task, trial: Trial) -> Played:
    began = time.monotonic()
    try:
        outcome = await play_trial(player, task, trial)
        played = Played(reward=outcome.reward, problem=outcome.failure or outcome.problem, remark=outcome.remark)
    except Exception as error:
        # A fault of ours with one task is no reason to know nothing of the others.
        _log.exception("the task %s cannot be played", task.name)
        played = Played(problem=f"KubeRoll has failed, not the task: {type(error).__name__}: {error}")
    return dataclasses.replace(played, seconds=time.monotonic() - began)
