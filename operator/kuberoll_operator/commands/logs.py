"""`kuberoll logs`: logs of a job's pods and the operator's events, merged by time."""

from __future__ import annotations

import sys
import time

import click

from kuberoll_operator.console.connection import (
    ClusterOptions,
    cluster_options,
    find_job,
    job_name,
    open_connection,
    run,
)
from kuberoll_operator.console.log_lines import LogLine, format_line, seconds_of
from kuberoll_operator.console.pod_logs import COMPONENTS

_WIDEST = 48


@click.command()
@click.argument("job", metavar="rlj/NAME")
@cluster_options
@click.option("--follow", "-f", is_flag=True, help="Follow until the job has ended, including new pods.")
@click.option("--since", metavar="DURATION", help="Only lines of this last period: 90s, 10m, 1h30m.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="At most N lines of each container.")
@click.option(
    "--component",
    "components",
    multiple=True,
    type=click.Choice(COMPONENTS),
    help="Only this component; operator means its events. Repeatable.",
)
@click.option("--previous", is_flag=True, help="Also logs of crashed containers that were restarted.")
@click.option("--raw", is_flag=True, help="Unchanged lines: JSON stays JSON.")
def logs(
    job: str,
    cluster: ClusterOptions,
    follow: bool,
    since: str | None,
    tail: int | None,
    components: tuple[str, ...],
    previous: bool,
    raw: bool,
) -> None:
    """Show the logs of a RolloutJob: the operator's events, engines, workers and finish, sorted by time.

    Every line names its pod; times are UTC. KubeRoll's own lines, which are JSON, are shown as text.
    """
    try:
        begin = None if since is None else time.time_ns() - seconds_of(since) * 1_000_000_000
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error
    run(_logs(job_name(job), cluster, follow, begin, tail, frozenset(components or COMPONENTS), previous, raw))


async def _logs(
    name: str,
    cluster: ClusterOptions,
    follow: bool,
    since: int | None,
    tail: int | None,
    components: frozenset[str],
    previous: bool,
    raw: bool,
) -> int:
    from kuberoll_operator.console.pod_logs import JobLogs, LogFilter

    namespace = cluster.resolved_namespace()
    width = 0

    def show(line: LogLine) -> None:
        nonlocal width
        width = min(_WIDEST, max(width, len(line.source)))
        click.echo(format_line(line, width=width, raw=raw))
        sys.stdout.flush()

    async with open_connection(cluster) as connection:
        await find_job(connection.client, namespace, name)
        log_filter = LogFilter(components, since, tail, previous)
        found = JobLogs(connection, namespace, name, log_filter, note=lambda text: click.echo(text, err=True))
        async for line in found.history():
            show(line)
        if follow:
            async for line in found.live():
                show(line)
    return 0
