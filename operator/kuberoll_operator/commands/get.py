"""`kuberoll get`: copies the output of a job in a cluster into a local directory."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kuberoll_operator.console.connection import (
    ClusterOptions,
    cluster_options,
    find_job,
    job_name,
    open_connection,
    run,
)
from kuberoll_operator.console.errors import ConsoleError

if TYPE_CHECKING:
    from kuberoll_operator.model import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line besides job and cluster; see the command's help."""

    output: Path | None
    stream: bool
    include: tuple[str, ...]
    force: bool


@click.command()
@click.argument("job", metavar="rlj/NAME")
@cluster_options
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Directory to copy into.  [default: ./NAME]")
@click.option("--stream", is_flag=True, help="Write the trajectories to standard output instead, as JSON lines.")
@click.option(
    "--include", metavar="PATTERN", multiple=True, help="Only files whose names match, e.g. 'shard-*'; repeatable."
)
@click.option("--force", is_flag=True, help="Overwrite local files with different content.")
def get(job: str, cluster: ClusterOptions, **given: Any) -> None:
    """Copy the output of a RolloutJob: shards, failures, aggregates, report, manifest.

    A short-lived pod in the job's namespace reads the claim or the object store, with the workers' image, credentials
    and volumes, and the output mounted read-only; it is always removed at the end. If the job names no image and has no
    Jobs to take it from, the variable KUBEROLL_WORKER_IMAGE names it. While the job runs the copy is a snapshot of
    whole lines. Run the same command again to resume an interrupted copy and to fetch what is new. Local files with
    different content are never overwritten without --force.

    The exit code is 2 if nothing was copied: no such job, a missing permission, different files in the way.
    """
    options = Options(**given)
    if options.stream and (options.output or options.include or options.force):
        raise click.UsageError(
            "--stream writes trajectories to standard output, without --output, --include and --force"
        )
    run(_get(job_name(job), cluster, options))


async def _get(name: str, cluster: ClusterOptions, options: Options) -> int:
    from kuberoll_operator.console.copying import Copy, Stream
    from kuberoll_operator.console.progress_bar import progress_of
    from kuberoll_operator.console.reader_session import ReaderSession

    namespace = cluster.resolved_namespace()
    async with open_connection(cluster) as connection:
        job = await find_job(connection.client, namespace, name)
        phase = (job.get("status") or {}).get("phase") or "not yet seen by the operator"
        snapshot = not has_ended(job)
        if snapshot:
            note(
                f"rlj/{name} is {phase}: this is a snapshot of whole lines; run the same command later to get the rest"
            )
        session = ReaderSession(
            connection,
            job,
            fallback_template=lambda: rendered_template(job),
            note=note,
        )
        async with session:
            if options.stream:
                await Stream(sys.stdout.buffer, note=note).run(session.connect)
                return 0
            path = options.output or Path(name)
            try:
                with progress_of(sys.stderr) as progress:
                    copy = Copy(
                        path,
                        run=f"{namespace}/{name} {job['metadata']['uid']}",
                        snapshot=snapshot,
                        include=options.include,
                        force=options.force,
                        progress=progress,
                    )
                    outcome = await copy.run(session.connect)
            except asyncio.CancelledError:
                note("interrupted: everything copied so far is kept; run the same command to resume")
                raise
    for file in outcome.fetched:
        click.echo(path / file)
    if outcome.skipped:
        note(f"{len(outcome.skipped)} files existed already")
    return 0


def rendered_template(job: Object) -> Object:
    """The template of a job whose own Jobs are gone, as an operator with this environment's settings would render it.

    Raises:
        ConsoleError: The operator would create no pods for this job.
    """
    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_api.removed import without_removed
    from kuberoll_operator import names
    from kuberoll_operator.commands.render import children_of
    from kuberoll_operator.defaults import with_defaults
    from kuberoll_operator.settings import InvalidSettings, Settings

    try:
        settings = Settings.from_environment(os.environ)
    except InvalidSettings as error:
        raise ConsoleError(str(error)) from error
    given, _ = without_removed({key: value for key, value in job.items() if key != "status"})
    parsed = RolloutJob.model_validate(given)
    parsed = with_defaults(parsed, job, settings)
    name = names.finish(job["metadata"]["name"])
    try:
        children = [child for _, child in children_of(parsed, job["metadata"]["namespace"], settings)]
    except ValueError as error:
        raise ConsoleError(f"the job has no pods, and cannot have any: {error}") from error
    finish = next(child for child in children if child["kind"] == "Job" and child["metadata"]["name"] == name)
    template: Object = finish["spec"]["template"]
    return template


def has_ended(job: Object) -> bool:
    """True if nothing more will be written."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(item["type"] in {"Complete", "Failed"} and item["status"] == "True" for item in conditions)


def note(text: str) -> None:
    """Print a line for the user on standard error."""
    click.echo(text, err=True)
