"""Export of a run's trajectories to a trainer's file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kuberoll_workers.analysis.export.formats import (
    NEMO_GYM,
    Container,
    EnvironmentRole,
    ExportError,
    Format,
    format_named,
)
from kuberoll_workers.analysis.export.nemo_gym_files import GymFiles, TaskRows, write_gym_files
from kuberoll_workers.analysis.export.samplings import Samplings, with_sampling
from kuberoll_workers.analysis.export.selection import Selection, SelectionCounts, select
from kuberoll_workers.analysis.export.views import has_calls
from kuberoll_workers.analysis.export.writers import write_document, write_rows
from kuberoll_workers.analysis.paths import OWN_PATH, paths
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.output import records
from kuberoll_workers.output.run_directory import MODEL
from kuberoll_workers.output.run_files import RunFiles

ENGINE = "generation.engine"
"""Path of the engine's name in a manifest's identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Result of an export.

    Attributes:
        path: The written file.
        counts: Numbers of exported and of omitted trajectories.
        beside: Further files that belong to it.
        sampling: The distributions that its responses were sampled from, each once, if its trainer depends on them;
            None among them: unknown.
    """

    path: Path
    counts: SelectionCounts
    beside: tuple[Path, ...] = ()
    sampling: tuple[Distribution | None, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All written files."""
        return self.path, *self.beside


def export_run(
    files: RunFiles,
    *,
    to: str,
    output: Path | None = None,
    selection: Selection | None = None,
    role: EnvironmentRole = "user",
    branches: bool = True,
    force: bool = False,
    allow_simulated: bool = False,
    allow_mixed_sampling: bool = False,
    groups: Iterable[PromptGroup] | None = None,
) -> ExportResult:
    """Write a run's trajectories in a trainer's format. Memory: one row group, and about 100 bytes per trajectory.

    Args:
        to: Name of the format.
        output: File, or directory for it; None for the working directory.
        role: Role of environments' messages, if the format has none for them.
        branches: Also branches of trajectories, as rows of their own; files of NeMo Gym have a row for each rollout.
        force: Overwrite an existing file.
        allow_simulated: Export a run of the Simulated engine, whose responses no model wrote.
        allow_mixed_sampling: Write rows that were sampled in different ways into one file, although the format's
            trainer assumes one.
        groups: The run's dataset, for formats with its rows; None: what the trajectories tell of them.

    Raises:
        DatasetError: A row is invalid.
        ExportError: The options are invalid, the run is simulated, no trajectory is selected, or they were sampled in
            different ways.
        RunRefused: The run's manifest cannot be read.
        RecordError: A stored line is not a trajectory.
    """
    selection = selection or Selection()
    form = format_named(to, role)
    path, container = target(form, output, name=run_name(files))
    if not allow_simulated:
        _refuse_simulated(files)
    if form.name == NEMO_GYM:
        counts = SelectionCounts()
        if not _export_gym_files(files, path, selection, counts, groups=groups, force=force):
            raise ExportError(f"{files.location}: {_nothing(selection, counts)}")
        return ExportResult(path=path, counts=counts, beside=GymFiles.beside(path).all[:-1])
    columns = form.schema if container == "parquet" else None
    assumption = None if allow_mixed_sampling else form.assumption
    read = partial(_read, files, branches=branches)
    counts, samplings = SelectionCounts(), Samplings(assumption)

    def write(*, calls: bool) -> bool:
        def rows() -> Iterator[dict[str, Any]]:
            for record in select(read, selection, counts):
                for number, path in paths(record):
                    if columns is not None and not calls and has_calls(path):
                        raise _CallsFound
                    if (mixed := samplings.add(path)) is not None:
                        raise ExportError(_unlike_others(files, to, mixed))
                    counts.branches += number != OWN_PATH
                    yield form.row(path, role, number)

        if form.document is not None:
            return write_document(path, rows(), form.document, force=force)
        schema = None if columns is None else columns(calls)
        return write_rows(path, rows(), container=container, schema=schema, force=force)

    try:
        written = write(calls=False)
    except _CallsFound:
        # Fields of calls in all messages would be null in those without, which chat templates mistake for calls: only
        # files that need them have them.
        counts, samplings = SelectionCounts(), Samplings(assumption)
        written = write(calls=True)
    if not written:
        raise ExportError(f"{files.location}: {_nothing(selection, counts)}")
    sampling = () if form.assumption is None else tuple(samplings.found)
    return ExportResult(path=path, counts=counts, sampling=sampling)


def _read(files: RunFiles, *, branches: bool = True) -> Iterator[TrajectoryRecord]:
    """The finished trajectories, with the `sampling` of each response."""
    manifest = files.manifest()
    usual = None if manifest is None else manifest.sampling
    for record in files.read().finished():
        yield with_sampling(record if branches else replace(record, branches=None), usual)


def _export_gym_files(
    files: RunFiles,
    path: Path,
    selection: Selection,
    counts: SelectionCounts,
    *,
    groups: Iterable[PromptGroup] | None,
    force: bool,
) -> bool:
    manifest = files.manifest()
    model = None if manifest is None else manifest.identity.get(MODEL)
    with tempfile.TemporaryFile(prefix="kuberoll-") as file:
        return write_gym_files(
            path,
            select(partial(_read, files), selection, counts),
            _failed(files, selection),
            rows=None if groups is None else TaskRows(file, groups),
            model=model or "policy",
            force=force,
        )


def _failed(files: RunFiles, selection: Selection) -> Iterator[FailureRecord]:
    """Failures of the selected environments, each once."""
    if next(records.failures(files.storage), None) is None:
        return
    for record in files.read():
        if isinstance(record, FailureRecord) and record.task_name in (selection.environments or (record.task_name,)):
            yield record


class _CallsFound(Exception):
    """A trajectory calls tools, and the file has no columns for that."""


def _refuse_simulated(files: RunFiles) -> None:
    manifest = files.manifest()
    if manifest is not None and manifest.identity.get(ENGINE) == "Simulated":
        raise ExportError(
            f"{files.location}: a run of the Simulated engine: no model wrote its responses, and their "
            "log-probabilities are not those of a policy; run the job with generation.engine: VLLM, or, to try out a "
            "trainer, export it with --allow simulated"
        )


def run_name(files: RunFiles) -> str:
    """Name of a run for file names; never a path, whatever its manifest says."""
    manifest = files.manifest()
    name = files.location.rstrip("/").rpartition("/")[2] if manifest is None else manifest.job
    return re.sub(r"[^\w.-]+", "-", name)[:100].strip(".-") or "trajectories"


def target(form: Format, output: Path | None, *, name: str) -> tuple[Path, Container]:
    """The file to write and its type, which follows from its suffix.

    Raises:
        ExportError: The format does not support this file type.
    """
    output = output if output is not None else Path()
    suffix = output.suffix.removeprefix(".")
    if output.is_dir() or suffix not in ("jsonl", "parquet", "json", "pt"):
        container = form.containers[0]
        return output / f"{name}.{form.name}.{container}", container
    for container in form.containers:
        if suffix == container:
            return output, container
    endings = " or ".join(f".{container}" for container in form.containers)
    raise ExportError(f"--output {output}: {form.name} comes in files that end in {endings}")


def _unlike_others(files: RunFiles, to: str, mixed: str) -> str:
    return (
        f"{files.location}: {mixed}, but a trainer that reads {to} computes log-probabilities of one distribution: "
        "export those of one temperature with --temperature, or all with --allow mixed-sampling, for fine-tuning, or "
        "for a trainer of your own that reads each row's `sampling`"
    )


def _nothing(selection: Selection, counts: SelectionCounts) -> str:
    unknown = sorted(selection.environments - counts.environments)
    if unknown and counts.environments:
        there = ", ".join(sorted(counts.environments))
        return f"no trajectory belongs to the environment {', '.join(unknown)}; the run has {there}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.left_out.items()))
    return f"no trajectory is selected ({reasons or 'there are none'}); nothing was written"
