"""Tools of MCP servers, in episodes that another environment scores."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

from pydantic import Field, JsonValue, model_validator

from kuberoll_workers.adapters.connected import ConnectedEnvironment
from kuberoll_workers.adapters.http import CONNECT_SECONDS, Disconnected, Unreachable, patiently
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentReturn,
    Episode,
    EpisodeStart,
    Metadata,
    Recovery,
)
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment, create

_EPISODE = "mcp_episode"
_CONNECTION_CLOSED = -32000

# The SDK's, for clients that it makes itself: of a connection and a request, and of what a server streams.
_SECONDS = 30.0
_SECONDS_OF_A_STREAM = 300.0


class McpServer(EnvironmentConfig):
    """A server: a command that is started for each episode, or an address."""

    command: str | None = Field(default=None, min_length=1, max_length=4096, description="Program, for stdio.")
    args: list[str] = Field(default_factory=list, max_length=1024, description="Its arguments.")
    env: dict[str, str] = Field(default_factory=dict, description="Its variables, beside a few of this process.")
    cwd: str | None = Field(default=None, max_length=4096, description="Its working directory.")
    url: str | None = Field(default=None, pattern=r"^https?://", max_length=2048, description="Address, for HTTP.")
    headers: dict[str, str] = Field(default_factory=dict, description="Headers of its requests.")

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("set exactly one of command (stdio) and url (HTTP)")
        return self


class Scorer(EnvironmentConfig):
    """The environment that scores a response without tool calls; it has no episodes of its own."""

    type: str | None = Field(default=None, max_length=256, description="A built-in.")
    entrypoint: str | None = Field(default=None, max_length=512, description="A class, package.module:Class.")
    config: dict[str, JsonValue] = Field(default_factory=dict, description="Argument of its constructor.")


class McpConfig(EnvironmentConfig):
    """Servers whose tools the policy may call, and what scores its answer."""

    servers: dict[str, McpServer] = Field(min_length=1, max_length=64, description="Servers by name.")
    scorer: Scorer = Field(description="The environment that scores a response without tool calls.")
    connect_seconds: float = Field(
        default=CONNECT_SECONDS,
        ge=0,
        le=3600,
        description="Seconds for which a server that refuses connections, as while it starts again, is tried again.",
    )


class McpEnvironment(ConnectedEnvironment["_Sessions"]):
    """The policy calls the tools of MCP servers; a response without calls is a step of the scorer.

    Episode state: that of the scorer, and `mcp_episode`.
    """

    library: ClassVar[Library] = Library("mcp", extra="mcp", distribution="mcp")
    # What a tool has done cannot be undone, and need not happen twice alike.
    recovery: ClassVar[Recovery] = "restart"
    declares_tools: ClassVar[bool] = True
    row_metadata: ClassVar[Mapping[str, str]] = {"ground_truth": "and further fields: those of the scorer"}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, the SDK is not installed, or the scorer cannot be used.
        """
        super().__init__()
        self._config = parse_config(McpConfig, config)
        self._client = self.library.module().Client
        scorer = self._config.scorer
        self._scorer = create(PlainSpec("scorer", scorer.type, scorer.entrypoint, copy.deepcopy(scorer.config)))
        if Hooks.of(self._scorer).episodic:
            raise UnusableEnvironment("config.scorer: it has episodes of its own; only one with `step` alone can score")

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`; the scorer's."""
        check = getattr(self._scorer, "check_row", None)
        if check is not None:
            check(metadata)

    async def _begin(self, episode: Episode) -> EpisodeStart:
        """Begin sessions with all servers, whose tools are those of the episode.

        Raises:
            ServerError: A server cannot be reached.
            ValueError: Two servers have tools of the same name.
        """

        async def opened() -> list[dict[str, Any]]:
            await self._free(episode.id)
            sessions = self._connections[episode.id] = _Sessions(self._client, self._config.servers)
            return await self._loop.run(sessions.open())

        tools = await patiently(opened, self._config.connect_seconds)
        return EpisodeStart(metadata={**(episode.metadata or {}), _EPISODE: episode.id}, tools=tools)

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Call the tools that each response calls, or score it.

        Raises:
            UnusableRow: The scorer refuses the row.
            ServerError: A session is lost.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        turns = await asyncio.gather(*(self._turn(log, state or {}) for log, state in pairs))
        observations, states, stops, rewards, ends = zip(*turns, strict=True)
        return EnvironmentReturn(list(observations), list(states), list(stops), list(rewards), list(ends))

    async def _turn(self, log: list[ChatMessage], metadata: dict[str, Any]) -> tuple[Any, ...]:
        calls, unreadable = log[-1].get("tool_calls") or (), log[-1].get("invalid_tool_calls") or ()
        if not calls and not unreadable:
            return await asyncio.to_thread(self._score, log, metadata)
        sessions = self._connections[metadata[_EPISODE]]
        answers = []
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            content = await self._loop.run(sessions.call(name, arguments))
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        for call in unreadable:
            content = f"Error: this call cannot be read: {call['error']}"
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return answers, metadata, None, 0.0, False

    def _score(self, log: list[ChatMessage], metadata: dict[str, Any]) -> tuple[Any, ...]:
        state = {name: value for name, value in metadata.items() if name != _EPISODE}
        returned = self._scorer.step([log], [state])
        new = returned.metadata[0] if returned.metadata is not None else None
        stops = returned.next_stop_strings[0] if returned.next_stop_strings is not None else None
        kept = {**(new if new is not None else state), _EPISODE: metadata[_EPISODE]}
        return returned.observations[0], kept, stops, returned.rewards[0], returned.terminateds[0]

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The scorer's metrics."""
        return self._scorer.global_post_process_and_metrics(batch)


class _Sessions:
    """The sessions of an episode, one with each server.

    One task opens and closes them: the SDK's clients must be left in the task that has entered them.
    """

    def __init__(self, client: Any, servers: Mapping[str, McpServer]) -> None:
        self._make = client
        self._servers = servers
        self._clients: dict[str, Any] = {}
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> list[dict[str, Any]]:
        """Begin the sessions.

        Returns:
            The tools of all servers, in the form of OpenAI's chat API.
        """
        ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))
        return await ready

    async def _hold(self, ready: asyncio.Future[list[dict[str, Any]]]) -> None:
        server = ""
        try:
            async with AsyncExitStack() as stack:
                tools: list[dict[str, Any]] = []
                for server, spec in self._servers.items():
                    client = await stack.enter_async_context(self._make(await _transport(spec, stack)))
                    tools += [self._tool(server, client, tool) for tool in await _listed(client)]
                if not ready.cancelled():
                    ready.set_result(tools)
                    await self._over.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_failure(server, _first(error)))

    def _tool(self, server: str, client: Any, tool: Any) -> dict[str, Any]:
        if tool.name in self._clients:
            raise ValueError(f"config.servers.{server}: another server has a tool {tool.name!r}, too")
        self._clients[tool.name] = client
        described = {} if tool.description is None else {"description": tool.description}
        return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Text of a tool's answer, also of its error.

        Raises:
            ServerError: The session is lost.
        """
        from mcp import MCPError

        client = self._clients.get(name)
        if client is None:
            return f"Error: there is no tool {name!r}; the tools are {', '.join(self._clients)}"
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED or not await _answers(client):
                raise Disconnected(f"the session of the MCP tool {name} is lost: {error.message}") from error
            return f"Error: {error.message}"
        return "\n".join(map(_text, result.content))

    async def close(self) -> None:
        """End the sessions, and the servers that were started for them."""
        self._over.set()
        if self._task is not None:
            await self._task


async def _transport(spec: McpServer, stack: AsyncExitStack) -> Any:
    from mcp import StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if spec.command is not None:
        # The SDK passes few variables on. By this one the run's watchdog finds a server that outlives its episodes.
        run = {RUN_ID_VARIABLE: os.environ[RUN_ID_VARIABLE]} if RUN_ID_VARIABLE in os.environ else {}
        return StdioServerParameters(command=spec.command, args=spec.args, env={**run, **spec.env}, cwd=spec.cwd)
    import httpx2

    timeout = httpx2.Timeout(_SECONDS, read=_SECONDS_OF_A_STREAM)
    client = httpx2.AsyncClient(headers=spec.headers, timeout=timeout, verify=_trust())
    return streamable_http_client(str(spec.url), http_client=await stack.enter_async_context(client))


@functools.cache
def _trust() -> Any:
    """The certificates of this machine: a session that read them for itself took longer for it than for all else."""
    import httpx2

    return httpx2.create_ssl_context()


async def _listed(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found


async def _answers(client: Any) -> bool:
    """True if a session is alive: a server that was started again answers any request of an old one with an error."""
    from mcp import MCPError

    try:
        await client.list_tools()
    except MCPError:
        return False
    return True


def _failure(server: str, cause: BaseException) -> Exception:
    import httpx2

    if isinstance(cause, ValueError):
        return cause
    kind = Unreachable if isinstance(cause, httpx2.ConnectError) else Disconnected
    return kind(f"MCP server {server}: {cause}")


def _first(error: BaseException) -> BaseException:
    """The first cause in groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _text(content: Any) -> str:
    return content.text if content.type == "text" else f"[{content.type}]"
