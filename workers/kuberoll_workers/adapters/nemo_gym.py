"""Resources servers of NeMo Gym, over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.adapters.episodes import reward_metrics
from kuberoll_workers.adapters.http import CONNECT_SECONDS, Answer, ServerError, patiently, post
from kuberoll_workers.adapters.nemo_gym_steps import SteppedEpisodes
from kuberoll_workers.adapters.presence import Presence
from kuberoll_workers.data.response_items import input_items, output_items, response_of, tool_items
from kuberoll_workers.data.tool_calls import in_order_of_calls
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    Metadata,
    Recovery,
    UnusableRow,
)

_STATE = "nemo_gym"
_TOOL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")
# Endpoints of the server itself, which the policy must not call.
_OWN = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp", "openapi.json", "docs", "redoc", "stats"})
_UNPROCESSABLE = 422
_NOT_FOUND = 404
_BEGINNINGS = {"simple_agent": "seed_session", "gymnasium_agent": "reset"}


class NemoGymConfig(EnvironmentConfig):
    """A resources server."""

    url: str = Field(
        pattern=r"^https?://", max_length=2048, description="Address of the server, such as http://gym:8000."
    )
    agent: Literal["simple_agent", "gymnasium_agent"] = Field(
        default="simple_agent",
        description="NeMo Gym's agent in whose place the loop is: simple_agent for servers with /seed_session, tools "
        "and /verify; gymnasium_agent for those with /reset and /step.",
    )
    recovery: Literal["restart", "metadata"] = Field(
        default="restart",
        description="After a failed step, or when the server was gone: restart begins the trajectory again, in a new "
        "session; metadata repeats the step in the same session, for servers that only verify, or whose sessions "
        "outlive them and whose tools may be called twice.",
    )
    connect_seconds: float = Field(
        default=CONNECT_SECONDS,
        ge=0,
        le=3600,
        description="Seconds for which a server that refuses connections, as while it starts again, is tried again.",
    )
    parallel: int = Field(default=64, ge=1, le=4096, description="Maximum number of steps at the same time.")


class NemoGymEnvironment(EnvironmentInterface):
    """A response without tool calls is verified, and ends the episode with the server's reward.

    Tool calls are requests to the endpoints of their names, in the episode's session; their answers are the
    observation. The job's last turn is verified, whatever it has. A server with `/reset` and `/step` does all this
    itself: see `SteppedEpisodes`.

    A server's sessions end with it, but those of NeMo Gym answer for a session that they have lost as for an empty one.
    So the end of the server is watched for, and the episodes of its sessions fail.

    Episode state: the row's fields, and `nemo_gym`: `episode`, `cookies` of the session, `prompt`, the number of the
    prompt's messages, `tools`, the names of the row's, `turns_left`, and at the end `verification`, the fields that
    the server has added.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {"expected_answer": "and further fields: those of the server's rows"}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid.
        """
        self._config = parse_config(NemoGymConfig, config)
        self._url = self._config.url.rstrip("/")
        self.parallel_steps = self._config.parallel
        self._loop = BackgroundLoop()
        self._presence = Presence(self._url, self._loop) if self._config.recovery == "restart" else None
        self._began: dict[str, int] = {}
        self._stepped = SteppedEpisodes(self._checked_post) if self._config.agent == "gymnasium_agent" else None

    @property
    def recovery(self) -> Recovery:  # type: ignore[override]
        """As the config says."""
        return self._config.recovery

    async def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:  # type: ignore[override]
        """Begin a session for each episode.

        Raises:
            UnusableRow: The server refuses the row's fields.
            ServerError: There is no session.
        """
        return list(await asyncio.gather(*map(self._begin, episodes)))

    async def _begin(self, episode: Episode) -> EpisodeStart:
        begin = self._seed if self._stepped is None else self._stepped.begin
        if self._presence is not None:
            self._began[episode.id] = await self._presence.watch(self._config.connect_seconds)
        start = await begin(episode)
        self._check_session(episode.id)
        return start

    def _check_session(self, name: str) -> None:
        """
        Raises:
            ServerError: The server has ended since the episode's session began.
        """
        if self._presence is not None and self._began.get(name, self._presence.ends) != self._presence.ends:
            raise ServerError(f"{self._url}: the server was gone, and with it the session of the episode {name}")

    async def _seed(self, episode: Episode) -> EpisodeStart:
        row = dict(episode.metadata or {})
        request = {**row, **_params(episode.messages)}
        names = None
        if episode.tools is not None:
            request["responses_create_params"]["tools"] = tool_items(episode.tools)
            names = [tool["function"]["name"] for tool in episode.tools]
        answer = await self._checked_post("seed_session", request, {})
        state = {
            "episode": episode.id,
            "cookies": answer.cookies,
            "prompt": len(episode.messages),
            "tools": names,
            "turns_left": episode.max_turns,
        }
        return EpisodeStart(metadata={**row, _STATE: state})

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Call the tools that each response calls, or verify it.

        Raises:
            UnusableRow: The server refuses a row's fields.
            ServerError: It cannot be reached, or failed.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        turns = await asyncio.gather(*(self._checked_turn(log, state or {}) for log, state in pairs))
        observations, states, rewards, ends = zip(*turns, strict=True)
        return EnvironmentReturn(list(observations), list(states), None, list(rewards), list(ends))

    async def _checked_turn(
        self, log: Sequence[ChatMessage], metadata: Mapping[str, Any]
    ) -> tuple[Any, Any, float, bool]:
        turn, name = self._turn if self._stepped is None else self._stepped.turn, metadata[_STATE]["episode"]
        self._check_session(name)
        result = await turn(log, metadata)
        # What was asked meanwhile may have been answered by the server that follows.
        self._check_session(name)
        return result

    async def _turn(self, log: Sequence[ChatMessage], metadata: Mapping[str, Any]) -> tuple[Any, Any, float, bool]:
        state = metadata[_STATE]
        cookies, answers = state["cookies"], []
        for call in log[-1].get("tool_calls") or ():
            content, cookies = await self._call(call, state["tools"], cookies)
            name = call["function"]["name"]
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        for call in log[-1].get("invalid_tool_calls") or ():
            content = orjson.dumps({"error": f"Invalid tool call: {call['error']}"}).decode()
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        answers = in_order_of_calls(log[-1], answers)
        state = {**state, "cookies": cookies, "turns_left": state["turns_left"] - 1}
        observation: Any = answers or {"role": "environment", "content": ""}
        if answers and state["turns_left"] > 0:
            return observation, {**metadata, _STATE: state}, 0.0, False
        reward, verification = await self._verify([*log, *answers], metadata, state)
        return observation, {**metadata, _STATE: {**state, "verification": verification}}, reward, True

    async def _call(
        self, call: Mapping[str, Any], known: Sequence[str] | None, cookies: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """The text of a tool's answer, also of a refusal, and the session's cookies."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in _OWN or not _TOOL.fullmatch(name) or (known is not None and name not in known):
            return orjson.dumps({"error": f"there is no tool {name!r}"}).decode(), cookies
        answer = await self._post(name, orjson.loads(arguments or "{}"), cookies)
        return answer.text, answer.cookies

    async def _verify(
        self, log: Sequence[ChatMessage], metadata: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        row = {name: value for name, value in metadata.items() if name != _STATE}
        prompt = state["prompt"]
        request = {**row, **_params(log[:prompt]), "response": response_of(output_items(log[prompt:]))}
        answer = await self._checked_post("verify", request, state["cookies"])
        result = answer.json()
        reward = result.get("reward") if isinstance(result, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise answer.error()
        added = {name: value for name, value in result.items() if name not in request and name != "reward"}
        return float(reward), added

    async def _post(self, name: str, value: Any, cookies: Mapping[str, str]) -> Answer:
        return await patiently(lambda: post(f"{self._url}/{name}", value, cookies), self._config.connect_seconds)

    async def _checked_post(self, name: str, value: Any, cookies: Mapping[str, str]) -> Answer:
        """
        Raises:
            UnusableRow: The server refuses fields of the row.
            ServerError: It failed, or is one for another agent.
        """
        answer = await self._post(name, value, cookies)
        if answer.status == _NOT_FOUND and name == _BEGINNINGS[self._config.agent]:
            (other,) = _BEGINNINGS.keys() - {self._config.agent}
            raise ServerError(f"{answer.error()}; for a server with /{_BEGINNINGS[other]}, set config.agent: {other}")
        _check(answer)
        return answer

    async def close(self, episodes: list[EpisodeEnd]) -> None:  # type: ignore[override]
        """End the episodes at a server that can be told so; others keep their sessions until they end."""
        for episode in episodes:
            self._began.pop(episode.id, None)
        if self._stepped is not None:
            await asyncio.gather(*map(self._stepped.close, episodes))

    async def shutdown(self) -> None:  # type: ignore[override]
        """Close the connection by which the server's end is noticed."""
        if self._presence is not None:
            await self._presence.stop()
        self._loop.stop()

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_reward` and `mean_turns`."""
        return batch, reward_metrics(batch)


def _params(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return {"responses_create_params": {"input": input_items(messages)}}


def _check(answer: Answer) -> None:
    """
    Raises:
        UnusableRow: The server refuses fields of the row.
        ServerError: It failed.
    """
    if answer.status == _UNPROCESSABLE:
        details = answer.json().get("detail")
        fields = [_field(detail) for detail in details] if isinstance(details, list) else []
        if any(fields):
            raise UnusableRow("; ".join(filter(None, fields)))
    if answer.status >= 400:
        raise answer.error()


def _field(detail: Any) -> str | None:
    """What FastAPI says about a field of the row; None for a field that is not the row's."""
    place = [str(part) for part in detail.get("loc", ())] if isinstance(detail, dict) else []
    if len(place) < 2 or place[1] in ("response", "responses_create_params"):
        return None
    return f"metadata.{'.'.join(place[1:])}: {detail.get('msg')}"
