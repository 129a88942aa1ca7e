"""Agents that work on tasks: outside of the sandbox with its handle, or a program inside."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

from kuberoll_workers.environments.agents.commands import AgentFailed, policy_variables
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.harbor.files import TaskFiles
from kuberoll_workers.sandboxes.errors import CommandNotStarted
from kuberoll_workers.sandboxes.handle import Completed, Sandbox

SOLUTION: Final = "/solution"
_SHOWN: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an agent works on: one step of a task.

    Attributes:
        instruction: What to do; None: the episode's messages say it.
        user: Whom its commands run as; None: the sandbox's user.
        environment: Variables of its commands in addition to the sandbox's.
        directory: The task's directory here.
        solution: Directory of the reference solution, below `directory`; None: there is none.
        solution_environment: Variables of the reference solution.
    """

    sandbox: Sandbox
    episode: AgentEpisode
    instruction: str | None
    user: str | None
    environment: Mapping[str, str]
    directory: Path
    solution: str | None = None
    solution_environment: Mapping[str, str]


class Agent(Protocol):
    """An agent."""

    async def work(self, work: Work) -> None:
        """Work on a step until it is done; the caller has a time limit, and cancels.

        Raises:
            SandboxLost: The sandbox is gone.
            AgentFailed: The agent itself failed.
        """
        ...


class NoAgent:
    """The agent that does nothing."""

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""


class OracleAgent:
    """The agent that plays the reference solution.

    A solution that fails is scored as it is, as Harbor does.

    Attributes:
        failure: How a solution has ended that failed; None: none has.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""
        if work.solution is None:
            raise AgentFailed("the task has no solution/solve.sh")
        sandbox = work.sandbox
        source = work.directory / work.solution
        await sandbox.remove(SOLUTION, user="0")
        await upload(sandbox, TaskFiles(work.directory), source, SOLUTION)
        script = f"{SOLUTION}/solve.sh"
        await make_executable(sandbox, script, source / "solve.sh")
        # Harbor's oracle has the first of them, too: a solution that installs packages is asked nothing.
        environment = {"DEBIAN_FRONTEND": "noninteractive", **work.environment, **work.solution_environment}
        done = await run_program(sandbox, [script], user=work.user, environment=environment, seconds=None)
        if not done.succeeded:
            self.failure = f"the solution ended with {ending(done)}"


class CommandAgent:
    """A program inside of the sandbox, which reaches the policy at one address."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""
        episode = work.episode
        environment = {**work.environment, **await _variables_inside(work.sandbox, episode)}
        task = work.instruction if work.instruction is not None else _text(episode.messages)
        # Where no shell quotes it, and as a file for programs that read one.
        environment["KUBEROLL_INSTRUCTION"] = task
        argv = [word.replace("{instruction}", task) for word in self._argv]
        done = await run_program(work.sandbox, argv, user=work.user, environment=environment, seconds=None)
        if not done.succeeded:
            raise AgentFailed(f"agent.command: {self._argv[0]} ended with {ending(done)}")


async def _variables_inside(sandbox: Sandbox, episode: AgentEpisode) -> dict[str, str]:
    """Variables by which programs inside find the policy: the session's addresses, as they are reached from there."""
    address = urlsplit(episode.base_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    inside = await sandbox.forward(address.hostname or "127.0.0.1", port)

    def moved(url: str) -> str:
        return urlunsplit(urlsplit(url)._replace(netloc=inside))

    there = dataclasses.replace(
        episode, base_url=moved(episode.base_url), anthropic_base_url=moved(episode.anthropic_base_url)
    )
    return {**policy_variables(there), "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def user_of(phase: Mapping[str, Any]) -> str | None:
    """Whom a phase's programs run as, in a sandbox's words; tasks have names and numbers. None: the sandbox's user."""
    user = phase.get("user")
    return None if user is None else str(user)


async def upload(sandbox: Sandbox, files: TaskFiles, source: Path, target: str) -> None:
    """Put a directory of a task into the sandbox, without what its rules leave out, as root's."""
    selected = await asyncio.to_thread(files.selected, source)
    await sandbox.upload(source, target, only=[str(path) for path in selected], user="0")


async def make_executable(sandbox: Sandbox, path: str, source: Path) -> None:
    """Make a script of a task one that can be run, whatever its mode is here."""
    await sandbox.write(path, await asyncio.to_thread(source.read_bytes), mode=0o755, user="0")


async def run_program(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    user: str | None,
    environment: Mapping[str, str],
    seconds: float | None,
    workdir: str | None = None,
) -> Completed:
    """Run a program of a task; one without a first line that names its interpreter is the shell's."""
    for words in (argv, ["/bin/bash", *argv], ["/bin/sh", *argv]):
        try:
            return await sandbox.exec(
                list(words), user=user, environment=environment, timeout=seconds, workdir=workdir, merged=True
            )
        except CommandNotStarted as error:
            refused = error
            # ENOEXEC: the file has no such line; ENOENT: its interpreter, or this shell, is not there.
            if error.errno not in (2, 8):
                break
    raise AgentFailed(f"{argv[0]}: {refused}")


async def run_in_bash(
    sandbox: Sandbox, arguments: Sequence[str], *, user: str | None, seconds: float | None
) -> Completed:
    """Run bash, in which Harbor runs all commands of tasks; in an image without it, the shell."""
    for shell in ("bash", "/bin/sh"):
        try:
            return await sandbox.exec([shell, *arguments], user=user, timeout=seconds, merged=True)
        except CommandNotStarted as error:
            refused = error
            if error.errno != errno.ENOENT:
                break
    raise AgentFailed(f"{arguments[-1]}: {refused}")


def ending(done: Completed) -> str:
    """How a program has ended, and what it said last."""
    how = f"exit code {done.exit_code}" if done.signal is None else f"signal {done.signal}"
    said = done.text.strip()[-_SHOWN:]
    return f"{how}; its output ends with\n{said}" if said else f"{how}, without output"


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message["role"] == "user")
