"""One task, from its machine's start to its reward.

Whose doing an end is: a time limit that the task sets for the agent ends the agent, whose work is then scored as it is;
anything that fails outside of the policy's reach (a start, a healthcheck, tests without a reward, a lost machine) is a
failure, and no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.data.sandbox_uses import SandboxUse
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.outcome import StepRaised
from kuberoll_workers.harbor.agents import Agent, Work, ending, run_in_bash, user_of
from kuberoll_workers.harbor.ahead import AHEAD_SECONDS, Starting
from kuberoll_workers.harbor.artifacts import ARTIFACTS, collect, place
from kuberoll_workers.harbor.machines import PROXY_PORT, Reach, check_task, reach, resolved, setup_reach, spec_of
from kuberoll_workers.harbor.rewards import combine, shortfall
from kuberoll_workers.harbor.setting_up import set_up
from kuberoll_workers.harbor.verifier import Tested, verify
from kuberoll_workers.sandboxes.egress.proxy import EgressProxy
from kuberoll_workers.sandboxes.egress.rules import AllowedHosts
from kuberoll_workers.sandboxes.egress.variables import variables as egress_variables
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost
from kuberoll_workers.sandboxes.handle import Changes, Sandbox
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.starts import Reservation
from kuberoll_workers.telemetry import definitions as metrics

AGENT_LOGS: Final = "/logs/agent"
_SETUP_SECONDS: Final = 600.0
# The longest that a driver is told.
_LONGEST_SECONDS: Final = 604_800.0
_PRELOAD: Final = "/etc/ld.so.preload"

_log = logging.getLogger(__name__)


class TaskFailed(StepRaised):
    """A task could not be played, through no doing of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What playing a task has given.

    Attributes:
        rewards: Rewards by name.
        steps: Rewards of each step that was played.
        agent_timeouts: Number of steps in which the agent's time was over.
        start_seconds: Time that the machine's start took.
        sandboxes: The task's machine, and those of verifiers that have their own.
        tested: What the tests of these steps have said.
        grader_inputs: What the agent has changed, in each step whose tests run in its machine, of that which tests
            read without being told.
    """

    rewards: dict[str, float]
    steps: list[dict[str, float]]
    agent_timeouts: int
    start_seconds: float
    sandboxes: list[SandboxUse]
    tested: list[Tested] = field(default_factory=list)
    grader_inputs: list[Changes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays tasks.

    Attributes:
        sandboxes: Where machines come from.
        options: What the job says of them.
        variables: Variables of the worker that rows may refer to.
        agent_seconds: Time limit of the agent in tasks that set none.
    """

    sandboxes: Sandboxes
    options: SandboxOptions
    variables: Mapping[str, str]
    agent_seconds: float

    @property
    def allows_network(self) -> bool:
        """Whether the job allows machines to reach anything."""
        return self.options.network is not None and self.options.network.mode != "None"

    def starting(self, task: Mapping[str, Any], directory: Path) -> Starting:
        """What starts the machine of a task, and has it set up.

        Args:
            directory: The task's directory here.
        """
        return functools.partial(self._machine, task["machine"], directory)

    async def play(
        self,
        task: Mapping[str, Any],
        directory: Path,
        agent: Agent,
        episode: AgentEpisode,
        machine: AbstractAsyncContextManager[Lease] | None = None,
    ) -> TaskResult:
        """Play a task (`harbor.rows`, the fields of `metadata.harbor`).

        Args:
            directory: The task's directory here.
            machine: The task's machine, of `starting`; None: one is started.

        Raises:
            SandboxLost: Its machine was lost.
            TaskFailed, AgentFailed, VerifierFailed: It could not be played, or not be scored.
            UnusableRow: It asks for what the job does not allow.
        """
        check_task(task, self.options.network)
        began = time.monotonic()
        async with machine or self._machine(task["machine"], directory) as lease:
            self.sandboxes.meters.observe(metrics.SANDBOX_WAIT_SECONDS, time.monotonic() - began)
            sandbox = lease.sandbox
            played: list[Tested] = []
            others: list[Lease] = []
            changes: list[Changes] = []
            late = 0
            for step in task["steps"]:
                await _prepare_step(sandbox, step, directory)
                shared = step["verifier"].get("machine") is None
                mark = await _marked(sandbox) if shared else None
                late += await self._work(sandbox, task, step, directory, agent, episode)
                if shared:
                    changes.append(await _changed(sandbox, mark))
                    if changes[-1].paths:
                        self.sandboxes.meters.add(metrics.GRADER_INPUTS_CHANGED)
                    if _PRELOAD in changes[-1].paths:
                        # Every program of the tests would run it, and a reward.json of its own would count.
                        await sandbox.remove(_PRELOAD, user="0")
                played.append(await self._score(sandbox, step, directory, others))
                if shortfall(played[-1].rewards, step.get("min_reward")):
                    break
            steps = [one.rewards for one in played]
            found = combine(steps, task["reward"])
        if found is None:
            raise TaskFailed("no step of the task has a reward")
        return TaskResult(
            rewards=found,
            steps=steps,
            agent_timeouts=late,
            start_seconds=lease.start_seconds,
            sandboxes=[one.use for one in (lease, *others) if one.use is not None],
            tested=played,
            grader_inputs=changes,
        )

    @contextlib.asynccontextmanager
    async def _machine(
        self,
        machine: Mapping[str, Any],
        directory: Path,
        reservation: Reservation | None = None,
        *,
        holds_agent: bool = True,
    ) -> AsyncIterator[Lease]:
        """A machine of a task (`harbor.rows`, MACHINE) that is ready, for the time of the block."""
        network = reach(machine["network"], self.options.network)
        before = setup_reach(machine, network, self.options.network)
        spec = spec_of(machine, self.options, self.variables, network=network)
        if reservation is not None and reservation.needed_at is None:
            # Its trajectory has all of its time.
            spec = dataclasses.replace(spec, total_seconds=min(spec.total_seconds + AHEAD_SECONDS, _LONGEST_SECONDS))
        async with self.sandboxes.lease(spec, reservation) as lease, _way_out(lease.sandbox, before) as proxy:
            sandbox, setup = lease.sandbox, machine.get("setup")
            for path in (AGENT_LOGS, ARTIFACTS) if holds_agent else ():
                await sandbox.make_directory(path, mode=0o777, user="0")
            if (source := machine.get("upload")) is not None:
                await sandbox.upload(directory / source, await sandbox.workdir(), user="0")
            if setup is not None:
                variables = egress_variables(PROXY_PORT) if before.mode == "Allowlist" else {}
                await set_up(
                    sandbox,
                    setup,
                    directory,
                    environment={**variables, **resolved(setup.get("env", {}), self.variables)},
                )
            if proxy is not None and before != network:
                await proxy.restrict(AllowedHosts.of(network.hosts))
            await _await_health(sandbox, machine.get("healthcheck"))
            yield lease

    async def _work(
        self,
        sandbox: Sandbox,
        task: Mapping[str, Any],
        step: Mapping[str, Any],
        directory: Path,
        agent: Agent,
        episode: AgentEpisode,
    ) -> bool:
        """Have the agent work on a step; returns whether its time was over. Nothing of it is left."""
        limits = step.get("agent", {})
        seconds = limits.get("timeout", self.agent_seconds)
        work = Work(
            sandbox=sandbox,
            episode=episode,
            instruction=step.get("instruction"),
            user=user_of(limits),
            environment={},
            directory=directory,
            solution=step.get("solution"),
            solution_environment=resolved(task.get("solution_env", {}), self.variables),
        )
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                await agent.work(work)
        except TimeoutError:
            # The agent's own TimeoutError is not the task's time limit.
            if not timeout.expired():
                raise
        await sandbox.clear()
        return timeout.expired()

    async def _score(self, sandbox: Sandbox, step: Mapping[str, Any], directory: Path, others: list[Lease]) -> Tested:
        """Score a step; leases of further machines are added to `others`."""
        verifier = step["verifier"]
        for command in verifier.get("collect", ()):
            # What cannot be collected is missed by the tests, if they need it.
            with contextlib.suppress(StepRaised):
                await run_in_bash(
                    sandbox,
                    ["-c", command["command"]],
                    user=user_of(command),
                    seconds=command.get("timeout", _SETUP_SECONDS),
                )
        environment = resolved(verifier.get("env", {}), self.variables)
        if (machine := verifier.get("machine")) is None:
            return await verify(sandbox, verifier, directory, environment=environment)
        archives = await collect(sandbox, step.get("artifacts", ()))
        async with self._machine(machine, directory, holds_agent=False) as own:
            others.append(own)
            await place(own.sandbox, archives)
            return await verify(own.sandbox, verifier, directory, environment=environment)


@contextlib.asynccontextmanager
async def _way_out(sandbox: Sandbox, network: Reach) -> AsyncIterator[EgressProxy | None]:
    """Give a sandbox the proxy that lets it reach the hosts of an allowlist, and nothing else; None: it needs none."""
    if network.mode != "Allowlist":
        yield None
        return
    proxy = EgressProxy(AllowedHosts.of(network.hosts))
    try:
        await sandbox.forward("127.0.0.1", await proxy.open(), inside=PROXY_PORT)
        yield proxy
    finally:
        await proxy.close()
        if proxy.refused:
            _log.info("the sandbox %s was refused: %s", sandbox.name, proxy.refused)


async def _marked(sandbox: Sandbox) -> int | None:
    """A mark from which the agent's changes count; None: there is none."""
    try:
        return await sandbox.mark()
    except SandboxLost:
        raise
    except (OSError, SandboxError):
        return None


async def _changed(sandbox: Sandbox, mark: int | None) -> Changes:
    """What the agent has changed of what tests read: a finding, and no condition of the reward."""
    if mark is not None:
        try:
            return await sandbox.changed(mark)
        except SandboxLost:
            raise
        except (OSError, SandboxError) as error:
            _log.warning("what the agent has changed in the sandbox %s is not known: %s", sandbox.name, error)
    return Changes(paths=[], complete=False)


async def _prepare_step(sandbox: Sandbox, step: Mapping[str, Any], directory: Path) -> None:
    user = user_of(step.get("agent", {}))
    if (source := step.get("workdir")) is not None:
        await sandbox.upload(directory / source, await sandbox.workdir(), user="0")
        if (directory / source / "setup.sh").is_file():
            workdir = await sandbox.workdir()
            done = await run_in_bash(sandbox, [f"{workdir.rstrip('/')}/setup.sh"], user=user, seconds=_SETUP_SECONDS)
            if not done.succeeded:
                raise TaskFailed(f"{source}/setup.sh ended with {ending(done)}")
    await _await_health(sandbox, step.get("healthcheck"), user=user)


async def _await_health(sandbox: Sandbox, check: Mapping[str, Any] | None, *, user: str | None = None) -> None:
    """Wait until a healthcheck succeeds.

    Args:
        user: Whom it runs as; None: the sandbox's user.

    Raises:
        TaskFailed: It failed too often in a row, after its start period.
    """
    if check is None:
        return
    loop = asyncio.get_running_loop()
    began = loop.time()
    failures = 0
    while True:
        done = await run_in_bash(sandbox, ["-c", check["command"]], user=user, seconds=check["timeout"])
        if done.succeeded:
            return
        starting = loop.time() - began < check["start_period"]
        failures += not starting
        if failures >= max(check["retries"], 1):
            raise TaskFailed(f"the machine's healthcheck {check['command']!r} ended with {ending(done)}")
        await asyncio.sleep(check["start_interval"] if starting else check["interval"])


def state_of(result: TaskResult) -> dict[str, Any]:
    """What a trajectory's state says of how its task was played."""
    # What tests have said is long, and may show what a policy should not see.
    return {name: value for name, value in dataclasses.asdict(result).items() if name != "tested"}
