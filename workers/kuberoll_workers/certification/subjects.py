"""What can be certified: something with right and wrong answers, which can be graded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kuberoll_workers.certification.trials import Outcome, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Right and wrong answers of a subject.

    Attributes:
        full_reward: Reward of a right answer; None: it does not say.
        attack_rounds: Rounds in which attacks are graded, the first ones: there are many, and flaky graders show by the
            other answers.
        network: Whether answers are given and graded with a network, as usual; None: unknown.
        unproven: What cannot be tried, and why.
    """

    trials: Sequence[Trial]
    full_reward: float | None = None
    attack_rounds: int = 2
    network: bool | None = None
    unproven: Sequence[str] = ()


class Subject(Protocol):
    """A row of a dataset, or a task, whose answers can be graded.

    Attributes:
        label: Where it is: `file:line`, or a directory.
        digest: Digest of all that it is graded by, except for the grader.
        environment: Name of its environment in the job.
        idx: Its own name; None: it has none.
        image: The image that it is graded in; None: none.
    """

    @property
    def label(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def environment(self) -> str: ...
    @property
    def idx(self) -> object: ...
    @property
    def image(self) -> str | None: ...

    async def answers(self) -> Answers:
        """Its right and wrong answers; a problem with finding them is one of `unproven`.

        Raises:
            EnvironmentFault: The environment cannot say.
        """
        ...

    async def play(self, trial: Trial, repetition: int) -> Outcome:
        """Grade one of its answers; what goes wrong is in the outcome."""
        ...
