"""`kuberoll export`: writes a run's trajectories in a trainer's format."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kuberoll_api.plugins import EXPORTS, installed
from kuberoll_workers.data.stop_reasons import FINISHED
from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_workers.data.sampling import Distribution
    from kuberoll_workers.dataset.expansion import PromptGroup
    from kuberoll_workers.output.run_files import RunFiles

_NAMED = 5


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.option("--to", type=click.Choice(list(installed(EXPORTS))), required=True, help="The trainer's format.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File (.jsonl, .parquet or .pt) or directory.  [default: JOB.FORMAT.EXT in the working directory]",
)
@click.option("--environment", "environments", multiple=True, metavar="NAME", help="Only this environment; repeatable.")
@click.option(
    "--stop-reason",
    "stop_reasons",
    multiple=True,
    type=click.Choice(list(FINISHED)),
    help="Only this stop reason; repeatable.",
)
@click.option("--min-reward", type=float, metavar="X", help="Only trajectories with a total reward of at least X.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Only trajectories whose responses are all of the whole distribution at this temperature.",
)
@click.option("--best-of-group", is_flag=True, help="Only the sample with the highest reward of each prompt.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N trajectories.")
@click.option(
    "--environment-role",
    type=click.Choice(["user", "tool"]),
    default="user",
    show_default=True,
    help="Role of environments' messages, if the format has none for them.",
)
@click.option(
    "--paths",
    type=click.Choice(["all", "own"]),
    default="all",
    show_default=True,
    help="Of agents' trajectories: all paths, each as a row, or only the trajectory's own.",
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["simulated", "mixed-sampling"]),
    help="Also export what is refused otherwise: a run of the Simulated engine, or trajectories that were sampled in "
    "different ways into one file. Repeatable.",
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    metavar="JOB.yaml",
    help="The run's job, for nemo-gym: its inputs are then the rows of the job's dataset.",
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def export(
    run: str,
    to: str,
    output: Path | None,
    environments: tuple[str, ...],
    stop_reasons: tuple[str, ...],
    min_reward: float | None,
    temperature: float | None,
    best_of_group: bool,
    limit: int | None,
    environment_role: Literal["user", "tool"],
    paths: Literal["all", "own"],
    allow: tuple[str, ...],
    manifest: Path | None,
    overrides: tuple[str, ...],
    force: bool,
) -> None:
    """Write the trajectories of a run in a format that a trainer's own loader reads.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. The file appears only when it is complete. A run of
    the Simulated engine is refused: no model wrote its responses.
    """
    from kuberoll_api.manifest.loading import ManifestError, load_job
    from kuberoll_workers.analysis.export.exporting import export_run
    from kuberoll_workers.analysis.export.formats import ExportError
    from kuberoll_workers.analysis.export.selection import Selection
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.environments.registry import UnusableEnvironment
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles

    if (manifest is not None or overrides) and to != "nemo-gym":
        raise click.UsageError(f"--manifest and --set are for --to nemo-gym; {to} has no rows of the dataset")
    if overrides and manifest is None:
        raise click.UsageError("--set changes a field of the --manifest, which is missing")
    selection = Selection(
        environments=frozenset(environments),
        stop_reasons=frozenset(stop_reasons),
        min_reward=min_reward,
        temperature=temperature,
        best_of_group=best_of_group,
        limit=limit,
    )
    try:
        files = RunFiles(run)
        groups = None if manifest is None else _groups(load_job(manifest, overrides), manifest, files)
        exported = export_run(
            files,
            to=to,
            output=output,
            selection=selection,
            role=environment_role,
            branches=paths == "all",
            force=force,
            allow_simulated="simulated" in allow,
            allow_mixed_sampling="mixed-sampling" in allow,
            groups=groups,
        )
    except (
        DatasetError, ExportError, ManifestError, NotARun, RecordError, RunRefused, UnusableEnvironment,
    ) as error:  # fmt: skip
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    counts = exported.counts
    left_out = "".join(f", {count} left out: {reason}" for reason, count in sorted(counts.left_out.items()))
    branches = f" with {counts.branches} branches" if counts.branches else ""
    click.echo(f"{counts.selected} trajectories{branches}{left_out}")
    for path in exported.paths:
        click.echo(f"  {path}")
    for line in _sampling_lines(exported.sampling):
        click.echo(line)


def _sampling_lines(found: Sequence[Distribution | None]) -> Iterator[str]:
    """What a trainer has to be told, or cannot be, of the distributions of an exported file."""
    from kuberoll_workers.data.sampling import in_words, unlike

    for one in found[:_NAMED]:
        if one is not None:
            yield f"  sampled with {in_words(one)}"
        for problem in unlike(one, temperature=0.0 if one is None else one["temperature"]):
            yield f"  warning: {problem}"
    if len(found) > _NAMED:
        yield f"  and in {len(found) - _NAMED} other ways"


def _groups(job: RolloutJob, manifest: Path, files: RunFiles) -> Iterator[PromptGroup]:
    """The prompt groups of the run's dataset.

    Raises:
        DatasetError: A row is invalid.
        ExportError: The dataset is not the run's.
        UnusableEnvironment: An environment that gives or checks rows cannot be created.
    """
    from kuberoll_workers.analysis.export.formats import ExportError
    from kuberoll_workers.dataset.inputs import prompt_groups, scan
    from kuberoll_workers.local.options import import_directories
    from kuberoll_workers.worker.environments import isolated_environment_factory, local_paths

    base = manifest.parent
    # As for a run: an entrypoint's module may be next to the manifest, or in the working directory.
    sys.path[:0] = import_directories(base)
    rows_of = isolated_environment_factory(job, protected=local_paths(files.location))
    inputs, of_run = scan(job, base=base, environment=rows_of), files.manifest()
    if of_run is not None and of_run.inputs.get("digest") != inputs.digest:
        raise ExportError(
            f"--manifest {manifest}: its dataset is not the one that {files.location} was made from "
            f"({of_run.inputs.get('rows')} rows then, {inputs.rows} now): give the manifest of the run, with the rows "
            "that it had; or leave it out, and the inputs are what the trajectories tell of them"
        )
    return prompt_groups(job, base=base, environment=rows_of, epochs=1)
