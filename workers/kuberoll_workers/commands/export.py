"""`kuberoll export`: writes a run's trajectories in a trainer's format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from kuberoll_workers.data.text import visible

FORMATS = ("openai-chat", "sharegpt", "trl", "verl", "nemo-rl")


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.option("--to", type=click.Choice(FORMATS), required=True, help="The trainer's format.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File (.jsonl or .parquet) or directory.  [default: JOB.FORMAT.EXT in the working directory]",
)
@click.option("--environment", "environments", multiple=True, metavar="NAME", help="Only this environment; repeatable.")
@click.option(
    "--stop-reason",
    "stop_reasons",
    multiple=True,
    type=click.Choice(["terminated", "truncated", "max_turns"]),
    help="Only this stop reason; repeatable.",
)
@click.option("--min-reward", type=float, metavar="X", help="Only trajectories with a total reward of at least X.")
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
    "--allow-simulated", is_flag=True, help="Also export a run of the Simulated engine, to try out a trainer."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def export(
    run: str,
    to: str,
    output: Path | None,
    environments: tuple[str, ...],
    stop_reasons: tuple[str, ...],
    min_reward: float | None,
    best_of_group: bool,
    limit: int | None,
    environment_role: Literal["user", "tool"],
    allow_simulated: bool,
    force: bool,
) -> None:
    """Write the trajectories of a run in a format that a trainer's own loader reads.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. The file appears only when it is complete. A run of
    the Simulated engine is refused: no model wrote its responses.
    """
    from kuberoll_workers.analysis.export.exporting import export_run
    from kuberoll_workers.analysis.export.formats import ExportError
    from kuberoll_workers.analysis.export.selection import Selection
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles

    selection = Selection(
        environments=frozenset(environments),
        stop_reasons=frozenset(stop_reasons),
        min_reward=min_reward,
        best_of_group=best_of_group,
        limit=limit,
    )
    try:
        exported = export_run(
            RunFiles(run),
            to=to,
            output=output,
            selection=selection,
            role=environment_role,
            force=force,
            allow_simulated=allow_simulated,
        )
    except (ExportError, NotARun, RecordError, RunRefused) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    counts = exported.counts
    left_out = "".join(f", {count} left out: {reason}" for reason, count in sorted(counts.left_out.items()))
    click.echo(f"{counts.selected} trajectories{left_out}")
    click.echo(f"  {exported.path}")
