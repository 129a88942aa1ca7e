"""Certificates come in groups, so that the end of a process loses little."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kuberoll_workers.certification.certifying import certify
from kuberoll_workers.certification.subjects import Answers
from kuberoll_workers.certification.trials import NOTHING, Outcome, Trial
from kuberoll_workers.dataset.certificates import Grader


@dataclass(frozen=True, slots=True)
class Word:
    """A subject whose right answer is its label."""

    label: str
    digest: str = ""
    environment: str = "words"
    idx: object = None
    image: str | None = None

    async def answers(self) -> Answers:
        kinds = {self.label: "solution", "wrong": "attack", NOTHING: "nothing"}
        return Answers(trials=[Trial(kind=kind, name=name) for name, kind in kinds.items()])  # type: ignore[arg-type]

    async def play(self, trial: Trial, repetition: int) -> Outcome:
        return Outcome(reward=float(trial.name == self.label), memory=1 + repetition)


@pytest.mark.parametrize(("at_a_time", "sizes"), [(2, [2, 2, 1]), (8, [5])])
async def test_certificates_come_in_groups(at_a_time: int, sizes: list[int]) -> None:
    graders = {"words": Grader(None, "")}
    subjects = [Word(label) for label in "abcde"]
    groups = [some async for some in certify(subjects, graders, repetitions=3, parallel=2, at_a_time=at_a_time)]
    assert list(map(len, groups)) == sizes
    certificates = [one for some in groups for one in some]
    assert [(one.where, one.verdict) for one in certificates] == [(label, "certified") for label in "abcde"]
    assert {trial.memory for one in certificates for trial in one.trials if trial.kind == "solution"} == {3}
