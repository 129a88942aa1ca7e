"""Verdicts: what a judge's text says, by labels, by a number, or by a JSON object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kuberoll_workers.data.thoughts import thoughts_end

PATTERN_SECONDS = 1.0
"""Time limit of a regular expression; a text that needs more has no verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict that could be read.

    Attributes:
        label: The label, or the number as it was written.
        score: Its score.
    """

    label: str
    score: float


class VerdictForm(Protocol):
    """A form of verdicts.

    Attributes:
        request: Sentence that asks the judge for it.
        schema: JSON schema of the answer; None: it is a text.
    """

    @property
    def request(self) -> str: ...
    @property
    def schema(self) -> dict[str, Any] | None: ...

    def read(self, text: str) -> Verdict | None:
        """The verdict of a judge's whole text; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Labels:
    """A label in a text: the one that ends last counts, of several the longest; not in thoughts before `</think>`."""

    scores: Mapping[str, float]

    @property
    def request(self) -> str:
        either = _either(self.scores)
        return f"Give your reasons in a few sentences. Then end with one line that is only the verdict: {either}."

    @property
    def schema(self) -> None:
        return None

    def read(self, text: str) -> Verdict | None:
        """See `VerdictForm.read`."""
        said = text[thoughts_end(text) :]
        ends = [(at + len(label), len(label), label) for label in self.scores if (at := said.rfind(label)) >= 0]
        if not ends:
            return None
        *_, label = max(ends)
        return Verdict(label, self.scores[label])


@dataclass(frozen=True, slots=True)
class JsonLabels:
    """A JSON object with `reason` and `verdict`, which is a label; servers with structured outputs write no other."""

    scores: Mapping[str, float]

    @property
    def request(self) -> str:
        return (
            'Answer with a JSON object: "reason", a few sentences, and after it "verdict", which is '
            f"{_either(self.scores)}."
        )

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "verdict": {"enum": list(self.scores)}},
            "required": ["reason", "verdict"],
            "additionalProperties": False,
        }

    def read(self, text: str) -> Verdict | None:
        """See `VerdictForm.read`."""
        try:
            said = orjson.loads(text[thoughts_end(text) :])
        except orjson.JSONDecodeError:
            return None
        label = said.get("verdict") if isinstance(said, dict) else None
        return Verdict(label, self.scores[label]) if isinstance(label, str) and label in self.scores else None


@dataclass(frozen=True, slots=True)
class Scale:
    """A number in a text: the last match of a pattern, its group; the score is its place between the two ends."""

    pattern: str
    minimum: float
    maximum: float

    @property
    def request(self) -> str:
        return "Give your reasons in a few sentences before the number."

    @property
    def schema(self) -> None:
        return None

    def read(self, text: str) -> Verdict | None:
        """See `VerdictForm.read`; a number outside of the scale is no verdict."""
        # The standard library's `re` cannot be interrupted.
        import regex

        try:
            found = regex.findall(self.pattern, text[thoughts_end(text) :], timeout=PATTERN_SECONDS)
        except TimeoutError:
            return None
        try:
            number = float(found[-1]) if found else math.nan
        except ValueError:
            return None
        if not self.minimum <= number <= self.maximum:
            return None
        return Verdict(str(found[-1]), (number - self.minimum) / (self.maximum - self.minimum))


def _either(labels: Mapping[str, float] | Sequence[str]) -> str:
    return " or ".join(labels)
