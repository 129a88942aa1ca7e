"""Answers whose reward is known before they are graded, and what grading them gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kuberoll_workers.environments.interface import ChatMessage

TrialKind = Literal["solution", "nothing", "attack"]

NOTHING: Final = "nothing"
"""Name of the trial without an answer."""
PROMPT: Final = "the prompt"
"""Beginning of the names of attacks that answer with what the prompt says: if one passes, the prompt has the answer."""
ECHO: Final = f"{PROMPT}, repeated"
"""Name of the attack that answers with the whole prompt. That it passes alone may be chance: graders that read the last
number of an answer find the one that the question ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An answer to one row.

    Attributes:
        kind: `solution` must get the full reward, the others must not.
        name: Tells it from the row's others.
        responses: The policy's messages, one for each turn; a subject may know its answers itself, by their names.
        network: Whether it is given and graded with a network, other than usual; None: as usual.
    """

    kind: TrialKind
    name: str
    responses: Sequence[ChatMessage] = ()
    network: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one grading gave.

    Attributes:
        reward: Sum of the rewards of all turns; None: there was none.
        problem: Why there was none, by the grader's doing.
        trouble: Why there was none, by nobody's doing: a machine could not be had. Without either, the answer could
            not be given at all.
        seconds: Time that the grader took.
        memory: Most memory of one of its processes, in bytes; None: it was not measured.
        detail: What it said last.
    """

    reward: float | None
    problem: str | None = None
    trouble: str | None = None
    seconds: float = 0.0
    memory: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Graded:
    """An outcome, and what was graded right before it.

    Attributes:
        before: Name of the row's trial before this one; empty: it was the first of the row.
    """

    outcome: Outcome
    before: str = ""


@dataclass(frozen=True, slots=True)
class Repeated:
    """All gradings of one trial, in their order."""

    trial: Trial
    gradings: Sequence[Graded]

    @property
    def rewards(self) -> list[float]:
        """The rewards that there were."""
        return [one.outcome.reward for one in self.gradings if one.outcome.reward is not None]

    @property
    def problems(self) -> list[str]:
        """Why there were no rewards, each reason once, in their order."""
        return list(dict.fromkeys(one.outcome.problem for one in self.gradings if one.outcome.problem is not None))

    @property
    def troubles(self) -> list[str]:
        """What kept it from being graded, each reason once, in their order."""
        return list(dict.fromkeys(one.outcome.trouble for one in self.gradings if one.outcome.trouble is not None))

    @property
    def failed(self) -> int:
        """Number of gradings without a reward."""
        return sum(one.outcome.problem is not None for one in self.gradings)

    @property
    def detail(self) -> str:
        """What the grader said last in the last grading that it said something in."""
        return next((one.outcome.detail for one in reversed(self.gradings) if one.outcome.detail), "")
