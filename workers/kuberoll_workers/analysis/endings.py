"""The interface of what is made of a run at its end, beside its aggregates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_files import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run whose workers have ended.

    Attributes:
        files: Its output.
        note: Called with messages for the user.
        tokenizer: Directory or hub id of the tokenizer; None: as the manifest names it.
    """

    job: RolloutJob
    files: RunFiles
    note: Callable[[str], None]
    tokenizer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingResult:
    """What was made.

    Attributes:
        files: Files that were written.
        summary: Lines for the user.
    """

    files: Sequence[str] = ()
    summary: Sequence[str] = ()


class EndingRefused(Exception):
    """What a job wants at its end cannot be made here; the message names the field and the remedy."""


class Ending(Protocol):
    """Something that is made of a run at its end: a class of the entry points `kuberoll.endings`.

    An object is made for each run, before the aggregates are computed. An exception costs its own result only.

    Attributes:
        after: Names of endings whose files it needs.
    """

    after: ClassVar[Sequence[str]]

    def __init__(self, run: EndedRun) -> None: ...

    @staticmethod
    def is_wanted(job: RolloutJob) -> bool:
        """Say whether a job's run has it."""
        ...

    @staticmethod
    def check(job: RolloutJob) -> None:
        """Check, before anything is started, that it can be made of a job's run.

        Raises:
            EndingRefused: It cannot.
        """
        ...

    def offer(self, record: EndedRecord) -> None:
        """Take one trajectory, of all that ended."""
        ...

    def make(self, aggregates: Aggregates) -> EndingResult:
        """Make it, when all trajectories were offered."""
        ...
