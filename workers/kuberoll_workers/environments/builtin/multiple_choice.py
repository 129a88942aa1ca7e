"""Multiple choice: one answer to one question with given choices."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from kuberoll_workers.environments.builtin.choices import read_choice
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.responses import legible
from kuberoll_workers.environments.builtin.turn import GradedEnvironment, Reply, Turn, grade, mean
from kuberoll_workers.environments.interface import Episode, Metadata, ScoringCase, UnusableRow

TRUTH_KEYS = ("ground_truth", "expected_answer", "answer", "answerKey")
OPTION_KEYS = ("options", "choices")
_LETTERS = string.ascii_uppercase


class MultipleChoiceConfig(EnvironmentConfig):
    """Reading of responses, and the size of generated questions."""

    choices: int = Field(
        default=10, ge=2, le=26, description="Number of choices, A and so on, of rows that do not list theirs."
    )
    max_characters: int = Field(
        default=4000,
        ge=16,
        le=1_000_000,
        description="Number of characters at the end of a response in which the choice is searched.",
    )


class MultipleChoiceEnvironment(GradedEnvironment):
    """Single turn: the reward is 1 if the response states the right choice; the episode ends.

    The right choice is `metadata.ground_truth`, `expected_answer`, `answer` or `answerKey`: a label, the text of a
    choice, or, with listed choices, its number from 0. The choices are `metadata.options` or `choices`: a list of
    texts, an object of texts by label, a list of such objects (NeMo Gym), or an object of two lists, `label` and `text`
    (ARC, CommonsenseQA). Without them labels are letters, and only labels are read from responses.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "ground_truth": "or expected_answer, answer, answerKey: label, text or number of the right choice",
        "options": "or choices: the choices; without them labels are letters",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(row={"metadata": metadata}, responses=[response], reward=reward)
        for metadata, responses in [
            (
                {"ground_truth": "B", "options": ["Paris", "Rome", "Oslo"]},
                {
                    "Answer: B": 1.0, "The answer is (B).": 1.0, r"\boxed{B}": 1.0, "Rome": 1.0,
                    "Answer: A": 0.0, "Answer: A or B": 0.0, r"\boxed{A} or \boxed{B}": 0.0, "Paris": 0.0, "": 0.0,
                },
            ),
            ({"ground_truth": "B"}, {"Answer: B": 1.0, "Answer: A": 0.0}),
        ]
        for response, reward in responses.items()
    ]  # fmt: skip

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(MultipleChoiceConfig, config)

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        self._question(metadata or {})

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        options, truth = self._question(state)
        choice = read_choice(reply, options, characters=self._config.max_characters, truncated=reply.truncated)
        return grade(choice == truth, state, choice)

    def solution(self, episode: Episode) -> list[str]:
        """The label of the right choice."""
        _, truth = self._question(episode.metadata or {})
        return [f"Answer: {truth}"]

    def attacks(self, episode: Episode) -> dict[str, list[str]]:
        """All choices at once, and another one."""
        options, truth = self._question(episode.metadata or {})
        others = [label for label in options if label != truth]
        return {
            "every choice": [f"Answer: {', '.join(options)}"],
            "every choice boxed": [" or ".join(f"\\boxed{{{label}}}" for label in options)],
            "every choice, a line each": ["\n".join(f"Answer: {label}" for label in [truth, *others])],
            "the right choice or another": [f"The answer is {truth} or {others[0]}."],
            **{f"the choice {label}": [f"Answer: {label}"] for label in others},
        }

    def _question(self, state: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        """The choices' texts by label, and the label of the right one."""
        listed = next((state[key] for key in OPTION_KEYS if state.get(key) is not None), None)
        options = _options(listed) if listed is not None else dict.fromkeys(_LETTERS[: self._config.choices], "")
        key = next((key for key in TRUTH_KEYS if state.get(key) is not None), None)
        if key is None:
            raise UnusableRow(f"metadata.{TRUTH_KEYS[0]}: found None; it must be the label of the right choice")
        return options, _truth(state[key], options, key)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy` and `answered_rate`, the share of responses that state a choice."""
        _, metrics = super().global_post_process_and_metrics(batch)
        answered = mean([float(answer is not None) for answer in batch["answer"]])
        return batch, metrics if answered is None else {**metrics, "answered_rate": answered}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with sums and four choices; a longer dataset starts with the shorter one."""
        draw = random.Random(seed)
        return [_sum(index, draw) for index in range(count)]


def _options(listed: Any) -> dict[str, str]:
    labels: list[Any]
    texts: list[Any]
    if isinstance(listed, Mapping) and isinstance(listed.get("text"), list) and isinstance(listed.get("label"), list):
        labels, texts = listed["label"], listed["text"]
    elif isinstance(listed, Mapping):
        labels, texts = list(listed), list(listed.values())
    elif isinstance(listed, list) and all(isinstance(item, Mapping) for item in listed):
        pairs = [pair for item in listed for pair in item.items() if pair[1] is not None]
        labels, texts = [label for label, _ in pairs], [text for _, text in pairs]
    elif isinstance(listed, list) and len(listed) <= len(_LETTERS):
        labels, texts = list(_LETTERS[: len(listed)]), listed
    else:
        raise UnusableRow(f"metadata.options: found {str(listed)[:80]!r}; it must be a list or an object of texts")
    if len(labels) != len(texts) or not all(isinstance(text, str) for text in texts):
        raise UnusableRow("metadata.options: each choice must have one label and a text")
    named = [label.strip().upper() if isinstance(label, str) else "" for label in labels]
    if len(named) < 2 or len(set(named)) != len(named) or not all(_is_label(label) for label in named):
        raise UnusableRow(
            f"metadata.options: found the labels {labels!r}; they must be at least two different letters or digits"
        )
    return dict(zip(named, texts, strict=True))


def _is_label(label: str) -> bool:
    return len(label) == 1 and label.isascii() and label.isalnum()


def _truth(value: Any, options: Mapping[str, str], key: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and any(options.values()):
        if 0 <= value < len(options):
            return list(options)[value]
    elif isinstance(value, str):
        written = legible(value).strip()
        label = written.strip("().").upper()
        if label in options:
            return label
        matching = [label for label, text in options.items() if text and legible(text).strip() == written]
        if len(matching) == 1:
            return matching[0]
    raise UnusableRow(
        f"metadata.{key}: found {value!r}; it must be one of the labels {', '.join(options)}, the text of a choice, or "
        "the number of a listed choice, from 0"
    )


def _sum(index: int, draw: random.Random) -> dict[str, Any]:
    left, right = draw.randint(2, 60), draw.randint(2, 60)
    near = [number for number in range(max(0, left + right - 9), left + right + 10) if number != left + right]
    numbers = [*draw.sample(near, 3), left + right]
    draw.shuffle(numbers)
    options = {letter: str(number) for letter, number in zip("ABCD", numbers, strict=True)}
    listed = "\n".join(f"{letter}: {text}" for letter, text in options.items())
    return {
        "messages": [{"role": "user", "content": f"What is {left} + {right}?\n{listed}\nEnd with `Answer: LETTER`.\n"}],
        "metadata": {"options": options, "ground_truth": "ABCD"[numbers.index(left + right)]},
        "idx": index,
    }
