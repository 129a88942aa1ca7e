"""Environments of verifiers 0.1: its MultiTurnEnv and SingleTurnEnv."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.adapters.episodes import reward_metrics
from kuberoll_workers.adapters.functions import function_of
from kuberoll_workers.adapters.libraries import Library
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, reply_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    Metadata,
    Recovery,
)
from kuberoll_workers.environments.registry import UnusableEnvironment

_EPISODE = "episode"


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
        turns_left: Turns until the trajectory ends.
    """

    __slots__ = ("prompt", "state", "turns_left")

    def __init__(self, state: Any, turns_left: int) -> None:
        self.state = state
        self.prompt: list[Any] = []
        self.turns_left = turns_left


class VerifiersEnvironment(EnvironmentInterface):
    """The loop is in the place of `rollout`: it generates, and the environment answers, stops and scores.

    The reward is the rubric's, in the turn that ends the episode; the other turns have 0. The job's last turn is scored
    as one that verifiers' own limit of turns ends. The environment's code runs in a thread of its own.

    Episode state: the row's fields, `episode`, and at the end `metrics` of the rubric and `stop_condition`.
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
        if made.oai_tools:
            raise UnusableEnvironment(f"config.id: {name} has tools, which are not supported")
        if any(rubric._get_group_reward_funcs() for rubric in _rubrics(made.rubric)):
            raise UnusableEnvironment(f"config.id: {name} scores groups of rollouts together, which is not supported")
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
        return EpisodeStart(
            messages=[{"role": str(one["role"]), "content": _text(one)} for one in game.prompt[len(given) :]],
            metadata={**row, _EPISODE: episode.id},
        )

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Answer each response, or score its episode.

        Raises:
            ScoringFailed: A reward function raised an exception.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        turns = (self._loop.run(self._turn(reply_of(log), state or {})) for log, state in pairs)
        return batch_of(await asyncio.gather(*turns))

    async def _turn(self, reply: str, metadata: dict[str, Any]) -> Turn:
        game, environment = self._games[metadata[_EPISODE]], self._environment
        before = len(game.prompt) + 1
        await environment.add_model_response(game.state, game.prompt, self._responses.make(reply))
        game.turns_left -= 1
        shown: Sequence[Any] = []
        over = game.turns_left <= 0
        if not await environment.is_completed(game.state) and not over:
            game.prompt = list(await environment.get_prompt_messages(game.state))
            final = game.state.get("final_env_response")
            shown = game.prompt[before:] if final is None else final
            over = await environment.is_completed(game.state)
        over = over or bool(game.state["is_completed"])
        observation = "\n".join(map(_text, shown))
        if not over:
            return Turn(observation, metadata)
        reward, metrics = await self._score(game.state)
        stop = game.state.get("stop_condition") or "max_turns_reached"
        return Turn(
            observation, {**metadata, "metrics": metrics, "stop_condition": stop}, reward=reward, terminated=True
        )

    async def _score(self, state: Any) -> tuple[float, dict[str, float]]:
        await self._environment.render_completion(state)
        if (error := state.get("error")) is not None:
            raise error
        if not self._environment.score_rollouts:
            return 0.0, {}
        errors: list[str] = []
        token = _errors.set(errors)
        try:
            await self._environment.rubric.score_rollout(state)
        finally:
            _errors.reset(token)
        if errors:
            raise ScoringFailed(errors[0])
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return float(state["reward"]), {name: value for name, value in metrics.items() if math.isfinite(value)}

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


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric and those that it is a group of."""
    return [rubric, *(part for one in getattr(rubric, "rubrics", ()) for part in _rubrics(one))]


def _row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    metadata = {name: value for name, value in row.items() if name != "prompt"}
    messages = [{"role": message["role"], "content": _text(message)} for message in row["prompt"]]
    return {"messages": messages, "metadata": metadata, "idx": index}


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        raise TypeError("the environment's message has content that is not text")
    return content


class _Responses:
    """Responses as OpenAI's client returns them, with which verifiers works."""

    def __init__(self) -> None:
        from openai.types.chat import ChatCompletion

        self._type = ChatCompletion

    def make(self, text: str) -> Any:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return self._type.model_validate(
            {"id": "response", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )


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


_errors: ContextVar[list[str] | None] = ContextVar("_errors", default=None)


class _ErrorCollector(logging.Handler):
    """Collects the errors that are logged while a rollout is scored."""

    def emit(self, record: logging.LogRecord) -> None:
        errors = _errors.get()
        if errors is not None:
            errors.append(record.getMessage())


_collector = _ErrorCollector(logging.ERROR)


def _collect_errors() -> None:
    # All rubrics log there; adding the same handler again does nothing.
    logging.getLogger("verifiers.rubrics").addHandler(_collector)
