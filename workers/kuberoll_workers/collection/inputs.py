"""A look at the whole dataset before anything expensive starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_workers.collection.dataset import DatasetError, EnvironmentSource, Row, read_rows
from kuberoll_workers.collection.expansion import PromptGroup, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """What a dataset comes to: counts, and a digest of all rows in order."""

    rows: int
    trajectories: int
    trajectories_of: dict[str, int]
    digest: str

    def as_json(self) -> dict[str, Any]:
        """The form in which a run's manifest holds it."""
        return {"rows": self.rows, "trajectories": self.trajectories, "digest": self.digest}


def prompt_groups(job: RolloutJob, *, base: Path, environment: EnvironmentSource) -> Iterator[PromptGroup]:
    """All prompt groups of a job in order; the same ones in every process that asks.

    Args:
        base: The manifest's directory.
        environment: Makes an environment by name, where rows are generated.

    Raises:
        DatasetError: A row is not usable.
    """
    oversample = job.spec.rollout.groups.oversample
    return expand(_rows(job, base, environment), repeats_of(job), oversample=oversample)


def repeats_of(job: RolloutJob) -> dict[str, int]:
    """Samples per prompt, by environment name."""
    default = job.spec.dataset.repeats
    return {item.name: item.repeats if item.repeats is not None else default for item in job.spec.environments}


def scan(job: RolloutJob, *, base: Path, environment: EnvironmentSource) -> InputSummary:
    """Read and check every row once.

    Raises:
        DatasetError: The first row that is not usable, or that there is none.
    """
    digest = hashlib.blake2b(digest_size=16)

    def watched(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            digest.update(row.content)
            yield row

    rows = 0
    counts = {item.name: 0 for item in job.spec.environments}
    for group in expand(watched(_rows(job, base, environment)), repeats_of(job)):
        rows += 1
        counts[group.row.task_name] += group.keep
    if rows == 0:
        raise DatasetError("spec.dataset: there is not a single row")
    return InputSummary(rows=rows, trajectories=sum(counts.values()), trajectories_of=counts, digest=digest.hexdigest())


def _rows(job: RolloutJob, base: Path, environment: EnvironmentSource) -> Iterator[Row]:
    names = [item.name for item in job.spec.environments]
    return read_rows(job.spec.dataset, base=base, task_names=names, environment=environment)
