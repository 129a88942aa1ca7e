"""Judged pairs: a language model compares the responses of a prompt group with each other, two at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from kuberoll_workers.data.plain import unicode_text
from kuberoll_workers.data.thoughts import answer_of
from kuberoll_workers.environments.builtin.config import parse_config
from kuberoll_workers.environments.builtin.judge import prompts
from kuberoll_workers.environments.builtin.judge.asking import Ask, AskingConfig, Judge, Label, NoVerdict, Text
from kuberoll_workers.environments.builtin.judge.texts import shortened
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, mean
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    GroupMember,
    GroupScore,
    Metadata,
)

Outcome = Literal["first", "second", "tie"]

PROMPT: Final = """Question:
{question}

Answer A:
{first}

Answer B:
{second}

Which answer is better: more correct first, then more helpful, then clearer? Length and order are no merits.
The verdict is [[A]] if A is better, [[B]] if B is better, and [[C]] if neither is.
{verdict}"""

_LABELS: Final[Mapping[str, Outcome]] = {"[[A]]": "first", "[[B]]": "second", "[[C]]": "tie"}
_POINTS: Final[Mapping[Outcome, float]] = {"first": 1.0, "tie": 0.5, "second": 0.0}
_OTHER: Final[Mapping[Outcome, Outcome]] = {"first": "second", "second": "first", "tie": "tie"}
# A group's requests are made together, so a few groups fill the server.
_REQUESTS_OF_A_GROUP: Final = 4


class JudgePairsConfig(AskingConfig):
    """The judge, its prompt, and which pairs it is shown."""

    prompt: Text = Field(
        default=PROMPT,
        description="User message. {question}, {first}, {second} and {reference} are replaced by fenced texts, "
        "{verdict} by the form of the verdict.",
    )
    labels: dict[Label, Outcome] | None = Field(
        default=None, min_length=2, max_length=64, description="The verdicts that the prompt defines: who is better."
    )
    pairs: Literal["All", "Ring"] = Field(
        default="All", description="All: each response meets each other one. Ring: only the next one."
    )
    swap: bool = Field(
        default=True, description="Ask twice about a pair, with the two swapped; verdicts that differ are a tie."
    )
    unparsed: Literal["Fail", "Tie"] = Field(
        default="Fail", description="A verdict that cannot be read: the group fails, or the pair is a tie."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = prompts.placeholders(self.prompt)
        if not {"first", "second"} <= names or "response" in names:
            raise ValueError("prompt: it must have {first} and {second}, the two responses, and no {response}")
        if self.prompt == PROMPT and self.labels not in (None, _LABELS):
            raise ValueError("labels: give a prompt that defines them; the default one has [[A]], [[B]] and [[C]]")
        if self.labels is not None and not {"first", "second"} <= set(self.labels.values()):
            raise ValueError("labels: one must mean first, and one second")
        return self


class JudgePairsEnvironment(EnvironmentInterface):
    """Single turn: a judge compares the responses of a prompt group pairwise; the episode ends.

    The score of a response within its group is the share of its comparisons that it won, a tie being half. A response
    without text loses to all others, equal ones tie, and nobody is asked about them. `metadata.pairs` of the
    trajectory has its comparisons, with what the judge wrote.
    """

    unprovable: ClassVar[str | None] = "a judge compares the answers of a group"
    row_metadata: ClassVar[Mapping[str, str]] = {
        "question": "the question that the judge reads; absent: the last message of the user",
        "ground_truth": "or expected_answer, reference, answer: the reference answer, if the prompt shows one",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(JudgePairsConfig, config)
        self._labels = self._config.labels or _LABELS
        # Scores of labels are of no interest here.
        form = self._config.labelled(dict.fromkeys(self._labels, 0.0))
        has_reference = "reference" in prompts.placeholders(self._config.prompt)
        self._judge = Judge(self._config, form, has_reference=has_reference)
        # Groups at the same time; those that wait are not on a time limit.
        self.parallel_steps = max(1, self._config.parallel // _REQUESTS_OF_A_GROUP)

    async def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:  # type: ignore[override]  # noqa: ARG002
        """End each episode, with a reward of 0: its score comes with its group.

        Raises:
            UnusableRow: A row has no reference answer, and the prompt shows one.
        """
        for state in metadata:
            self.check_row(state)
        return batch_of([Turn(observation="", metadata=dict(state or {}), terminated=True) for state in metadata])

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        self._judge.texts_of([], metadata or {})

    async def score_group(self, members: list[GroupMember]) -> list[GroupScore]:  # type: ignore[override]
        """Compare the members' last responses.

        Raises:
            ServerFailed: The judge could not be asked.
            NoVerdict: A verdict could not be read, and the config does not make that a tie.
        """
        texts = [self._text(member) for member in members]
        # Scores that are stored already stay as they are.
        new = [member.group_reward is None for member in members]
        pairs = [
            pair for pair in pairs_of(len(members), ring=self._config.pairs == "Ring") if new[pair[0]] or new[pair[1]]
        ]
        async with self._judge.opened() as (ask, _):
            compared = await asyncio.gather(*(self._compared(ask, members, texts, *pair) for pair in pairs))
        points: list[list[float]] = [[] for _ in members]
        kept: list[list[dict[str, Any]]] = [[] for _ in members]
        for (one, other), (outcome, calls) in zip(pairs, compared, strict=True):
            for own, against, result in ((one, other, outcome), (other, one, _OTHER[outcome])):
                points[own].append(_POINTS[result])
                word = {"first": "won", "second": "lost", "tie": "tied"}[result]
                # The judge's texts are kept once.
                kept[own].append(
                    {"against": members[against].id, "result": word, **({"calls": calls} if own == one else {})}
                )
        scores = [mean(own) for own in points]
        return [
            GroupScore(
                reward=0.5 if score is None else score,
                metadata={**(member.metadata or {}), "pairs": {"score": score, "compared": own}},
            )
            for member, own, score in zip(members, kept, scores, strict=True)
        ]

    def _text(self, member: GroupMember) -> str:
        responses = [message for message in member.messages if message["role"] == "assistant"]
        text = answer_of(responses[-1]).strip() if responses else ""
        return shortened(unicode_text(text, "response"), self._config.max_characters)

    async def _compared(
        self, ask: Ask, members: Sequence[GroupMember], texts: Sequence[str], one: int, other: int
    ) -> tuple[Outcome, list[dict[str, Any]]]:
        """The outcome for the first of two members, and what the judge wrote."""
        if texts[one] == texts[other]:
            return "tie", []
        if not (texts[one] and texts[other]):
            return ("first" if texts[one] else "second"), []
        # Without a swap, no member always stands first.
        orders = [(one, other), (other, one)]
        orders = orders if self._config.swap else [orders[(one + other) % 2]]
        calls = await asyncio.gather(
            *(self._asked(ask, members[one], texts[first], texts[second]) for first, second in orders)
        )
        outcomes: list[Outcome] = []
        for (first, _), call in zip(orders, calls, strict=True):
            verdict = "tie" if call["verdict"] is None else self._labels[call["verdict"]]
            outcomes.append(verdict if first == one else _OTHER[verdict])
        kept = [
            {"first": members[first].id, **{name: value for name, value in call.items() if name != "score"}}
            for (first, _), call in zip(orders, calls, strict=True)
        ]
        return (outcomes[0] if len(set(outcomes)) == 1 else "tie"), kept

    async def _asked(self, ask: Ask, member: GroupMember, first: str, second: str) -> dict[str, Any]:
        last = max(number for number, message in enumerate(member.messages) if message["role"] == "assistant")
        log = member.messages[: last + 1]
        said = await ask(self._judge.texts_of(log, member.metadata or {}, first=first, second=second))
        if said["verdict"] is None and self._config.unparsed == "Fail":
            raise NoVerdict.of(said["text"], "Tie")
        return said

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add how many comparisons were won and lost by somebody, and how many were ties."""
        compared = [
            item for state in batch["extra_env_info"] for item in ((state or {}).get("pairs") or {}).get("compared", ())
        ]
        counts = Counter(str(item["result"]) for item in compared)
        ties = {"tied_share": counts["tied"] / counts.total()} if counts else {}
        return batch, {"comparisons": counts.total() // 2, **ties}


def pairs_of(size: int, *, ring: bool) -> Iterator[tuple[int, int]]:
    """Pairs of numbers below `size`: all, or each with the next one in a ring."""
    for one in range(size):
        for other in range(one + 1, size):
            if not ring or other == one + 1 or (one == 0 and other == size - 1):
                yield one, other
