"""Environments of verifiers 0.1: its MultiTurnEnv, and those made of it, with and without tools."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import sys
import types
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.adapters.episodes import reward_metrics
from kuberoll_workers.adapters.functions import function_of
from kuberoll_workers.adapters.verifiers_groups import kept_state, lost_entries, restored_entries, state_class
from kuberoll_workers.data.messages import ANSWER_FIELDS
from kuberoll_workers.data.thoughts import answer_of
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
    Recovery,
)
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.environments.tools import unreadable_answer

_EPISODE, _STATE = "episode", "verifiers_state"
_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")


class VerifiersConfig(EnvironmentConfig):
    """An environment of verifiers."""

    id: str = Field(
        min_length=1,
        max_length=512,
        description="The environment's package, as load_environment takes it; or a function or class that makes the "
        "environment, package.module:name.",
    )
    arguments: dict[str, JsonValue] = Field(default_factory=dict, description="Arguments of the environment.")
    split: Literal["train", "eval"] = Field(default="train", description="Dataset of generated rows.")
    recovery: Literal["restart", "replay"] = Field(
        default="restart",
        description="Of an episode whose process is lost: restart begins the trajectory again; replay repeats its "
        "responses, for environments that answer the same responses alike.",
    )


class ScoringFailed(RuntimeError):
    """A reward function raised an exception, which verifiers logs and counts as a reward of 0."""


class _Game:
    """An episode.

    Attributes:
        state: That of verifiers.
        prompt: Messages before the next response.
        tools: Those of the policy's prompt.
        turns_left: Turns until the trajectory ends.
    """

    __slots__ = ("prompt", "state", "tools", "turns_left")

    def __init__(self, state: Any, turns_left: int) -> None:
        self.state = state
        self.prompt: list[Any] = []
        self.tools: list[Any] = []
        self.turns_left = turns_left


class VerifiersEnvironment(EnvironmentInterface):
    """The loop is in the place of `rollout`: it generates, and the environment answers, stops and scores.

    The reward is the rubric's, in the turn that ends the episode; the other turns have 0. The job's last turn is scored
    as one that verifiers' own limit of turns ends. A rubric with reward functions of groups scores prompt groups, all
    of it. The environment's code runs in a thread of its own.

    Episode state: the row's fields, `episode`, and at the end `metrics` of the rubric, `stop_condition`, and for group
    scores `verifiers_state`, the state of the rollout.
    """

    library: ClassVar[Library] = Library("verifiers", extra="verifiers", distribution="verifiers")
    row_metadata: ClassVar[Mapping[str, str]] = {
        "answer": "and further columns of the environment's dataset: task, info, example_id"
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, verifiers is not installed, or the environment is of a kind that
                cannot be played.
        """
        self._config = parse_config(VerifiersConfig, config)
        self._library = self.library.module()
        self._responses = _Responses()
        self._loop = BackgroundLoop()
        self._games: dict[str, _Game] = {}
        self._environment = self._load()
        self._restored = state_class(self.library.module("types").State)
        self._scores_groups = self._environment.score_rollouts and _scores_groups(self._environment.rubric)
        if not self._scores_groups:
            self.score_group = None  # type: ignore[assignment, method-assign]
        _collect_errors()

    @property
    def recovery(self) -> Recovery:  # type: ignore[override]
        """As the config says."""
        return self._config.recovery

    def _load(self) -> Any:
        name, arguments = self._config.id, copy.deepcopy(self._config.arguments)
        if not hasattr(self._library, "MultiTurnEnv"):
            raise UnusableEnvironment(
                f"verifiers {self.library.version} has no MultiTurnEnv: the adapter is for its 0.1 line, "
                f"{self.library.command}"
            )
        with _without_signals(self.library.module("envs.environment")):
            if ":" in name:
                made = function_of(name, "config.id")(**arguments)
            else:
                try:
                    made = self._library.load_environment(name, **arguments)
                except ValueError as error:
                    raise UnusableEnvironment(f"config.id: {error}") from error
        if not isinstance(made, self._library.MultiTurnEnv):
            raise UnusableEnvironment(f"config.id: {name} is {type(made).__name__}, not a MultiTurnEnv of verifiers")
        if made.message_type != "chat":
            raise UnusableEnvironment(f"config.id: {name} wants completions; only chats can be played")
        return made

    async def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:  # type: ignore[override]
        """Set each episode's state up."""
        return list(await asyncio.gather(*(self._loop.run(self._begin(episode)) for episode in episodes)))

    async def _begin(self, episode: Episode) -> EpisodeStart:
        await self._free(episode.id)
        row = dict(episode.metadata or {})
        given = [dict(message) for message in episode.messages]
        example = {**copy.deepcopy(row), "prompt": copy.deepcopy(given)}
        # No client: environments that generate by themselves cannot be played.
        state = await self._environment.init_state(example, None, "policy")
        game = self._games[episode.id] = _Game(state, episode.max_turns)
        game.state = await self._environment.setup_state(state) or state
        game.prompt = list(await self._environment.get_prompt_messages(game.state))
        if [dict(message) for message in game.prompt[: len(given)]] != given:
            raise ValueError("the environment changed the row's prompt; it can only add messages")
        game.tools = copy.deepcopy(list(game.state["oai_tools"] or ()))
        return EpisodeStart(
            messages=[{"role": str(one["role"]), "content": _text(one)} for one in game.prompt[len(given) :]],
            metadata={**row, _EPISODE: episode.id},
            tools=game.tools or None,
        )

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Answer each response, or score its episode.

        Raises:
            ScoringFailed: A reward function raised an exception.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        turns = (self._loop.run(self._turn(log[-1], state or {})) for log, state in pairs)
        observations, states, rewards, ends = zip(*await asyncio.gather(*turns), strict=True)
        return EnvironmentReturn(list(observations), list(states), None, list(rewards), list(ends))

    async def _turn(self, reply: ChatMessage, metadata: dict[str, Any]) -> tuple[Any, dict[str, Any], float, bool]:
        game, environment = self._games[metadata[_EPISODE]], self._environment
        await environment.add_model_response(game.state, game.prompt, self._responses.make(reply))
        game.turns_left -= 1
        shown: Sequence[Any] = []
        over = await environment.is_completed(game.state) or game.turns_left <= 0
        if not over:
            shown = await self._answer(game, reply)
            over = await environment.is_completed(game.state)
        observation = _observation(shown)
        if not over:
            if game.tools != list(game.state["oai_tools"] or ()):
                raise ValueError("the environment changed its tools in an episode, but they are in its prompt")
            return observation, metadata, 0.0, False
        stop = game.state.get("stop_condition") or "max_turns_reached"
        await environment.render_completion(game.state)
        self._raise(game.state.get("error"))
        if self._scores_groups:
            return observation, {**metadata, "stop_condition": stop, _STATE: kept_state(game.state)}, 0.0, True
        reward, metrics = 0.0, dict[str, float]()
        if environment.score_rollouts:
            await _checked(environment.rubric.score_rollout(game.state))
            reward, metrics = _result(game.state)
        return observation, {**metadata, "metrics": metrics, "stop_condition": stop}, reward, True

    async def _answer(self, game: _Game, reply: ChatMessage) -> Sequence[Any]:
        """The environment's messages; none if it ends the episode over a call."""
        said = len(game.prompt) + 1
        before = [*game.prompt, *game.state["trajectory"][-1]["completion"]]
        try:
            game.prompt = list(await self._environment.get_prompt_messages(game.state))
        except self._library.ToolError as error:
            # Of the kinds at which the environment wants to stop.
            game.state["error"] = error
            return []
        final = game.state.get("final_env_response")
        if final is not None:
            return list(final)
        if game.prompt[:said] != before:
            raise ValueError(
                "the environment changed earlier messages, but the policy's tokens stay; it can only add some"
            )
        unreadable = {call["id"]: unreadable_answer(call) for call in reply.get("invalid_tool_calls") or ()}
        game.prompt = [_explained(message, unreadable) for message in game.prompt]
        return game.prompt[said:]

    def _raise(self, error: BaseException | None) -> None:
        """Raise an error of the environment; what verifiers blames a call for is the policy's.

        A tool whose service is down is not.
        """
        if error is None:
            return
        cause = error.__cause__
        if not isinstance(error, self._library.ToolError) or isinstance(cause, self._library.InfraError):
            raise error

    async def score_group(self, members: list[GroupMember]) -> Sequence[GroupScore]:  # type: ignore[override]
        """Score a group's rollouts by all of the rubric's functions.

        Those that have no state, because the window ended them, have no score.

        Raises:
            ScoringFailed: A reward function raised an exception.
        """
        return await self._loop.run(self._score_group(members))

    async def _score_group(self, members: Sequence[GroupMember]) -> list[GroupScore]:
        found = [(member.metadata or {}).get(_STATE) for member in members]
        states = [None if kept is None else await self._restore(kept) for kept in found]
        if ended := [state for state in states if state is not None]:
            await _checked(self._environment.rubric.score_group(ended))
        return [
            GroupScore(reward=0.0) if state is None else _group_score(member, state)
            for member, state in zip(members, states, strict=True)
        ]

    async def _restore(self, kept: Mapping[str, Any]) -> Any:
        entries = restored_entries(kept, self._responses.make)
        new = await self._environment.init_state(copy.deepcopy(entries["input"]), None, "policy")
        lost = lost_entries(kept)
        return self._restored({name: value for name, value in {**new, **entries}.items() if name not in lost}, lost)

    async def close(self, episodes: list[EpisodeEnd]) -> None:  # type: ignore[override]
        """Clean the episodes up."""
        await asyncio.gather(*(self._loop.run(self._free(episode.id)) for episode in episodes))

    async def _free(self, name: str) -> None:
        game = self._games.pop(name, None)
        # Completed ones have cleaned themselves up.
        if game is not None and not game.state["is_completed"]:
            await self._environment._cleanup(game.state)

    async def shutdown(self) -> None:  # type: ignore[override]
        """Clean all episodes up, and tear the environment down."""
        await asyncio.gather(*(self._loop.run(self._free(name)) for name in list(self._games)))
        await self._loop.run(self._environment._teardown())
        self._loop.stop()

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_reward` and `mean_turns`."""
        return batch, reward_metrics(batch)

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The first rows of the environment's dataset in a random order; a longer dataset starts with the shorter one.

        Raises:
            UnusableEnvironment: It has fewer rows.
        """
        environment = self._environment
        found = environment.get_dataset() if self._config.split == "train" else environment.get_eval_dataset()
        if len(found) < count:
            raise UnusableEnvironment(
                f"dataset.source.generator.count: the {self._config.split} dataset of {self._config.id} has only "
                f"{len(found)} rows"
            )
        # Its own argument `seed` would shuffle the environment's dataset itself, each time anew.
        rows = found.shuffle(seed=seed)
        return [_row(rows[index], index) for index in range(count)]


def _scores_groups(rubric: Any) -> bool:
    """True if a rubric, or one that it is a group of, has functions that score groups."""
    return bool(rubric._get_group_reward_funcs()) or any(map(_scores_groups, getattr(rubric, "rubrics", ())))


async def _checked(scoring: Awaitable[None]) -> None:
    """Wait for a rubric.

    Raises:
        ScoringFailed: One of its functions raised an exception, which the rubric has only logged.
    """
    errors: list[_Error] = []
    token = _errors.set(errors)
    try:
        await scoring
    finally:
        _errors.reset(token)
    if errors:
        raise ScoringFailed(errors[0].text) from errors[0].exception


def _result(state: Any) -> tuple[float, dict[str, float]]:
    metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
    return float(state["reward"]), {name: value for name, value in metrics.items() if math.isfinite(value)}


def _group_score(member: GroupMember, state: Any) -> GroupScore:
    reward, metrics = _result(state)
    return GroupScore(reward=reward, metadata={**(member.metadata or {}), "metrics": metrics})


def _observation(shown: Sequence[Any]) -> Any:
    """Messages with answers to calls one by one, others as one text."""
    if not any(message["role"] == "tool" for message in shown):
        return {"role": "environment", "content": "\n".join(map(_text, shown))}
    return [
        {
            "role": message["role"],
            "content": _text(message),
            **{name: message[name] for name in ANSWER_FIELDS if message.get(name) is not None},
        }
        for message in shown
    ]


def _explained(message: Any, unreadable: Mapping[str, Mapping[str, str]]) -> Any:
    """The message; if it answers a call that cannot be read, with what is wrong with it."""
    if message["role"] != "tool" or message.get("tool_call_id") not in unreadable:
        return message
    return {**message, "content": unreadable[message["tool_call_id"]]["content"]}


def _row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    metadata = {name: value for name, value in row.items() if name != "prompt"}
    messages = [
        # A dataset's rows have all of its fields, null where a message has none.
        {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None} | {"content": _text(message)}
        for message in row["prompt"]
    ]
    return {"messages": messages, "metadata": metadata, "idx": index}


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("the environment's message has content that is not text")
    return content


class _Responses:
    """Responses as OpenAI's client returns them, with which verifiers works."""

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletion

        self._type = ChatCompletion

    def make(self, reply: Mapping[str, Any]) -> Any:
        """A response whose message is an assistant's of a chat log."""
        calls = [*(reply.get("tool_calls") or ()), *map(_unreadable, reply.get("invalid_tool_calls") or ())]
        # Its parsers read thoughts that have ended; those that never end are no answer.
        content = reply["content"] if answer_of(reply) else ""
        content = reply.get("text", content) if reply.get("tool_calls") else content
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        return self._type.model_validate(
            {"id": "response", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )


def _unreadable(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call that cannot be read as one whose arguments are not JSON, which environments answer."""
    arguments = f"{call['text']}\n{call['error']}"
    return {"id": call["id"], "type": "function", "function": {"name": "", "arguments": arguments}}


@contextlib.contextmanager
def _without_signals(module: Any) -> Iterator[None]:
    """Let an environment that is made leave the process's signals and its end alone, which are the worker's."""
    before = module.signal, module.atexit
    nothing = types.SimpleNamespace(signal=lambda *_: None, register=lambda *_: None, SIGINT=None, SIGTERM=None)
    module.signal = module.atexit = nothing
    try:
        yield
    finally:
        module.signal, module.atexit = before


class _Error(NamedTuple):
    text: str
    exception: BaseException | None


_errors: ContextVar[list[_Error] | None] = ContextVar("_errors", default=None)


class _ErrorCollector(logging.Handler):
    """Collects the errors that are logged while a rollout is scored."""

    def emit(self, record: logging.LogRecord) -> None:
        errors = _errors.get()
        if errors is not None:
            # The rubric logs where it handles the exception, which may be an outage of what the function calls.
            errors.append(_Error(record.getMessage(), sys.exception()))


_collector = _ErrorCollector(logging.ERROR)


def _collect_errors() -> None:
    # All rubrics log there; adding the same handler again does nothing.
    logging.getLogger("verifiers.rubrics").addHandler(_collector)
