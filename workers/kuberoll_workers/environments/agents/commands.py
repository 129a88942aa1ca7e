"""Agents that are programs, each in a directory of its own, of which nothing is left when the next one is started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, cast

import orjson

from kuberoll_api.model.agents import Agent
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE, RUN_SCRATCH_VARIABLE
from kuberoll_workers.environments import process_access
from kuberoll_workers.environments.agents.episode import AgentEpisode, AgentResult, InvalidResult, result_from_json
from kuberoll_workers.environments.agents.proxies import without_proxy
from kuberoll_workers.environments.outcome import StepRaised
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.programs import scratch

_ROW: Final = "episode.json"
_RESULT: Final = "result.json"
_OUTPUT_BYTES: Final = 64 << 10
_RESULT_BYTES: Final = 16 << 20
_SHOWN_CHARACTERS: Final = 2000
# Another process may have been given its output.
_LAST_OUTPUT_SECONDS: Final = 1.0

Phase = Literal["setup", "command", "score"]


class AgentFailed(StepRaised):
    """A program ended with an error."""


class CommandPhases:
    """The phases of an agent whose programs are run one after the other in one directory.

    When a program has ended, so has everything that it started. The program that scores finds the episode, and leaves
    its result, in a directory that is made for it when the others are gone, and that they could never write to.
    """

    def __init__(self, agent: Agent, *, variables: Sequence[str], files: ProcessAccess | None = None) -> None:
        """
        Args:
            variables: Names of variables that the programs inherit in addition to the usual ones.
            files: What the programs may use beside their directory; None: all that this process may.
        """
        self._agent = agent
        self._variables = variables
        self._files = files

    async def setup(self, episode: AgentEpisode) -> None:
        """Make the directory with the episode in it, and run the program that prepares it.

        Raises:
            AgentFailed: The program failed.
        """
        episode.state["directory"] = _directory(_row(episode, self._agent))
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
        if self._agent.score is not None:
            return None
        return _result(episode.state["directory"], output, "command")

    async def score(self, episode: AgentEpisode, result: AgentResult | None) -> AgentResult:
        """Run the program that scores.

        Raises:
            AgentFailed: It failed.
            InvalidResult: It left no result.
        """
        if self._agent.score is None:
            assert result is not None
            return result
        place = episode.state["score"] = _directory(_row(episode))
        return _result(place, await self._program(self._agent.score, episode, "score"), "score")

    async def close(self, episode: AgentEpisode) -> None:
        """Remove the directories."""
        for name in ("directory", "score"):
            if (directory := episode.state.get(name)) is not None:
                await asyncio.to_thread(scratch.remove, str(directory))

    async def _program(self, command: Sequence[str], episode: AgentEpisode, phase: Phase) -> bytes:
        """Run a program to its end, and to that of all that it started; return the end of its standard output."""
        directory: Path = episode.state["directory"]
        place: Path = episode.state["score"] if phase == "score" else directory
        # By the run's id its watchdog finds what a killed worker has left.
        inherited = process_access.variables(
            os.environ, ProcessAccess(variables=(*self._variables, RUN_ID_VARIABLE)), scratch=str(place)
        )
        ours, theirs = socket.socketpair()
        with theirs:
            transport, program = await asyncio.get_running_loop().subprocess_exec(
                _Program,
                *(sys.executable, "-P", "-m", "kuberoll_workers.environments.command_keeper", str(theirs.fileno())),
                env=inherited | variables(episode, place) | without_proxy(inherited, episode.base_url),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, control = await asyncio.open_connection(sock=ours)
        stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
        answer = b""
        try:
            control.write(orjson.dumps(self._request(command, directory, place, phase)) + b"\n")
            stdin.write(_row(episode, None if phase == "score" else self._agent))
            stdin.close()
            answer = await reader.readline()
        finally:
            # The keeper ends all that is left, also after a cancellation.
            control.close()
            await program.exited.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                    await program.closed.wait()
            transport.close()
        name, said = f"agent.{phase}: {command[0]}", program.kept[2].decode(errors="replace")
        if not answer:
            raise AgentFailed(f"{name}: its keeper was killed, perhaps because the machine's memory ran out")
        ended = orjson.loads(answer)
        if "error" in ended:
            raise AgentFailed(f"{name} {ended['error']}")
        if code := os.waitstatus_to_exitcode(ended["status"]):
            raise AgentFailed(f"{name} ended with {f'exit code {code}' if code > 0 else f'signal {-code}'}{_end(said)}")
        return program.kept[1]

    def _request(self, command: Sequence[str], directory: Path, place: Path, phase: Phase) -> dict[str, Any]:
        request: dict[str, Any] = {
            "argv": _beside_manifest(command, directory),
            "directory": str(directory),
            "access": None,
            "scratch": str(place),
        }
        if self._files is not None:
            files, hidden = self._files, [] if self._agent.hidden is None else self._agent.hidden.paths
            request["access"] = asdict(
                ProcessAccess(
                    protected=[*files.protected, *(() if phase == "score" else hidden)],
                    readable=[*files.readable, *(hidden if phase == "score" else ())],
                    writable=[*files.writable, str(directory)],
                    # Other episodes and runs have theirs there.
                    private=[*files.private, str(directory.parent), str(directory.parent.parent)],
                    shared_memory=False,
                )
            )
        return request


def _beside_manifest(command: Sequence[str], directory: Path) -> list[str]:
    """A command in which files beside the manifest have their whole path, unless the episode has one of that name.

    They are where modules of environments are: in the directories of the import path that are not Python's own.
    """
    places = [place for place in map(os.path.abspath, sys.path) if not place.startswith((sys.prefix, sys.base_prefix))]

    def found(word: str) -> str:
        if word.startswith(("/", "-")) or (directory / word).exists():
            return word
        return next((path for place in places if os.path.isfile(path := f"{place}/{word}")), word)  # noqa: PTH113

    return [found(word) if word and "\n" not in word and len(word) < 256 else word for word in command]


def _end(said: str) -> str:
    """The end of what a program wrote to its standard error, its last line first: that has the cause, as a rule."""
    lines = said.strip()[-_SHOWN_CHARACTERS:].splitlines()
    if not lines:
        return ""
    return f": {lines[-1]}" + ("\nits standard error ends with\n" + "\n".join(lines) if lines[1:] else "")


def _directory(row: bytes) -> Path:
    """Make a directory with an episode in it."""
    # In a worker, and not in a process of the environment, nobody else removes it when the worker is killed.
    place = os.environ.get(RUN_SCRATCH_VARIABLE)
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="kuberoll-agent-", dir=place)))
    (directory / _ROW).write_bytes(row)
    return directory


def variables(episode: AgentEpisode, directory: Path) -> dict[str, str]:
    """Variables by which programs find the policy, their episode, and the place of their result."""
    return policy_variables(episode) | {
        "KUBEROLL_EPISODE": str(directory / _ROW),
        "KUBEROLL_RESULT": str(directory / _RESULT),
    }


def policy_variables(episode: AgentEpisode) -> dict[str, str]:
    """Variables by which programs find the policy.

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
        "KUBEROLL_MODEL": episode.model,
    }


def _row(episode: AgentEpisode, agent: Agent | None = None) -> bytes:
    """The episode as JSON; for an agent's own programs without what only its score is given."""
    hidden = [] if agent is None or agent.hidden is None else agent.hidden.metadata
    return orjson.dumps(
        {
            "id": episode.id,
            "messages": list(episode.messages),
            "metadata": {name: value for name, value in episode.metadata.items() if name not in hidden},
            "tools": episode.tools,
            "config": episode.config,
            "seed": episode.seed,
            "model": episode.model,
        }
    )


def _result(directory: Path, output: bytes, phase: Phase) -> AgentResult:
    """The result in the program's file, or in the last line of its output."""
    source = f"agent.{phase}: {_RESULT}"
    text = _content(directory / _RESULT, source)
    if text is None:
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


def _content(path: Path, source: str) -> bytes | None:
    """Content of a file that a program has left, which may be anything; None if there is none."""
    try:
        # A link may lead out of what the program can read, and a pipe would never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidResult(f"{source} cannot be read: {error.strerror}; it must be an ordinary file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidResult(f"{source} cannot be read: it must be an ordinary file")
    with os.fdopen(descriptor, "rb") as file:
        if len(text := file.read(_RESULT_BYTES + 1)) > _RESULT_BYTES:
            raise InvalidResult(f"{source} has more than {_RESULT_BYTES >> 20} MiB")
        return text


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
