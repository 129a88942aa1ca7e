"""`kuberoll top`: shows the jobs of a cluster and their throughput."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from kuberoll_operator.console.connection import ClusterOptions, cluster_options, open_connection, run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kuberoll_operator.console.rates import JobRow

_PIPE_WIDTH = 240
_UPDATE_SECONDS = 2.0


@click.command()
@cluster_options
@click.option("--all-namespaces", "-A", "everywhere", is_flag=True, help="Jobs of all namespaces.")
@click.option("--once", is_flag=True, help="Print the table once and exit; the default without a terminal.")
def top(cluster: ClusterOptions, everywhere: bool, once: bool) -> None:
    """Show the RolloutJobs of a namespace and their throughput.

    Turns, tokens and trajectories in flight are read from the workers through the API server. If that is not possible,
    rates come from the status, which is updated less often; a note says for which jobs. Progress, reward, failures and
    the remaining time always come from the status, and so do the reasons for which jobs wait, below the table.

    Sandboxes of trajectories have a table of their own, with counts since the workers started. LOST were gone before
    their trajectory had ended, which then starts over; LEFT could not be removed, and end by themselves.
    """
    run(_top(cluster, everywhere, once or not sys.stdout.isatty()))


async def _top(cluster: ClusterOptions, everywhere: bool, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    from kuberoll_operator.console.job_sampler import STATUS_SECONDS, JobSampler
    from kuberoll_operator.kube.errors import TooMany, Unavailable

    namespace = None if everywhere else cluster.resolved_namespace()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    async with open_connection(cluster) as connection:
        jobs = JobSampler(connection, namespace)
        rows = await jobs.sample()
        if once:
            if any(row.phase == "Running" for row in rows):
                # Rates need two samples.
                await asyncio.sleep(_UPDATE_SECONDS)
                rows = await jobs.sample()
                deadline = asyncio.get_running_loop().time() + STATUS_SECONDS
                while _lacks_rates(rows, jobs.by_status) and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(_UPDATE_SECONDS)
                    rows = await jobs.sample()
            console.print(page(rows, jobs.notes, namespace))
            return 0
        with Live(page(rows, jobs.notes, namespace), console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(_UPDATE_SECONDS)
                try:
                    rows, notes = await jobs.sample(), jobs.notes
                except (TooMany, Unavailable) as error:
                    notes = [f"the API server does not answer: {error.message}"]
                live.update(page(rows, notes, namespace), refresh=True)


def _lacks_rates(rows: Sequence[JobRow], by_status: Sequence[tuple[str, str]]) -> bool:
    """True if a job that is read from its status has no rate yet: its progress was not written anew."""
    return any(row.turns_per_second is None for row in rows if (row.namespace, row.name) in by_status)


def page(rows: Sequence[JobRow], notes: Sequence[str], namespace: str | None) -> RenderableType:
    """The table, and notes about it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows:
        where = "in the cluster" if namespace is None else f"in namespace {namespace}"
        return Text(f"There is no RolloutJob {where}.")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in (*(("NAMESPACE",) if namespace is None else ()), "NAME", "PHASE"):
        table.add_column(name, no_wrap=True)
    for name in ("PROGRESS", "TURNS/S", "TOKENS/S", "REWARD", "IN FLIGHT", "FAILED", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *((row.namespace,) if namespace is None else ()),
            row.name,
            row.phase,
            row.progress,
            _number(row.turns_per_second),
            _number(row.tokens_per_second),
            "-" if row.mean_reward is None else f"{row.mean_reward:.4g}",
            "-" if row.in_flight is None else str(row.in_flight),
            "-" if row.failed is None else str(row.failed),
            "-" if row.remaining_seconds is None else str(timedelta(seconds=row.remaining_seconds)),
        )
    # One line each, whatever the width: `kubectl describe rlj` has the whole message.
    waiting = [
        Text(f"{_name(row, namespace)}: {row.waiting}", no_wrap=True, overflow="ellipsis")
        for row in rows
        if row.waiting
    ]
    sandboxes = _sandboxes(rows, namespace)
    return Group(
        table,
        *([Text(), sandboxes] if sandboxes is not None else ()),
        *([Text(), *waiting] if waiting else ()),
        *(Text(note, style="dim") for note in notes),
    )


def _sandboxes(rows: Sequence[JobRow], namespace: str | None) -> RenderableType | None:
    """The table of the sandboxes of trajectories; None if no job has any."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("SANDBOXES OF", no_wrap=True)
    for name in ("IN USE", "WAITING", "STARTED", "NOT STARTED", "LOST", "LEFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if (counts := row.sandboxes) is not None:
            numbers = (counts.in_use, counts.waiting, counts.started, counts.failed, counts.lost, counts.left)
            table.add_row(_name(row, namespace), *(f"{number:,.0f}" for number in numbers))
    return table if table.row_count else None


def _name(row: JobRow, namespace: str | None) -> str:
    return row.name if namespace is not None else f"{row.namespace}/{row.name}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
