"""Tasks of reasoning-gym: generated questions with one answer, scored by the task's own verifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.lossless import decode, encode
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Reply, Turn, TurnEnvironment, mean
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.interface import (
    Metadata,
    UnusableRow,
)
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment

COMPOSITE = "composite"

# The verifier of game_of_life_halting calls `bool` on texts, so that every answer is right.
_WRONG_VERIFIERS = frozenset({"game_of_life_halting"})

_GENERATED = ("seed", "size")
_SEEDS = 1 << 31  # NumPy's seeds, to which some tasks add the index of the row, have 32 bits.


class ReasoningGymConfig(EnvironmentConfig):
    """A task, and the form of its answers."""

    task: str = Field(min_length=1, max_length=256, description="Name of the dataset in reasoning-gym.")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="Parameters of the task, with reasoning-gym's names."
    )
    tag: str | None = Field(
        default="answer",
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$",
        max_length=64,
        description="Tag that surrounds the answer; null: the whole response is the answer.",
    )


class ReasoningGymEnvironment(TurnEnvironment):
    """One turn: the policy answers a question with `<answer>…</answer>`, and reasoning-gym scores the answer.

    The reward is what `score_answer` returns, 0 to 1; a response without the tag is scored as no answer. An answer that
    makes `score_answer` raise an exception gets 0, if it scores the entry's own answer.

    Episode state: the entry, `question`, `answer` and `metadata`, as `encode` makes it, `task` if the row names one,
    and `score` at the end.
    """

    library: ClassVar[Library] = Library("reasoning_gym", extra="reasoning-gym", distribution="reasoning-gym")
    row_metadata: ClassVar[Mapping[str, str]] = {
        "question": "an entry's question",
        "answer": "its answer, or null",
        "metadata": "its metadata",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, or reasoning-gym is not installed.
        """
        self._config = parse_config(ReasoningGymConfig, config)
        self._library = self.library.module()
        self._factory = self.library.module("factory")
        self._extract = self.library.module("utils").extract_answer
        self._check_task()
        # A verifier needs no more than an instance of its dataset's class; its rows are made on demand.
        self._verifier = self._dataset(size=10, seed=0)

    def _check_task(self) -> None:
        config = self._config
        for name in [config.task, *self._parts()]:
            if name not in self._factory.DATASETS:
                raise UnusableEnvironment(f"config.task: reasoning-gym has no dataset {name!r}")
            if name in _WRONG_VERIFIERS:
                raise UnusableEnvironment(
                    f"config.task: reasoning-gym's verifier of {name!r} accepts every answer, so its rewards mean "
                    "nothing; choose another task"
                )
        for name in _GENERATED:
            if name in config.parameters:
                raise UnusableEnvironment(
                    f"config.parameters.{name}: dataset.source.generator determines it, with count and seed"
                )

    def _parts(self) -> list[Any]:
        datasets = self._config.parameters.get("datasets")
        if self._config.task != COMPOSITE:
            return []
        if not isinstance(datasets, list) or not all(isinstance(part, dict) and "name" in part for part in datasets):
            raise UnusableEnvironment(
                "config.parameters.datasets: a composite needs a list of {name, weight, config}, one for each task"
            )
        return [part["name"] for part in datasets if isinstance(part, dict)]

    def _dataset(self, *, size: int, seed: int) -> Any:
        parameters: dict[str, Any] = dict(self._config.parameters)
        try:
            if self._config.task == COMPOSITE:
                spec = self.library.module("composite").DatasetSpec
                parameters["datasets"] = [
                    spec(**{"weight": 1.0, "config": {}, **part}) for part in parameters["datasets"]
                ]
            return self._library.create_dataset(self._config.task, size=size, seed=seed % _SEEDS, **parameters)
        # Configs are dataclasses that check themselves with `assert`.
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            raise UnusableEnvironment(
                f"config.parameters: {self._config.task} does not accept them: {type(error).__name__}: {error}"
            ) from error

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        _entry(metadata or {})

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        entry = _entry(state)
        if self._config.tag is not None:
            answer = self._extract(reply, tag_name=self._config.tag)
        else:
            answer = None if reply.truncated else reply.strip()
        score = self._score(answer, entry)
        return Turn(
            observation="",
            metadata={**state, "score": score},
            reward=score,
            terminated=True,
            answer=answer,
        )

    def _score(self, answer: str | None, entry: dict[str, Any]) -> float:
        try:
            score: float = self._verifier.score_answer(answer, entry)
            return score
        except Exception as error:
            if cause_of(error).kind == "infrastructure":
                raise
            # The answer is at fault if the verifier can score the entry's own.
            try:
                self._verifier.score_answer(entry["answer"], entry)
            except Exception as error:
                raise UnusableRow(
                    f"metadata.metadata: found an entry that reasoning-gym's {self._config.task} cannot score: "
                    f"{type(error).__name__}: {error}"
                ) from error
            return 0.0

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_score`, and `solve_rate`, the share of scores of 1."""
        scores = [state["score"] for state in batch["extra_env_info"] if state and "score" in state]
        metrics = {"mean_score": mean(scores), "solve_rate": mean([float(score >= 1.0) for score in scores])}
        return batch, {"episodes": len(scores), **{name: value for name, value in metrics.items() if value is not None}}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with the task's questions; for most tasks a longer dataset starts with the shorter one."""
        dataset = self._dataset(size=count, seed=seed)
        return [self._row(index, dataset[index]) for index in range(count)]

    def _row(self, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        tag, prompt = self._config.tag, str(entry["question"])
        if tag is not None:
            prompt += f"\n\nWrite your final answer between <{tag}> and </{tag}>."
        return {
            "messages": [{"role": "user", "content": prompt}],
            "metadata": encode({name: entry[name] for name in ("question", "answer", "metadata")}),
            **({} if tag is None else {"stop_strings": [f"</{tag}>"]}),
            "idx": index,
        }


def _entry(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a row.

    Raises:
        UnusableRow: It is none.
    """
    if not isinstance(state.get("question"), str):
        raise UnusableRow(f"metadata.question: found {state.get('question')!r}; it must be an entry's question")
    if "answer" not in state:
        raise UnusableRow("metadata.answer: found nothing; it must be an entry's answer, or null")
    if not isinstance(state.get("metadata"), Mapping):
        raise UnusableRow(f"metadata.metadata: found {state.get('metadata')!r}; it must be an entry's metadata")
    try:
        return {name: decode(state[name]) for name in ("question", "answer", "metadata")}
    except (TypeError, ValueError) as error:
        raise UnusableRow(f"metadata: found values that are none of an entry: {error}") from error
