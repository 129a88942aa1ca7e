"""Reward model: a served classification model scores the whole chat."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from kuberoll_workers.data.thoughts import answer_of
from kuberoll_workers.environments.builtin.config import parse_config
from kuberoll_workers.environments.builtin.servers import Server, ServerConfig, Url
from kuberoll_workers.environments.builtin.special_tokens import harmless
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, mean
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentInterface, EnvironmentReturn, Metadata
from kuberoll_workers.environments.model_client import ModelClient, ServerFailed, ServerUnavailable

# Roles that the chat templates of reward models know.
_ROLES: Final = ("system", "user", "assistant", "tool")


class RewardModelConfig(ServerConfig):
    """The reward model, and what becomes of its score."""

    url: Url | None = Field(
        default=None, description="URL of the server, with or without /v1: `vllm serve MODEL --runner pooling`."
    )
    thoughts: bool = Field(
        default=False, description="Whether what stands before </think> in responses is shown to it."
    )
    activation: bool = Field(
        default=False, description="Whether the model's activation (sigmoid, softmax) is applied; false: its logit."
    )
    label: int = Field(default=0, ge=0, lt=1 << 16, description="Number of the class whose score counts, from 0.")
    scale: float = Field(default=1.0, ge=-1e6, le=1e6, description="Factor of the score.")
    offset: float = Field(default=0.0, ge=-1e6, le=1e6, description="Added to the score after the factor.")
    minimum: float | None = Field(default=None, description="Lowest reward; absent: none.")
    maximum: float | None = Field(default=None, description="Highest reward; absent: none.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.url is None and self.service is None:
            raise ValueError("url is missing: name a server, or by service one of the job's spec.services")
        if self.minimum is not None and self.maximum is not None and not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        return self

    def reward(self, score: float) -> float:
        """The reward of a score of the model."""
        reward = score * self.scale + self.offset
        if self.minimum is not None:
            reward = max(self.minimum, reward)
        return reward if self.maximum is None else min(self.maximum, reward)


class RewardModelEnvironment(EnvironmentInterface):
    """Single turn: a reward model that a server offers scores prompt and response; the episode ends.

    The chat is rendered by the reward model's own template, without a generation prompt. `metadata.reward_model` of the
    trajectory has its `score`, before scale and bounds. A server that cannot be asked is a failure, never a score.
    """

    unprovable: ClassVar[str | None] = "a reward model decides"
    row_metadata: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(RewardModelConfig, config)
        self._server = Server(self._config)
        # Of coroutine steps, which those that wait are not on a time limit.
        self.parallel_steps = self._config.parallel

    async def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:  # type: ignore[override]
        """Score each chat.

        Raises:
            ServerFailed: The server could not be asked, or its answer has no score of this class.
        """
        async with self._server.opened() as (client, model):
            scores = await asyncio.gather(*(self._score(client, model, log) for log in message_log_batch))
        pairs = zip(scores, metadata, strict=True)
        return batch_of([self._turn(score, model, state or {}) for score, state in pairs])

    async def _score(self, client: ModelClient, model: str, log: Sequence[ChatMessage]) -> float:
        config = self._config
        body = {
            "model": model,
            "messages": [self._message(message) for message in log],
            "add_generation_prompt": False,
            "use_activation": config.activation,
            **config.request,
        }
        answer = await client.post("/classify", {name: value for name, value in body.items() if value is not None})
        try:
            (item,) = answer["data"]
            scores = [float(score) for score in item["probs"]]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ServerUnavailable(
                f"{config.place} did not answer with scores of one text: {str(answer)[:500]}"
            ) from error
        if config.label >= len(scores):
            raise ServerFailed(f"config.label is {config.label}; the model has {len(scores)} classes, numbered from 0")
        score = scores[config.label]
        if not math.isfinite(score):
            raise ServerFailed(f"{config.place} gave the score {score}")
        return score

    def _message(self, message: ChatMessage) -> dict[str, str]:
        role, content = str(message["role"]), str(message["content"])
        if role == "assistant" and not self._config.thoughts:
            content = answer_of(message).strip()
        return {"role": role if role in _ROLES else "user", "content": harmless(content)}

    def _turn(self, score: float, model: str, state: Mapping[str, Any]) -> Turn:
        return Turn(
            observation="",
            metadata={**state, "reward_model": {"score": score, "model": model}},
            reward=self._config.reward(score),
            terminated=True,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_score`, before scale and bounds."""
        scored = [(state or {}).get("reward_model") for state in batch["extra_env_info"]]
        scores = [float(item["score"]) for item in scored if isinstance(item, dict)]
        found = mean(scores)
        return batch, {"episodes": len(scores), **({} if found is None else {"mean_score": found})}
