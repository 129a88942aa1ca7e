"""Environments of OpenEnv, over the WebSocket of their servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import aiohttp
from pydantic import Field, JsonValue

from kuberoll_workers.adapters.connected import ConnectedEnvironment
from kuberoll_workers.adapters.episodes import reward_metrics, seed_of, seeded_rows
from kuberoll_workers.adapters.functions import function_of
from kuberoll_workers.adapters.http import CONNECT_SECONDS, Disconnected, ServerError, failed, patiently, reason_of
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, first_tagged, quoted, reply_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentReturn,
    Episode,
    EpisodeStart,
    Metadata,
    Recovery,
    UnusableRow,
)
from kuberoll_workers.network.connections import tcp_connector

_EPISODE = "episode"
_TAG = "action"
_STOP_STRINGS = (f"</{_TAG}>",)
_CONNECT_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_MAX_MESSAGE = 64 << 20
_VALIDATION_ERROR, _CAPACITY_REACHED = "VALIDATION_ERROR", "CAPACITY_REACHED"


class OpenEnvConfig(EnvironmentConfig):
    """A server of OpenEnv, and the text of its observations and actions."""

    url: str = Field(
        pattern=r"^https?://", max_length=2048, description="Address of the server, such as http://echo:8000."
    )
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments of the environment's reset, besides seed and episode_id."
    )
    action: str | None = Field(
        default=None,
        max_length=512,
        description="The action's field that the response is; or a function from text to an action, "
        "package.module:function, which raises ValueError for what is no action; absent: a JSON object in "
        "<action>…</action>.",
    )
    observation: str | None = Field(
        default=None,
        max_length=512,
        description="The observation's field that is shown; or a function from the observation to text, "
        "package.module:function; absent: the observation as JSON.",
    )
    prompt: str | None = Field(
        default=None, max_length=65536, description="System message of generated rows; absent: how to write actions."
    )
    unreadable_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=1e6,
        description="Reward of a turn without a valid action; the environment takes no step.",
    )
    recovery: Literal["restart", "replay"] = Field(
        default="restart",
        description="Of an episode whose connection is lost: restart begins the trajectory again; replay repeats its "
        "actions in a new session, for environments that their seed and actions determine.",
    )
    connect_seconds: float = Field(
        default=CONNECT_SECONDS,
        ge=0,
        le=3600,
        description="Seconds for which a server that refuses connections, as while it starts again, is tried again.",
    )


class InvalidAction(ValueError):
    """The server says that an action does not have the environment's form."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A session: the server has one environment for each connection."""

    url: str
    session: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse

    @classmethod
    async def open(cls, url: str) -> _Connection:
        """
        Raises:
            Unreachable: There is no connection.
            ServerError: The server has refused it.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        session = aiohttp.ClientSession(
            connector=tcp_connector(limit=1), cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        )
        try:
            return cls(url, session, await session.ws_connect(url, max_msg_size=_MAX_MESSAGE))
        except (aiohttp.ClientError, OSError) as error:
            await session.close()
            raise failed(url, error) from error
        except BaseException:
            await session.close()
            raise

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the observation.

        Raises:
            InvalidAction: The action does not have the environment's form.
            ServerError: The environment failed, or the connection is lost.
        """
        try:
            await self.socket.send_json({"type": kind, "data": data})
            message = await self.socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise Disconnected(f"{self.url}: {reason_of(error)}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Disconnected(f"{self.url}: the server closed the connection")
        answer = json.loads(message.data)
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "observation":
            return found
        code = found.get("code")
        if code == _VALIDATION_ERROR and kind == "step":
            raise InvalidAction("; ".join(map(_detail, found.get("errors") or ())) or str(found.get("message")))
        if code == _CAPACITY_REACHED:
            raise ServerError(
                f"{self.url}: {found.get('message')}: raise max_concurrent_envs of the server's create_app, or lower "
                "spec.rollout.concurrency"
            )
        raise ServerError(f"{self.url}: {kind}: {code}: {found.get('message')}")

    async def close(self) -> None:
        """End the session, and wait until the server has freed it."""
        try:
            await self.socket.send_json({"type": "close"})
            async with asyncio.timeout(_CLOSE_SECONDS):
                # An answer that nobody waits for may be on its way.
                while (await self.socket.receive()).type is aiohttp.WSMsgType.TEXT:
                    continue
            await self.socket.close()
        except (aiohttp.ClientError, OSError):
            # The connection is lost, and with it the session. A TimeoutError is an OSError, too.
            pass
        finally:
            await self.session.close()


class OpenEnvEnvironment(ConnectedEnvironment[_Connection]):
    """Each response is an action, and the server's observation the answer; rewards and ends are the environment's.

    Episode state: `seed` and `reset` if the row names them, `episode`, and `steps`.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "seed": "0 to 2³¹−1; absent: the episode's seed",
        "reset": "further arguments of the environment's reset, if it has any",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid.
        """
        super().__init__()
        self._config = parse_config(OpenEnvConfig, config)
        self._url = f"{self._config.url.rstrip('/')}/ws"
        self._read = self._action_function()
        self._show = self._observation_function()
        self._stops = None if self._config.action is not None else _STOP_STRINGS

    @property
    def recovery(self) -> Recovery:  # type: ignore[override]
        """As the config says."""
        return self._config.recovery

    def _action_function(self) -> Callable[[str], Any]:
        name = self._config.action
        if name is None:
            return _json_action
        return function_of(name, "config.action") if ":" in name else lambda text: {name: text}

    def _observation_function(self) -> Callable[[Mapping[str, Any]], Any]:
        name = self._config.observation
        if name is None:
            return lambda observation: json.dumps(_without_metadata(observation), ensure_ascii=False)
        return function_of(name, "config.observation") if ":" in name else lambda observation: _field(observation, name)

    async def _begin(self, episode: Episode) -> EpisodeStart:
        """Connect for an episode, and reset its environment.

        Raises:
            UnusableRow: The row's metadata is wrong.
            ServerError: The server cannot be reached, or failed.
        """
        row = dict(episode.metadata or {})
        given = row.get("reset", {})
        if not isinstance(given, dict):
            raise UnusableRow(f"metadata.reset: found {given!r}; it must be an object, or absent")
        seed = seed_of(episode)
        await self._free(episode.id)
        connection = self._connections[episode.id] = await patiently(
            lambda: self._loop.run(_Connection.open(self._url)), self._config.connect_seconds
        )
        arguments = {**self._config.parameters, **given, "seed": seed, "episode_id": episode.id}
        found = await self._loop.run(connection.ask("reset", arguments))
        return EpisodeStart(
            messages=[{"role": "user", "content": f"{self._text(found)}\n"}],
            metadata={**row, _EPISODE: episode.id, "steps": 0},
            stop_strings=self._stops,
        )

    def _text(self, found: Mapping[str, Any]) -> str:
        return str(self._show(found.get("observation") or {}))

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Take a step in each episode.

        Raises:
            ServerError: The environment failed, or the connection is lost.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        return batch_of(await asyncio.gather(*(self._turn(reply_of(log), state or {}) for log, state in pairs)))

    async def _turn(self, reply: str, state: dict[str, Any]) -> Turn:
        try:
            action = self._read(reply)
            found = await self._loop.run(self._connections[state[_EPISODE]].ask("step", action))
        # That of `action` too: what the policy has written is no action.
        except ValueError as error:
            return Turn(
                f"\nThis is no action: {error}.\n",
                state,
                reward=self._config.unreadable_reward,
                stop_strings=self._stops,
            )
        over = bool(found.get("done"))
        return Turn(
            f"\n{self._text(found)}\n",
            {**state, "steps": state["steps"] + 1},
            reward=float(found.get("reward") or 0.0),
            terminated=over,
            stop_strings=None if over else self._stops,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_reward` and `mean_turns`."""
        return batch, reward_metrics(batch)

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with seeds; see `seeded_rows`."""
        return seeded_rows(self._prompt(), count, seed)

    def _prompt(self) -> str:
        if self._config.prompt is not None:
            return self._config.prompt
        if self._config.action is not None:
            return "Each turn you see an observation; write your action.\n"
        return f"Each turn you see an observation; write your action as a JSON object, <{_TAG}>{{…}}</{_TAG}>.\n"


def _json_action(text: str) -> dict[str, Any]:
    tagged = first_tagged(text, [_TAG])
    if tagged is None:
        raise ValueError(f"write one, as in <{_TAG}>{{…}}</{_TAG}>")
    try:
        found = json.loads(tagged.body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{quoted(tagged.body)} is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{quoted(tagged.body)} is not a JSON object")
    return found


def _without_metadata(observation: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in observation.items() if name != "metadata"}


def _field(observation: Mapping[str, Any], name: str) -> Any:
    if name not in observation:
        raise ServerError(f"config.observation: the observation has no field {name!r}; it has {', '.join(observation)}")
    return observation[name]


def _detail(error: Any) -> str:
    place = ".".join(map(str, error.get("loc", ()))) if isinstance(error, Mapping) else ""
    return f"{place}: {error.get('msg')}" if place else str(error)
