"""`kuberoll rescore`: recomputes the rewards of a run's trajectories."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_api.manifest.loading import ManifestError, load_job
from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_workers.analysis.rescore import InitialStates, RescoreCounts
    from kuberoll_workers.output.run_files import RunFiles
    from kuberoll_workers.output.storage import Storage


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    required=True,
    metavar="JOB.yaml",
    help="The job with the scoring environments, and with the dataset of the run.",
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest.")
@click.option("--output", metavar="DIR|URI", help="Output of the rescored run.  [default: DIR-rescored]")
@click.option("--environment", "environments", multiple=True, metavar="NAME", help="Only this environment; repeatable.")
@click.option("--resume", is_flag=True, help="Continue the rescoring in the output.")
@click.option("--failed", is_flag=True, help="Score only what the run left unscored, in the run itself.")
@click.option("--force", is_flag=True, help="Accept changed environment responses and a different dataset.")
def rescore(
    run: str,
    manifest: Path,
    overrides: tuple[str, ...],
    output: str | None,
    environments: tuple[str, ...],
    resume: bool,
    failed: bool,
    force: bool,
) -> None:
    """Recompute the rewards of a run's trajectories, without generating again.

    The stored responses are replayed to their environment, from the initial state of their dataset row on. A trajectory
    whose environment now answers differently is left unchanged. The original run is never changed. The exit code is 0
    only if no trajectory failed.

    With --failed, trajectories that failed because their grader was out of reach are scored in the run itself; nothing
    else of it changes. The exit code is 0 only if none is left.
    """
    if failed and (output or environments or resume):
        raise click.UsageError("--failed scores the run itself: it has no --output, --environment and --resume")
    try:
        job = load_job(manifest, overrides)
    except ManifestError as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)

    if failed:
        sys.exit(_score_failed(job, manifest.parent, run, force=force))

    from rich.console import Console

    from kuberoll_workers.analysis.rescore import RescoreRefused
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.environments.registry import UnusableEnvironment
    from kuberoll_workers.output.journal import JournalBroken
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun
    from kuberoll_workers.output.storage import StorageError

    destination = output or run.rstrip("/") + "-rescored"
    try:
        tallies = _rescore(job, manifest.parent, run, destination, environments, resume=resume, force=force)
    except (
        DatasetError, JournalBroken, NotARun, RecordError, RescoreRefused, RunRefused, StorageError,
        UnusableEnvironment,
    ) as error:  # fmt: skip
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    print_tallies(Console(highlight=False), tallies, destination)
    sys.exit(1 if any(tally.failed for tally in tallies.values()) else 0)


def _score_failed(job: RolloutJob, base: Path, run: str, *, force: bool) -> int:
    """Score what a run left unscored; returns the exit code."""
    from kuberoll_workers.analysis.aggregation.aggregates import aggregate
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.environments.registry import UnusableEnvironment
    from kuberoll_workers.local.preflight import JobRefused
    from kuberoll_workers.local.scoring import score_unscored
    from kuberoll_workers.output.journal import JournalBroken
    from kuberoll_workers.output.run_files import RunFiles
    from kuberoll_workers.output.storage import StorageError
    from kuberoll_workers.worker.environments import environment_factory

    try:
        scores = score_unscored(job, base=base, output=run, force=force)
        aggregate([files := RunFiles(run)], make=environment_factory(job)).write_beside(files)
    except (DatasetError, JobRefused, JournalBroken, RecordError, StorageError, UnusableEnvironment) as error:
        click.echo(visible(with_frames(error)), err=True)
        return 2
    names = sorted({*scores.scored, *scores.continuing, *scores.left})
    if not names:
        click.echo("nothing is unscored")
    for name in names:
        if count := scores.scored[name]:
            click.echo(f"{name}: {count} scored, mean reward {scores.reward[name] / count:.3f}")
        if count := scores.continuing[name]:
            click.echo(f"{name}: {count} have to go on with the policy: resume the run")
        if count := scores.left[name]:
            click.echo(f"{name}: {count} left unscored")
    for cause in scores.failures.causes.by_count():
        click.echo(visible(f"  {cause.count}: {cause.headline(400)}"))
    return 1 if scores.left.total() + scores.continuing.total() else 0


def _rescore(
    job: RolloutJob,
    base: Path,
    run: str,
    destination: str,
    environments: tuple[str, ...],
    *,
    resume: bool,
    force: bool,
) -> Mapping[str, RescoreCounts]:
    import asyncio
    import tempfile
    from contextlib import ExitStack

    from kuberoll_workers.analysis.aggregation.aggregates import aggregate
    from kuberoll_workers.analysis.rescore import InitialStates, open_rescored, refuse_other_dataset
    from kuberoll_workers.dataset.inputs import prompt_groups, scan
    from kuberoll_workers.local.options import import_directories
    from kuberoll_workers.output.run_files import RunFiles
    from kuberoll_workers.worker.environments import environment_factory, isolated_environment_factory, local_paths

    source = RunFiles(run)
    names = _names(job, environments)
    # An entrypoint's module may be next to the manifest, or in the working directory.
    sys.path[:0] = import_directories(base)
    make, protected = environment_factory(job), local_paths(run, destination)
    rows_of = isolated_environment_factory(job, protected=protected)
    inputs = scan(job, base=base, environment=rows_of).as_json()
    if not force:
        refuse_other_dataset(source, inputs)
    with ExitStack() as stack:
        storage = stack.enter_context(
            open_rescored(source, destination, job, inputs=inputs, resume=resume, force=force)
        )
        file = stack.enter_context(tempfile.TemporaryFile(prefix="kuberoll-"))
        states = InitialStates(file, prompt_groups(job, base=base, environment=rows_of, epochs=1))
        tallies = asyncio.run(_replay(job, source, storage, states, names, protected, force=force))
        aggregate([rescored := RunFiles(destination)], make=make).write_beside(rescored)
    return tallies


async def _replay(
    job: RolloutJob,
    source: RunFiles,
    output: Storage,
    states: InitialStates,
    names: list[str],
    protected: list[str],
    *,
    force: bool,
) -> Mapping[str, RescoreCounts]:
    from kuberoll_workers.analysis.rescore import Replayer, Rescoring
    from kuberoll_workers.dataset.inputs import repeats_of
    from kuberoll_workers.rollouts.seeds import job_seed
    from kuberoll_workers.rollouts.settings import RetryPolicy
    from kuberoll_workers.telemetry import RolloutMetrics
    from kuberoll_workers.worker.environments import open_environments

    rollout = job.spec.rollout
    retries = RetryPolicy(
        environment_attempts=rollout.retries.environment_attempts,
        backoff_seconds=rollout.retries.backoff_seconds,
    )
    async with open_environments(job, protected=protected) as environments:
        return await Rescoring(
            source,
            output,
            Replayer(
                environments,
                states,
                retries=retries,
                seed=job_seed(job.metadata.name, job.spec.generation.sampling.seed),
                max_turns=rollout.max_turns,
            ),
            environments=names,
            concurrency=rollout.concurrency,
            seconds=RolloutMetrics(job.metadata.name).journal_seconds,
            force=force,
            parquet=job.spec.output.format == "Parquet",
            group_sizes={name: count + rollout.groups.oversample for name, count in repeats_of(job).items()},
        ).run()


def _names(job: RolloutJob, asked: tuple[str, ...]) -> list[str]:
    from kuberoll_workers.analysis.rescore import RescoreRefused

    names = [environment.name for environment in job.spec.environments]
    for name in asked:
        if name not in names:
            raise RescoreRefused(f"--environment {name}: the manifest's environments are {', '.join(names)}")
    found = list(asked) or names
    for spec in job.spec.environments:
        if spec.name in found and spec.agent is not None:
            raise RescoreRefused(
                f"environment {spec.name!r} is an agent, whose reward is of what it did while it ran: it cannot be "
                "rescored; name the other environments with --environment"
            )
    return found


def print_tallies(console: Console, tallies: Mapping[str, RescoreCounts], destination: str) -> None:
    """Print a table of mean rewards before and after, and the trajectories that were not rescored."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("environment", overflow="ellipsis", no_wrap=True, min_width=12)
    for name in ("done", "old reward", "new reward", "changed", "left", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, tally in sorted(tallies.items()):
        means = ("-" if mean is None else f"{mean:.3f}" for mean in (tally.old_mean, tally.new_mean))
        counts = (tally.changed, tally.left.total(), tally.failed)
        table.add_row(name, str(tally.stored), *means, *map(str, counts))
    console.print(table)
    for name, tally in sorted(tallies.items()):
        for reason, count in sorted(tally.left.items()):
            console.print(Text(f"{name}: {count} left unchanged, {reason}", style="yellow"), soft_wrap=True)
        for example in filter(None, (tally.unscorable, *tally.examples)):
            console.print(Text(f"  {example}"), soft_wrap=True)
        if tally.earlier:
            console.print(Text(f"{name}: {tally.earlier} were rescored earlier"), soft_wrap=True)
    console.print(Text(f"  {destination}"), soft_wrap=True)
