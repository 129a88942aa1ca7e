"""`kuberoll report`: writes a run as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kuberoll_workers.data.text import visible


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File.  [default: report.html next to the run's files]",
)
@click.option(
    "--tokenizer",
    metavar="DIR|ID",
    help="Tokenizer, for the texts of single tokens.  [default: the run's own, if it is on this machine]",
)
def report(run: str, output: Path | None, tokenizer: str | None) -> None:
    """Write a run as one HTML page: its numbers, and its trajectories to read and search.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. The page needs no network and no other file. The
    exit code is 2 if there is no run, or it cannot be read.
    """
    from kuberoll_workers.analysis.report.make import PAGE, read_report
    from kuberoll_workers.analysis.report.token_texts import TokenizerUnusable, load_texts
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.journal import write_atomically
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles
    from kuberoll_workers.output.storage import StorageError

    try:
        found = RunFiles(run)
        made = read_report(found, texts=None if tokenizer is None else load_texts(tokenizer))
        if output is None:
            where = found.write(PAGE, made.page)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(output, made.page)
            where = str(output)
    except (NotARun, RecordError, RunRefused, StorageError, TokenizerUnusable, OSError) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    sample = "" if made.shown == made.offered else f", {made.shown} of them to read"
    click.echo(f"{made.offered} trajectories{sample}, {len(made.page) / 1e6:.1f} MB")
    click.echo(f"  {where}")
