"""Certification of a job: its rows become subjects of their environments, and certificates go into a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Protocol

from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.certification.certifying import AT_A_TIME, TASKS_AT_A_TIME, certify
from kuberoll_workers.certification.files import open_certificates
from kuberoll_workers.certification.rows import RowSubject, Untried
from kuberoll_workers.certification.subjects import Subject
from kuberoll_workers.certification.tasks import TaskSubject
from kuberoll_workers.certification.twins import Twins
from kuberoll_workers.dataset.certificates import (
    Certificate,
    Certificates,
    graders_of,
    place_of,
    read_certificates,
    row_digest,
    rows_of,
)
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.dataset.rows import DatasetError, Row
from kuberoll_workers.environments import registry
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.rollouts.seeds import job_seed, task_seed
from kuberoll_workers.sandboxes.drivers import find_sandboxes
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.worker.environments import isolated_environment_factory, open_environments, remote_digests

_SEED: Final = 0
_AGENT_SECONDS: Final = 1800.0


class Done(Protocol):
    """Called with certificates as they come."""

    def __call__(self, some: Sequence[Certificate], *, tried: bool) -> None:
        """`tried`: they are new; else they were valid already."""


MakeSubject = Callable[[Row, str], Subject]
"""Makes the subject of a row, with its digest."""


async def certify_job(
    job: RolloutJob,
    base: Path,
    location: str,
    *,
    repetitions: int,
    parallel: int,
    force: bool,
    done: Done,
    invalid: Callable[[DatasetError], None],
) -> None:
    """Certify all rows of a job that have no valid certificate.

    Args:
        base: The manifest's directory.
        location: Path of the file with the certificates.
        repetitions: How often each answer is graded.
        parallel: Rows at a time.
        force: Try also rows that have a valid certificate.
        invalid: Called with the error of each invalid row, which is then left out.

    Raises:
        DatasetError: The dataset cannot be read, or there are no valid rows.
        UnusableEnvironment: An environment cannot be created.
        NotWritable: The file cannot be written.
    """
    environment = isolated_environment_factory(job, protected=())
    scan(job, base=base, environment=environment, refused=invalid)
    graders = graders_of(job, remote_digests(job))
    reasons = {spec.name: reason for spec in job.spec.environments if (reason := _why_not(spec)) is not None}
    async with AsyncExitStack() as stack:
        file = stack.enter_context(open_certificates(location))
        runners = await stack.enter_async_context(open_environments(_without(job, reasons)))
        players = {spec.name: await _player(spec, stack) for spec in job.spec.environments if spec.sandbox is not None}
        known = Certificates(read_certificates(location))
        rows = functools.partial(rows_of, job, base=base, environment=environment, leave_out=True)
        twins = Twins(rows)

        def subjects() -> Iterator[Subject]:
            for number, row in enumerate(rows()):
                others = twins.of(number, row)
                digest = row_digest(row, base)
                valid = known.valid(digest, row.task_name, graders[row.task_name], repetitions=repetitions)
                # What it says of twins is not of this row alone.
                if valid is not None and not force and not others:
                    done([valid], tried=False)
                    continue
                if (player := players.get(row.task_name)) is not None:
                    yield TaskSubject(row, player, base, digest=digest)
                else:
                    yield _subject(job, row, place_of(row, base), digest, number, runners, reasons, others)

        at_a_time = TASKS_AT_A_TIME if players else AT_A_TIME
        given = {"repetitions": repetitions, "parallel": parallel, "at_a_time": at_a_time, "seed": _SEED}
        async for some in certify(subjects(), graders, **given):
            file.append(some)
            done(some, tried=True)


def _subject(
    job: RolloutJob,
    row: Row,
    place: str,
    digest: str,
    number: int,
    runners: Mapping[str, EnvironmentRunner],
    reasons: Mapping[str, str],
    twins: Sequence[Row],
) -> Subject:
    recorded = row.task_name in runners and (row.metadata or {}).get(_recorded(job, row.task_name) or "") is not None
    if (reason := reasons.get(row.task_name)) is not None and not recorded:
        return Untried(label=place, digest=digest, environment=row.task_name, idx=row.idx, reason=reason)
    base_seed = job_seed(job.metadata.name, job.spec.generation.sampling.seed)
    return RowSubject(
        row,
        runners[row.task_name],
        label=place,
        digest=digest,
        seed=task_seed(base_seed, number),
        max_turns=job.spec.rollout.max_turns,
        twins=twins,
        own_only=reason is not None,
    )


def _recorded(job: RolloutJob, name: str) -> str | None:
    """Field of the rows of an environment with recorded verdicts; None: there is none."""
    spec = next(one for one in job.spec.environments if one.name == name)
    answers = spec.type is not None and spec.agent is None and spec.player is None
    return getattr(registry.resolve(type=spec.type), "recorded", None) if answers else None


async def _player(spec: Environment, stack: AsyncExitStack) -> Player:
    """The player of the tasks of an environment; its machines are gone when the stack ends.

    Raises:
        UnusableEnvironment: This machine has no sandboxes.
    """
    assert spec.sandbox is not None
    sandboxes = find_sandboxes(spec.name)
    stack.push_async_callback(sandboxes.close)
    try:
        await sandboxes.check()
    except SandboxUnavailable as error:
        raise registry.UnusableEnvironment(f"environment {spec.name!r}: {error}") from error
    return Player(sandboxes=sandboxes, options=spec.sandbox, variables={}, agent_seconds=_AGENT_SECONDS)


def _why_not(spec: Environment) -> str | None:
    """Why the rows of an environment cannot be tried; None if they can."""
    if spec.player is not None or spec.agent is not None:
        return "an agent plays it: its reward is of what it did, not of an answer"
    if spec.type is None:
        # Its class is not loaded here, where its code need not run.
        return None
    reason: str | None = getattr(registry.resolve(type=spec.type), "unprovable", None)
    return reason


def _without(job: RolloutJob, reasons: Mapping[str, str]) -> RolloutJob:
    """The job without the environments that are not tried."""
    kept = [spec for spec in job.spec.environments if spec.name not in reasons or _recorded(job, spec.name)]
    return job.model_copy(update={"spec": job.spec.model_copy(update={"environments": kept})})
