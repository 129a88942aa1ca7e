"""`kuberoll show`: shows the trajectories of a run in a terminal, as a table or turn by turn."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from kuberoll_workers.data.stop_reasons import FAILED, OUTCOMES
from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from kuberoll_workers.analysis.report.row import TrajectoryRow
    from kuberoll_workers.output.precedence import EndedRecord

_PIPE_WIDTH = 240

Order = Literal["stored", "best", "worst"]


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.option("--task", type=click.IntRange(min=0), metavar="N", help="Show this task's trajectories, turn by turn.")
@click.option("--rollout", type=click.IntRange(min=0), metavar="M", help="With --task: only this sample.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Maximum number of rows."
)
@click.option("--environment", "environments", multiple=True, metavar="NAME", help="Only this environment; repeatable.")
@click.option(
    "--stop-reason",
    "stop_reasons",
    multiple=True,
    type=click.Choice(OUTCOMES),
    help="Only this stop reason; repeatable.",
)
@click.option("--failed", is_flag=True, help="Only failures; below them each distinct cause with its traceback.")
@click.option(
    "--sort",
    type=click.Choice(["stored", "best", "worst"]),
    default="stored",
    show_default=True,
    help="As stored, or by reward, highest or lowest first. Failures have no reward and come last.",
)
def show(
    run: str,
    task: int | None,
    rollout: int | None,
    limit: int,
    environments: tuple[str, ...],
    stop_reasons: tuple[str, ...],
    failed: bool,
    sort: Order,
) -> None:
    """Show the trajectories of a run: finished, failed and dropped ones.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. With --sort stored, reading ends with the last row
    that is shown. The exit code is 1 if nothing matches, and 2 if there is no run, or it cannot be read.
    """
    from rich.console import Console

    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles

    if rollout is not None and task is None:
        raise click.UsageError("--rollout needs --task: it is the index of a sample within its task")
    wanted = TrajectoryFilter(
        frozenset(environments), frozenset({*stop_reasons, *(FAILED if failed else ())}), task, rollout
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    try:
        selected = wanted.select(RunFiles(run).read())
        if task is not None:
            found = _print_turns(selected, limit, console)
        elif wanted.outcomes == FAILED:
            found = _print_failures(selected, limit, run, console)
        else:
            found = _print_table(selected, limit, sort, console)
    except (NotARun, RecordError, RunRefused, OSError) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    if not found:
        click.echo(f"{run}: no such trajectory", err=True)
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """Criteria of the trajectories to show; empty and None match all."""

    environments: frozenset[str]
    outcomes: frozenset[str]
    task: int | None
    rollout: int | None

    def select(self, records: Iterable[EndedRecord]) -> Iterator[tuple[EndedRecord, TrajectoryRow]]:
        """Matching records with their rows; stops after a match that task and rollout identify uniquely."""
        from kuberoll_workers.analysis.report.row import row_of

        for record in records:
            if self.task not in (None, record.task_index) or self.rollout not in (None, record.rollout_index):
                continue
            row = row_of(record)
            if (self.environments and row.environment not in self.environments) or (
                self.outcomes and row.outcome not in self.outcomes
            ):
                continue
            yield record, row
            if self.rollout is not None:
                return


def _print_turns(selected: Iterator[tuple[EndedRecord, TrajectoryRow]], limit: int, console: Console) -> bool:
    from kuberoll_workers.analysis.report.turns import print_trajectory

    found = False
    for record, row in itertools.islice(selected, limit):
        if found:
            console.print()
        print_trajectory(record, row, console)
        found = True
    return found


def _print_table(
    selected: Iterator[tuple[EndedRecord, TrajectoryRow]], limit: int, order: Order, console: Console
) -> bool:
    from kuberoll_workers.analysis.report.turns import trajectory_table

    rows = _first((row for _, row in selected), limit + 1, order)
    if not rows:
        return False
    console.print(trajectory_table(rows[:limit], console.width))
    if len(rows) > limit:
        console.print(f"There are more than {limit}; use --limit N to show N of them.", style="dim", soft_wrap=True)
    return True


def _print_failures(
    selected: Iterator[tuple[EndedRecord, TrajectoryRow]], limit: int, run: str, console: Console
) -> bool:
    """Print the table of failures, and each distinct cause of all of them."""
    from kuberoll_workers.analysis.failures import print_failures
    from kuberoll_workers.analysis.report.turns import trajectory_table
    from kuberoll_workers.data.failure_causes import FailureCauses
    from kuberoll_workers.data.record import FailureRecord

    rows: list[TrajectoryRow] = []
    causes, count = FailureCauses(), 0
    for record, row in selected:
        if isinstance(record, FailureRecord):
            causes.add(record)
            count += 1
            if len(rows) < limit:
                rows.append(row)
    if not rows:
        return False
    console.print(trajectory_table(rows, console.width))
    if count > limit:
        console.print(f"These are {limit} of {count}; use --limit N to show N of them.", style="dim", soft_wrap=True)
    print_failures(causes, run, console)
    return True


def _first(rows: Iterator[TrajectoryRow], count: int, order: Order) -> Sequence[TrajectoryRow]:
    """The first rows in this order; only these are held in memory."""
    if order == "stored":
        return list(itertools.islice(rows, count))
    sign = -1.0 if order == "best" else 1.0

    def place(row: TrajectoryRow) -> tuple[bool, float]:
        return row.reward is None, sign * (row.reward or 0.0)

    return heapq.nsmallest(count, rows, key=place)
