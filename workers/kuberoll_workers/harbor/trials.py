"""Trials of a task: its solution, nothing, and attacks; what each is worth says what the task's tests are worth."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kuberoll_api.model.sandboxes import SandboxNetwork
from kuberoll_workers.data.stated import stated_answers
from kuberoll_workers.environments.agents.commands import AgentFailed
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.interface import ChatMessage, UnusableRow
from kuberoll_workers.environments.outcome import EnvironmentFault, StepRaised
from kuberoll_workers.harbor.agents import Agent, NoAgent, OracleAgent, Work
from kuberoll_workers.harbor.attacks import ATTACKS, PLACED, PLACES, Attack, paths_of, script_of
from kuberoll_workers.harbor.machines import reach
from kuberoll_workers.harbor.playing import Player, TaskFailed
from kuberoll_workers.harbor.pretences import PRETENCES
from kuberoll_workers.harbor.rewards import worth
from kuberoll_workers.harbor.rows import FIELD, row_of
from kuberoll_workers.harbor.task import Task
from kuberoll_workers.harbor.verifier import VerifierFailed
from kuberoll_workers.sandboxes.errors import CommandNotStarted, SandboxError

_ATTACK_SECONDS: Final = 60.0
_MOST_LEFT: Final = 50
_SAID: Final = 2000


@dataclass(frozen=True, slots=True)
class Trial:
    """A way of playing a task.

    Attributes:
        name: `solution`, `nothing`, or the name of an attack.
        title: What is done, as the end of a sentence.
        attack: The attack; None: it is none.
    """

    name: str
    title: str
    attack: Attack | None = None


SOLUTION: Final = Trial("solution", "plays the reference solution")
NOTHING: Final = Trial("nothing", "does nothing")
TRIALS: Final = (
    SOLUTION, NOTHING, *(Trial(attack.name, attack.title, attack) for attack in (*ATTACKS, *PRETENCES))
)  # fmt: skip
"""All trials; the list is closed, and names stay the same."""
TOGETHER: Final = (
    SOLUTION,
    NOTHING,
    Trial(PLACES.name, PLACES.title, PLACES),
    *(trial for trial in TRIALS[2:] if trial.name not in PLACED),
)
"""The same, with those as one that a machine undoes, whatever its task is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial has shown.

    Attributes:
        trial: Its name.
        reward: What it was worth: `reward`, or the sum of what has other names; None: there was no reward.
        rewards: Rewards by name.
        carried_out: False if the attack could leave nothing: its reward says nothing of the tests then.
        left: What an attack has left, at most 50 paths, in their order.
        agent_seconds, verifier_seconds: Time of both, of all steps.
        memory: Most memory of a process of the tests, in bytes; None: unknown.
        exit_code: Of the tests, of the last step; None: they have not run, or a signal has ended them.
        output: The end of what they said.
        changed: What the agent has changed of what the tests read (`sandboxes.guest.changes`).
        failure: Why there is no reward, through the task or what was done in it: tests that write none or are not done
            in time, a solution that fails.
        remark: How a solution has ended that failed, and is scored as it is.
        problem: Why there is none through neither: a lost machine, an image that is not there, a row that the job
            does not allow.
    """

    trial: str
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    carried_out: bool = True
    left: tuple[str, ...] = ()
    agent_seconds: float = 0.0
    verifier_seconds: float = 0.0
    memory: int | None = None
    exit_code: int | None = None
    output: str = ""
    changed: tuple[str, ...] = ()
    failure: str | None = None
    remark: str | None = None
    problem: str | None = None


class _NothingLeftError(Exception):
    """An attack could leave nothing."""


class AttackAgent:
    """The agent that attacks.

    Attributes:
        left: What it could leave behind, in the order in which that was said.
        ends: Whether the trial ends where it could leave nothing: no tests need to run then.
    """

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self.left: list[str] = []
        self.ends = False

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""
        said = [str(message.get("content", "")) for message in work.episode.messages]
        told = work.instruction if work.instruction is not None else "\n".join(said)
        environment = {**work.environment, "STATED": next(reversed(stated_answers(told)), "")}
        argv = ["/bin/sh", "-c", script_of(self._attack), "attack", *paths_of(told)]
        try:
            done = await work.sandbox.exec(argv, user=work.user, environment=environment, timeout=_ATTACK_SECONDS)
        except CommandNotStarted:
            # A machine without a shell: nothing was done.
            return
        self.left += [line[5:] for line in done.text.splitlines() if line.startswith("left ")]
        if not self.left and self.ends:
            raise _NothingLeftError


class _Timed:
    """An agent whose time is measured."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.seconds = 0.0

    async def work(self, work: Work) -> None:
        began = time.monotonic()
        try:
            await self._agent.work(work)
        finally:
            self.seconds += time.monotonic() - began


async def play_trial(player: Player, task: Task, trial: Trial, *, network: bool | None = None) -> Outcome:
    """Play a task in a directory once, in a machine of its own; see `play_fields`."""
    try:
        row = await asyncio.to_thread(row_of, task, str(task.directory))
    except (UnusableRow, OSError) as error:
        return Outcome(trial=trial.name, problem=_words(error))
    return await play_fields(
        player, row["metadata"][FIELD], task.directory, trial, messages=row["messages"], network=network
    )


async def play_fields(
    player: Player,
    fields: Mapping[str, Any],
    directory: Path,
    trial: Trial,
    *,
    messages: Sequence[ChatMessage],
    network: bool | None = None,
) -> Outcome:
    """Play the task of a row once, in a machine of its own.

    Args:
        fields: What the row says of its task (`harbor.rows`, the fields of `metadata.harbor`).
        directory: The task's directory here.
        messages: The row's.
        network: Whether machines reach what the job allows at most, whatever the task says; None: as the task says.

    Returns:
        What it has shown; faults of the task and of the machine are in it, and ours are raised.
    """
    if network is False:
        closed = SandboxNetwork(mode="None")
        player = dataclasses.replace(player, options=player.options.model_copy(update={"network": closed}))
    attacker = None if trial.attack is None else AttackAgent(trial.attack)
    oracle = OracleAgent()
    agent = _Timed(attacker or (oracle if trial.name == SOLUTION.name else NoAgent()))
    outcome = Outcome(trial=trial.name)
    began = time.monotonic()
    try:
        if attacker is not None:
            attacker.ends = len(fields["steps"]) == 1
        result = await player.play(_opened(fields) if network else fields, directory, agent, _episode(messages))
        last = result.tested[-1]
        outcome = dataclasses.replace(
            outcome,
            reward=sum(worth(result.rewards).values()),
            rewards=dict(result.rewards),
            verifier_seconds=sum(one.seconds for one in result.tested),
            memory=max((one.memory for one in result.tested if one.memory is not None), default=None),
            exit_code=last.exit_code,
            output=last.output[-_SAID:],
            changed=tuple(dict.fromkeys(path for one in result.grader_inputs for path in one.paths)),
        )
    except _NothingLeftError:
        pass
    except (VerifierFailed, AgentFailed, TaskFailed) as error:
        outcome = dataclasses.replace(outcome, failure=_words(error), verifier_seconds=_since(began, agent))
    except (StepRaised, EnvironmentFault, SandboxError, UnusableRow, OSError) as error:
        outcome = dataclasses.replace(outcome, problem=_words(error))
    left = () if attacker is None else tuple(dict.fromkeys(attacker.left))
    return dataclasses.replace(
        outcome,
        agent_seconds=agent.seconds,
        remark=oracle.failure,
        left=left[:_MOST_LEFT],
        carried_out=attacker is None or bool(left),
    )


def has_network(player: Player, fields: Mapping[str, Any]) -> bool:
    """Whether the task of a row is played with a network, as the job and the task say.

    Raises:
        UnusableRow: It asks for what the job does not allow.
    """
    return reach(fields["machine"]["network"], player.options.network).mode != "None"


def _opened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A task that asks for everything, of which it gets what the job allows."""
    public = {"network": {"mode": "public"}}
    phases = ("agent", "verifier")
    steps = [
        step | {name: step[name] | public for name in phases if "network" in step.get(name, {})}
        for step in fields["steps"]
    ]
    return {**fields, "machine": fields["machine"] | public, "steps": steps}


def _since(began: float, agent: _Timed) -> float:
    """Seconds of all but the agent: with a failure, those of the machine's start are among them."""
    return time.monotonic() - began - agent.seconds


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _episode(messages: Sequence[ChatMessage]) -> AgentEpisode:
    """An episode without a policy."""
    return AgentEpisode(
        id="trial",
        messages=messages,
        metadata={},
        tools=None,
        config={},
        seed=None,
        base_url="",
        anthropic_base_url="",
        token="",
        model="",
    )
