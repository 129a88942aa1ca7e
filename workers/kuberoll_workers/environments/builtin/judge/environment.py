"""Judge: a language model compares a response with a reference answer, or gives it a score."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from kuberoll_workers.data.plain import unicode_text
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.judge import prompts
from kuberoll_workers.environments.builtin.judge.asking import Ask, AskingConfig, Judge, Label, NoVerdict, Text
from kuberoll_workers.environments.builtin.judge.recorded import FIELD, recorded_of
from kuberoll_workers.environments.builtin.judge.texts import shortened
from kuberoll_workers.environments.builtin.judge.verdicts import Scale, VerdictForm
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, reply_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    Metadata,
    ScoringCase,
)

_Score = Annotated[float, Field(ge=-1e6, le=1e6)]

_ORDERS: Final = (("reference", "response"), ("response", "reference"))
_LABELS: Final = {"[[A=B]]": 1.0, "[[A!=B]]": 0.0}

UNPARSED: Final = "unparsed"
DISAGREEMENT: Final = "disagreement"
EMPTY: Final = "empty"


class ScaleConfig(EnvironmentConfig):
    """A number as the verdict."""

    pattern: Text = Field(description="Regular expression with one group, the number; its last match counts.")
    minimum: float = Field(description="The number whose score is 0.")
    maximum: float = Field(description="The number whose score is 1.")

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        import regex

        try:
            groups = regex.compile(self.pattern).groups
        except regex.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"pattern has {groups} groups; it must have one, around the number")
        if not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        return self


class JudgeConfig(AskingConfig):
    """The judge, its prompt, and the scores of its verdicts."""

    prompt: Text = Field(
        default=prompts.PROMPT,
        description="User message. {question}, {reference} and {response} are replaced by fenced texts, {first} and "
        "{second} by the reference and the response, in the order of the swap; {verdict} by the form of the verdict.",
    )
    labels: dict[Label, _Score] | None = Field(
        default=None, min_length=1, max_length=64, description="Scores of the verdicts that the prompt defines."
    )
    scale: ScaleConfig | None = Field(default=None, description="A number as the verdict, in place of labels.")
    swap: bool = Field(
        default=False, description="Ask twice, with the two answers swapped; the verdicts must be the same."
    )
    disagreement: _Score = Field(default=0.0, description="Score if the two verdicts of a swap differ.")
    unparsed: _Score | None = Field(
        default=None, description="Score if a verdict cannot be read; absent: the trajectory fails."
    )
    empty: _Score = Field(default=0.0, description="Score of a response without text, about which nobody is asked.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = prompts.placeholders(self.prompt)
        pair = {"first", "second"}
        if not ("response" in names or pair <= names):
            raise ValueError("prompt: it has no {response}, nor {first} and {second}: the judge would see no response")
        if self.swap and (not pair <= names or self.scale is not None):
            raise ValueError("swap: it needs a prompt with {first} and {second}, and labels")
        if self.scale is not None and (self.labels is not None or self.form == "JSON"):
            raise ValueError("scale: it is in place of labels, and a text; leave labels and form out")
        if self.prompt == prompts.PROMPT and (self.scale is not None or self.labels not in (None, _LABELS)):
            given = "scale" if self.scale is not None else "labels"
            raise ValueError(
                f"{given}: give a prompt that defines the verdicts; the default one has [[A=B]] and [[A!=B]]"
            )
        return self

    @property
    def verdicts(self) -> VerdictForm:
        """Form of its verdicts."""
        if self.scale is not None:
            return Scale(self.scale.pattern, self.scale.minimum, self.scale.maximum)
        return self.labelled(self.labels or _LABELS)


class JudgeEnvironment(EnvironmentInterface):
    """Single turn: a language model judges the response, and its verdict's score is the reward; the episode ends.

    The question is `metadata.question`, or the last message of the user; the reference answer `metadata.ground_truth`,
    `expected_answer`, `reference` or `answer`, a text, a number, or a list of accepted ones. `metadata.judge` of the
    trajectory has what the judge wrote, word for word. A judge that cannot be asked is a failure of the trajectory,
    never a score. About a response whose verdict is recorded (`metadata.verdicts`) nobody is asked.
    """

    unprovable: ClassVar[str | None] = "a judge decides, and the row has no recorded verdicts (metadata.verdicts)"
    recorded: ClassVar[str | None] = FIELD
    row_metadata: ClassVar[Mapping[str, str]] = {
        "ground_truth": "or expected_answer, reference, answer: the reference answer, if the prompt shows one",
        "question": "the question that the judge reads; absent: the last message of the user",
        "verdicts": "for kuberoll certify, what the judge wrote about right and wrong responses",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(JudgeConfig, config)
        names = prompts.placeholders(self._config.prompt)
        has_reference = bool(names & {"reference", "first", "second"})
        self._judge = Judge(self._config, self._config.verdicts, has_reference=has_reference)
        # Of coroutine steps, which those that wait are not on a time limit.
        self.parallel_steps = self._config.parallel

    async def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:  # type: ignore[override]
        """Judge each response.

        Raises:
            UnusableRow: A row has no reference answer.
            ServerFailed: The judge could not be asked.
            NoVerdict: Its verdict could not be read, and the config has no score for that.
        """
        states = [state or {} for state in metadata]
        for state in states:
            self.check_row(state)
        items = [(log, reply_of(log), state) for log, state in zip(message_log_batch, states, strict=True)]
        known = [self._known(reply.strip(), state) for _, reply, state in items]
        if all(turn is not None for turn in known):
            return batch_of([turn for turn in known if turn is not None])
        async with self._judge.opened() as (ask, model):
            return batch_of(await asyncio.gather(*(self._judged(ask, model, *item) for item in items)))

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        self._judge.texts_of([], metadata or {})
        recorded_of(metadata or {}, self._orders)

    def solution(self, episode: Episode) -> dict[str, list[str]] | None:
        """The responses that the row says are right, of those with recorded verdicts."""
        return self._recorded(episode, right=True) or None

    def attacks(self, episode: Episode) -> dict[str, list[str]]:
        """Those that it says are wrong."""
        return self._recorded(episode, right=False)

    def _recorded(self, episode: Episode, *, right: bool) -> dict[str, list[str]]:
        found = [one for one in recorded_of(episode.metadata or {}, self._orders).values() if one.right == right]
        kind = "right" if right else "wrong"
        return {f"the {kind} response {number}": [one.response] for number, one in enumerate(found, start=1)}

    @property
    def _orders(self) -> int:
        return 2 if self._config.swap else 1

    def _known(self, response: str, state: Mapping[str, Any]) -> Turn | None:
        """The turn of a response about which nobody has to be asked; None: the judge has to be."""
        if not response:
            return self._turn(state, EMPTY, self._config.empty, [])
        if (recorded := recorded_of(state, self._orders).get(response)) is None:
            return None
        said = [self._judge.read(text) for text in recorded.texts]
        return self._verdict(state, [self._ordered(one, *order) for one, order in zip(said, _ORDERS, strict=False)])

    async def _judged(
        self, ask: Ask, model: str, log: Sequence[ChatMessage], reply: str, state: Mapping[str, Any]
    ) -> Turn:
        response = reply.strip()
        if (known := self._known(response, state)) is not None:
            return known
        texts = self._judge.texts_of(log, state, response=response)
        texts = {name: shortened(unicode_text(text, name), self._config.max_characters) for name, text in texts.items()}
        calls = await asyncio.gather(*(self._asked(ask, texts, order) for order in _ORDERS[: self._orders]))
        return self._verdict(state, calls, model)

    def _verdict(self, state: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], model: str | None = None) -> Turn:
        """The turn that a judge's texts lead to.

        Raises:
            NoVerdict: One has no verdict, and the config has no score for that.
        """
        if any(call["verdict"] is None for call in calls):
            if self._config.unparsed is None:
                text = next(call["text"] for call in calls if call["verdict"] is None)
                raise NoVerdict.of(text, "a score for that")
            return self._turn(state, UNPARSED, self._config.unparsed, calls, model)
        if len({call["verdict"] for call in calls}) > 1:
            return self._turn(state, DISAGREEMENT, self._config.disagreement, calls, model)
        return self._turn(state, calls[0]["verdict"], calls[0]["score"], calls, model)

    async def _asked(self, ask: Ask, texts: Mapping[str, str], order: tuple[str, str]) -> dict[str, Any]:
        first, second = order
        pair = {"first": texts[first], "second": texts[second]} if "reference" in texts else {}
        return self._ordered(await ask({**texts, **pair}), *order)

    def _ordered(self, said: dict[str, Any], first: str, _second: str) -> dict[str, Any]:
        return {"first": first, **said} if self._config.swap else said

    @staticmethod
    def _turn(
        state: Mapping[str, Any],
        verdict: str,
        score: float,
        calls: Sequence[Mapping[str, Any]],
        model: str | None = None,
    ) -> Turn:
        judged = {"verdict": verdict, "score": score, "model": model, "calls": [dict(call) for call in calls]}
        return Turn(observation="", metadata={**state, "judge": judged}, reward=float(score), terminated=True)

    def scoring_cases(self) -> list[ScoringCase]:
        """Cases of the default prompt, which `kuberoll env test` plays to the judge that the config names."""
        if self._config.url is None or self._config.prompt != prompts.PROMPT:
            return []
        row = {"metadata": {"question": "What is the capital of Italy?", "ground_truth": "Rome"}}
        scores = self._config.labels or _LABELS
        right, wrong = scores["[[A=B]]"], scores["[[A!=B]]"]
        cases = [("It is Rome.", right), ("Rome", right), ("Paris", wrong), ("Milan, not Rome", wrong)]
        return [ScoringCase(row=row, responses=[text], reward=reward) for text, reward in cases]

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `verdicts`, how many of each, and the shares of those that are none."""
        judged = [(state or {}).get("judge") for state in batch["extra_env_info"]]
        counts = Counter(str(item.get("verdict")) for item in judged if isinstance(item, dict))
        total = counts.total()
        shares = {f"{name}_share": counts[name] / total for name in (UNPARSED, DISAGREEMENT, EMPTY)} if total else {}
        return batch, {"episodes": total, "verdicts": dict(counts.most_common(64)), **shares}
