"""`kuberoll aggregate`: computes the numbers of a run from its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_api.manifest.loading import ManifestError, load_job
from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
    from kuberoll_workers.analysis.aggregation.columns import MakeEnvironment
    from kuberoll_workers.analysis.aggregation.environments import EnvironmentSummary
    from kuberoll_workers.environments.interface import EnvironmentInterface


@click.command()
@click.argument("locations", metavar="DIR|URI...", nargs=-1, required=True)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    help="The RolloutJob, to also compute its environments' own metrics; runs their code.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Metrics file; - for standard output (per-task metrics omitted).  [default: next to the first run's files]",
)
@click.option(
    "--success-threshold",
    type=float,
    help="Rewards of at least this are successes.  [default: 1 if all rewards are 0 or 1]",
)
def aggregate(
    locations: tuple[str, ...], manifest: Path | None, output: Path | None, success_threshold: float | None
) -> None:
    """Compute the numbers of the run whose trajectories are in DIR or at URI.

    Several locations may hold parts of one run. The exit code is 2 if there is no run, or the locations belong to
    different runs.
    """
    from rich.console import Console

    from kuberoll_workers.analysis.aggregation.aggregates import aggregate as compute
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles
    from kuberoll_workers.output.storage import StorageError

    try:
        make, names = _environments(manifest)
        runs = [RunFiles(location) for location in locations]
        found = compute(runs, make=make, environments=names, threshold=success_threshold)
        if output is None:
            files = found.write_beside(runs[0])
        elif str(output) == "-":
            click.echo(found.encode(), nl=False)
            files = []
        else:
            files = _write(found, output)
    except (ManifestError, NotARun, RunRefused, RecordError, StorageError, OSError) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    show(found, files, locations[0], Console(highlight=False, stderr=str(output) == "-"))


def _environments(manifest: Path | None) -> tuple[MakeEnvironment | None, list[str]]:
    """A function that creates the manifest's environments, and their names."""
    if manifest is None:
        return None, []
    from kuberoll_workers.environments import registry
    from kuberoll_workers.worker.environments import environment_of

    job = load_job(manifest)
    # An entrypoint's module may be next to the manifest, or in the working directory.
    sys.path[:0] = list(dict.fromkeys([str(manifest.parent.resolve()), str(Path.cwd())]))
    specs = {spec.name: spec for spec in job.spec.environments}

    def make(name: str) -> EnvironmentInterface:
        if name not in specs:
            raise registry.UnusableEnvironment(f"{manifest} has no environment {name!r}")
        return environment_of(specs[name])

    return make, list(specs)


def _write(found: Aggregates, output: Path) -> list[str]:
    from kuberoll_workers.analysis.aggregation.aggregates import write_lines
    from kuberoll_workers.output.journal import write_atomically

    tasks = output.with_name(f"{output.stem}-tasks.jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_lines(tasks, found.task_lines())
    write_atomically(output, found.encode())
    return [str(output), str(tasks)]


def show(found: Aggregates, files: list[str], location: str, console: Console) -> None:
    """Print the table of environments, failures, remarks, and the locations of the files."""
    from rich.text import Text

    from kuberoll_workers.analysis.failures import print_causes, print_metrics_failures

    def line(text: str, style: str = "") -> None:
        console.print(Text(visible(text), style=style), soft_wrap=True)

    console.print(_table(found))
    for name, summary in found.summaries.items():
        ended = ", ".join(f"{reason} {count}" for reason, count in sorted(summary.stop_reasons.items()))
        line(f"{name}: {ended or 'no finished trajectory'}")
        if isinstance(summary.metrics, dict) and summary.metrics:
            shown = ", ".join(f"{key} {_short(value)}" for key, value in summary.metrics.items())
            line(f"{name}: {shown[:1000]}")
    print_causes(found.contents.causes.by_count(), location, console)
    print_metrics_failures(found.summaries, location, console)
    remarks = {"planned but not finished": found.missing, "stored twice, counted once": found.duplicates}
    for remark, number in remarks.items():
        if number:
            line(f"{number} trajectories {remark}")
    for reason, lot in found.tail.dropped.items():
        line(f"{lot.trajectories} trajectories dropped: {reason}")
    for warning in found.warnings():
        line(warning, "yellow")
    for file in files:
        line(f"  {file}")


def _table(found: Aggregates) -> Table:
    from kuberoll_workers.commands.environment_table import environment_table

    return environment_table(
        found.summaries,
        {
            "done": lambda summary: str(summary.trajectories),
            "missing": lambda summary: "-" if summary.missing is None else str(summary.missing),
            "reward": _reward,
            "tries": _tries,
            "no signal": lambda summary: f"{summary.equal_groups / summary.groups:.1%}" if summary.groups else "-",
            "tokens": lambda summary: str(summary.generated_tokens),
        },
    )


def _reward(summary: EnvironmentSummary) -> str:
    if summary.mean_reward is None:
        return "-"
    runs = summary.across_repeats
    interval = "" if runs.low is None or runs.high is None else f"\n{runs.low:.2f} to {runs.high:.2f}"
    return f"{summary.mean_reward:.3f}{interval}"


def _tries(summary: EnvironmentSummary) -> str:
    success = summary.success
    if success is None:
        return "-"
    tries = list(success.pass_at_k.items())
    first_and_last = dict([tries[0], tries[-1]]).items()
    if success.threshold is None:
        return "\n".join(f"best@{k} {value:.4g}" for k, value in first_and_last)
    return "\n".join(f"pass@{k} {value:.1f}%" for k, value in first_and_last)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
