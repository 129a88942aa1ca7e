"""Certification of subjects: their answers are graded in rounds, and each subject gets a certificate."""

from __future__ import annotations

import asyncio
import datetime
import platform
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Final

from kuberoll_workers.certification.schedule import rounds
from kuberoll_workers.certification.subjects import Answers, Subject
from kuberoll_workers.certification.trials import Graded, Outcome, Repeated, Trial
from kuberoll_workers.certification.verdicts import Judgement, judge, passes
from kuberoll_workers.dataset.certificates import Certificate, Finding, Grader, Tried
from kuberoll_workers.environments.outcome import EnvironmentFault

AT_A_TIME: Final = 64
"""Rows whose certificates are written together: each round grades all of them."""
TASKS_AT_A_TIME: Final = 8
"""The same of tasks with machines: they take minutes, and each of their trials has a machine of its own anyway."""

_DETAIL: Final = 200


async def certify(
    subjects: Iterable[Subject],
    graders: Mapping[str, Grader],
    *,
    repetitions: int,
    parallel: int,
    at_a_time: int = AT_A_TIME,
    seed: int = 0,
) -> AsyncIterator[list[Certificate]]:
    """Certify subjects; yields the certificates of some at a time, in the order of the subjects.

    Args:
        graders: By the names of environments.
        repetitions: How often each answer is graded.
        parallel: Subjects that are graded at a time.
        at_a_time: Subjects whose certificates come together.
        seed: Of the orders in which they are graded.
    """
    waiting = iter(subjects)
    while some := list(islice(waiting, at_a_time)):
        yield await _certified(some, graders, repetitions=repetitions, parallel=parallel, seed=seed)


async def _certified(
    subjects: Sequence[Subject], graders: Mapping[str, Grader], *, repetitions: int, parallel: int, seed: int
) -> list[Certificate]:
    places = asyncio.Semaphore(parallel)

    async def answers_of(subject: Subject) -> Answers | EnvironmentFault:
        async with places:
            try:
                return await subject.answers()
            except EnvironmentFault as fault:
                return fault

    answers = await asyncio.gather(*map(answers_of, subjects))
    tried = [Answers(trials=()) if isinstance(one, EnvironmentFault) else one for one in answers]
    graded: list[dict[int, list[Graded]]] = [defaultdict(list) for _ in subjects]

    async def play(number: int, order: Sequence[Trial], repetition: int) -> None:
        async with places:
            before = ""
            for trial in order:
                outcome = await subjects[number].play(trial, repetition)
                graded[number][id(trial)].append(Graded(outcome, before))
                before = "no answer" if trial.kind == "nothing" else f"{trial.kind} {trial.name}"

    for repetition, order in enumerate(rounds(tried, repetitions, seed)):
        # In this order, as far as places become free.
        await asyncio.gather(*(play(number, given, repetition) for number, given in order))
    made = []
    for subject, asked, known, found in zip(subjects, answers, tried, graded, strict=True):
        repeated = [Repeated(trial, found[id(trial)]) for trial in known.trials if found[id(trial)]]
        if isinstance(asked, EnvironmentFault):
            judgement, seconds = _unasked(asked), 0.0
        else:
            judgement = judge(repeated, full_reward=asked.full_reward, network=asked.network, unproven=asked.unproven)
            seconds = sum(one.outcome.seconds for given in found.values() for one in given)
        made.append(_certificate(subject, graders[subject.environment], judgement, repeated, repetitions, seconds))
    return made


def _unasked(fault: EnvironmentFault) -> Judgement:
    """The judgement of a subject that could not even be asked for its answers."""
    finding = Finding(kind="grader_error", text=f"the environment cannot be asked for answers: {fault}")
    return Judgement(verdict="refused", findings=(finding,), warnings=(), unproven=(), full_reward=1.0)


def _certificate(
    subject: Subject,
    grader: Grader,
    judgement: Judgement,
    repeated: Sequence[Repeated],
    repetitions: int,
    seconds: float,
) -> Certificate:
    return Certificate(
        row=subject.digest,
        where=subject.label,
        idx=subject.idx,
        environment=subject.environment,
        code=grader.code,
        config=grader.config,
        image=subject.image,
        verdict=judgement.verdict,
        findings=list(judgement.findings),
        warnings=list(judgement.warnings),
        unproven=list(judgement.unproven),
        repetitions=repetitions,
        full_reward=judgement.full_reward,
        network=judgement.network,
        trials=[_tried(one, judgement.full_reward) for one in repeated],
        seconds=round(seconds, 3),
        versions=_versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _tried(one: Repeated, full_reward: float) -> Tried:
    withstood = one.trial.kind == "attack" and not any(passes(reward, full_reward) for reward in one.rewards)
    outcomes: list[Outcome] = [graded.outcome for graded in one.gradings]
    return Tried(
        kind=one.trial.kind,
        name=one.trial.name,
        rewards=[outcome.reward for outcome in outcomes],
        problems=one.problems[:3],
        network=one.trial.network,
        seconds=round(max(outcome.seconds for outcome in outcomes), 3),
        memory=max((outcome.memory for outcome in outcomes if outcome.memory is not None), default=None),
        # There are many that are withstood, and certificates are shipped to clusters.
        detail="" if withstood else one.detail[:_DETAIL],
    )


def _versions() -> dict[str, str]:
    try:
        own = version("kuberoll")
    except PackageNotFoundError:
        own = "unknown"
    return {"kuberoll": own, "python": platform.python_version()}
