"""`kuberoll report`: writes a run, or the comparison of two, as one HTML page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from kuberoll_workers.analysis.comparison.compare import Comparison
    from kuberoll_workers.analysis.comparison.metrics import Metric
    from kuberoll_workers.analysis.report.token_texts import TokenTexts


@click.command()
@click.argument("runs", metavar="DIR|URI [DIR|URI]", nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File.  [default: report.html next to the run's files; for two runs A-vs-B.html in the working directory]",
)
@click.option(
    "--tokenizer",
    metavar="DIR|ID",
    help="Tokenizer, for the texts of single tokens.  [default: the run's own, if it is on this machine]",
)
def report(runs: tuple[str, ...], output: Path | None, tokenizer: str | None) -> None:
    """Write a run as one HTML page: its numbers, and its trajectories to read and search.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. With two of them the page compares the runs A and B:
    settings that differ, metrics with their differences, and the tasks that became better or worse.

    The page needs no network and no other file. The exit code is 2 if there is no run, it cannot be read, or two runs
    have nothing in common.
    """
    from kuberoll_workers.analysis.comparison.compare import NotComparable
    from kuberoll_workers.analysis.report.token_texts import TokenizerUnusable, load_texts
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun
    from kuberoll_workers.output.storage import StorageError

    if len(runs) > 2:
        raise click.UsageError(f"found {len(runs)} runs: give one to report, or two to compare")
    try:
        texts = None if tokenizer is None else load_texts(tokenizer)
        if len(runs) == 1:
            _report(runs[0], output, texts)
        else:
            _compare(runs[0], runs[1], output, texts)
    except (
        NotARun, NotComparable, RecordError, RunRefused, StorageError, TokenizerUnusable, OSError,
    ) as error:  # fmt: skip
        click.echo(visible(str(error)), err=True)
        sys.exit(2)


def _report(run: str, output: Path | None, texts: TokenTexts | None) -> None:
    from kuberoll_workers.analysis.report.make import PAGE, read_report
    from kuberoll_workers.output.run_files import RunFiles

    found = RunFiles(run)
    made = read_report(found, texts=texts)
    where = found.write(PAGE, made.page) if output is None else _write(output, made.page)
    sample = "" if made.shown == made.offered else f", {made.shown} of them to read"
    click.echo(f"{made.offered} trajectories{sample}, {len(made.page) / 1e6:.1f} MB")
    click.echo(f"  {where}")


def _compare(first: str, second: str, output: Path | None, texts: TokenTexts | None) -> None:
    from rich.console import Console

    from kuberoll_workers.analysis.comparison.compare import compare_runs
    from kuberoll_workers.analysis.comparison.page import render
    from kuberoll_workers.output.run_files import RunFiles

    comparison = compare_runs(RunFiles(first), RunFiles(second), texts=texts)
    where = _write(output or Path(f"{_name(first)}-vs-{_name(second)}.html"), render(comparison))
    print_comparison(comparison, Console(highlight=False))
    click.echo(f"  {where}")


def _name(location: str) -> str:
    """Last part of a location, for file names."""
    return re.sub(r"[^\w.-]+", "-", location.rstrip("/").rpartition("/")[2])[:60].strip(".-") or "run"


def _write(path: Path, page: bytes) -> str:
    from kuberoll_workers.output.journal import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return str(path)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the metrics of both runs, how many tasks changed, and what limits the comparison."""
    from rich.text import Text

    for letter, run in zip("AB", comparison.runs, strict=True):
        console.print(Text(visible(f"{letter}: {run['location']}, {run['finished']} trajectories")), soft_wrap=True)
    for note in comparison.settings.notes:
        console.print(Text(visible(f"note: {note}"), style="yellow"), soft_wrap=True)
    everything, *single = comparison.environments
    console.print(_table("mean over tasks", [(metric.name, metric) for metric in everything.metrics]))
    if single:
        console.print(
            _table("environment", [(f"{part.name}: {part.metrics[0].name}", part.metrics[0]) for part in single])
        )
    if everything.changes is not None:
        changes = everything.changes
        console.print(f"tasks: {changes.better} better in B, {changes.worse} worse, {changes.equal} equal")
    different = len(comparison.settings.different)
    if different or comparison.settings.equal:
        console.print(f"settings: {different} differ, {comparison.settings.equal} are equal")


def _table(title: str, rows: Iterable[tuple[str, Metric]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column(title, overflow="fold", min_width=18)
    for name in ("A", "B", "B - A", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, metric in rows:
        table.add_row(Text(visible(name)), *_cells(metric))
    return table


def _cells(metric: Metric) -> list[str]:
    # Shares in percent, and their differences in percentage points.
    factor, unit = {"number": (1, ""), "share": (100, "%"), "seconds": (1, " s")}[metric.kind]
    found = metric.difference

    def cell(value: float | None, sign: str = "") -> str:
        if value is None:
            return "-"
        form = ",.0f" if abs(factor * value) >= 1000 else ".3g"
        return f"{factor * value:{sign}{form}}{'' if sign else unit}"

    interval = "-" if found.low is None else f"{cell(found.low, '+')} to {cell(found.high, '+')}"
    return [cell(found.first), cell(found.second), cell(found.difference, "+"), interval]
