"""Agents that are programs, each in a directory and a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import orjson

from kuberoll_api.model.agents import Agent
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE, RUN_SCRATCH_VARIABLE
from kuberoll_workers.environments import sandbox
from kuberoll_workers.environments.agents.episode import AgentEpisode, AgentResult, InvalidResult, result_from_json
from kuberoll_workers.environments.sandbox import Sandbox

_ROW: Final = "episode.json"
_RESULT: Final = "result.json"
_OUTPUT_BYTES: Final = 64 << 10
_SHOWN_CHARACTERS: Final = 2000
# What has left the program's process group may hold its output open for ever.
_LAST_OUTPUT_SECONDS: Final = 1.0


class AgentFailed(Exception):
    """A program ended with an error."""


class CommandPhases:
    """The phases of an agent whose programs are run one after the other in one directory."""

    def __init__(self, agent: Agent, *, variables: Sequence[str]) -> None:
        """
        Args:
            variables: Names of variables that the programs inherit in addition to the usual ones.
        """
        self._agent = agent
        self._variables = variables

    async def setup(self, episode: AgentEpisode) -> None:
        """Make the directory with the episode in it, and run the program that prepares it.

        Raises:
            AgentFailed: The program failed.
        """
        # In a worker, and not in a process of the environment, nobody else removes it when the worker is killed.
        place = os.environ.get(RUN_SCRATCH_VARIABLE)
        directory = episode.state["directory"] = Path(tempfile.mkdtemp(prefix="kuberoll-agent-", dir=place))
        (directory / _ROW).write_bytes(_row(episode))
        if self._agent.setup is not None:
            await self._program(self._agent.setup, episode, "setup")

    async def run(self, episode: AgentEpisode) -> AgentResult | None:
        """Run the agent's program.

        Raises:
            AgentFailed: It failed.
            InvalidResult: It left no result, and no other program scores it.
        """
        assert self._agent.command is not None
        output = await self._program(self._agent.command, episode, "command")
        return _result(episode, output, "command") if self._agent.score is None else None

    async def score(self, episode: AgentEpisode, result: AgentResult | None) -> AgentResult:
        """Run the program that scores.

        Raises:
            AgentFailed: It failed.
            InvalidResult: It left no result.
        """
        if self._agent.score is None:
            assert result is not None
            return result
        # A result that the agent itself has left is not the score's.
        (episode.state["directory"] / _RESULT).unlink(missing_ok=True)
        return _result(episode, await self._program(self._agent.score, episode, "score"), "score")

    async def close(self, episode: AgentEpisode) -> None:
        """Remove the directory."""
        if (directory := episode.state.get("directory")) is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _program(self, command: Sequence[str], episode: AgentEpisode, phase: str) -> bytes:
        """Run a program to its end; return the end of its standard output."""
        directory: Path = episode.state["directory"]
        # By the run's id its watchdog finds what a killed worker has left.
        inherited = sandbox.variables(
            os.environ, Sandbox(variables=(*self._variables, RUN_ID_VARIABLE)), scratch=str(directory)
        )
        started = asyncio.get_running_loop().subprocess_exec(
            _Program,
            *command,
            cwd=directory,
            env=inherited | variables(episode, directory) | _without_proxy(inherited, episode.base_url),
            start_new_session=True,
        )
        try:
            transport, program = await started
        except OSError as error:
            raise AgentFailed(f"agent.{phase}: {command[0]} could not be started: {error.strerror}") from error
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        try:
            stdin.write(_row(episode))
            stdin.close()
            await program.exited.wait()
        finally:
            # Also what it has started and left behind, which may hold its output open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            await program.exited.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                    await program.closed.wait()
            transport.close()
        code = transport.get_returncode()
        assert code is not None
        if code != 0:
            end = f"exit code {code}" if code > 0 else f"signal {-code}"
            said = program.kept[2].decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise AgentFailed(f"agent.{phase}: {command[0]} ended with {end}" + (f": {said}" if said else ""))
        return program.kept[1]


def variables(episode: AgentEpisode, directory: Path) -> dict[str, str]:
    """Variables by which programs find the policy, their episode, and the place of their result.

    The names are those that OpenAI's and Anthropic's clients, and programs that are built with them, read.
    """
    return {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_BASE": episode.base_url,
        "OPENAI_API_KEY": episode.token,
        "OPENAI_MODEL": episode.model,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_API_KEY": episode.token,
        "ANTHROPIC_AUTH_TOKEN": episode.token,
        "ANTHROPIC_MODEL": episode.model,
        "KUBEROLL_EPISODE": str(directory / _ROW),
        "KUBEROLL_RESULT": str(directory / _RESULT),
        "KUBEROLL_MODEL": episode.model,
    }


def _without_proxy(inherited: Mapping[str, str], url: str) -> dict[str, str]:
    """Variables by which a proxy of the job's own is not used for the policy."""
    known = inherited.get("NO_PROXY") or inherited.get("no_proxy")
    hosts = ",".join(filter(None, (known, urlsplit(url).hostname)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _row(episode: AgentEpisode) -> bytes:
    return orjson.dumps(
        {
            "id": episode.id,
            "messages": list(episode.messages),
            "metadata": episode.metadata,
            "tools": episode.tools,
            "config": episode.config,
            "seed": episode.seed,
            "model": episode.model,
        }
    )


def _result(episode: AgentEpisode, output: bytes, phase: str) -> AgentResult:
    """The result in the program's file, or in the last line of its output."""
    path: Path = episode.state["directory"] / _RESULT
    source = f"agent.{phase}: {_RESULT}"
    try:
        text = path.read_bytes()
    except OSError:
        source = f"agent.{phase}: the last line of its output"
        lines = output.split(b"\n")
        text = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        return result_from_json(orjson.loads(text), source)
    except orjson.JSONDecodeError as error:
        raise InvalidResult(
            f'{source} is no JSON; write the reward, or {{"reward": …}}, to the file that KUBEROLL_RESULT names, or '
            "as the last line of the output"
        ) from error


class _Program(asyncio.SubprocessProtocol):
    """A program that runs: asyncio's own waits for its end would also wait for all who hold its output open.

    Attributes:
        kept: The last bytes of its standard output and its standard error, by descriptor.
        exited: Set when it has ended.
        closed: Set when its output has ended, too.
    """

    def __init__(self) -> None:
        self.kept = {1: b"", 2: b""}
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd] = (self.kept[fd] + data)[-_OUTPUT_BYTES:]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it was closed is of no interest
        self.closed.set()
