"""`kuberoll apply`: applies a manifest to a cluster, with the files beside it that its jobs need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_api.manifest.loading import ManifestError, load_manifest
from kuberoll_operator.console.connection import ClusterOptions, cluster_options, open_connection, run
from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.kube.access import AccessError

if TYPE_CHECKING:
    from kuberoll_api.manifest.loading import Manifest
    from kuberoll_operator.console.applying import JobObjects
    from kuberoll_operator.model import Object


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@cluster_options
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field; repeatable.")
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help="Ship these files, too; relative to the manifest, e.g. 'words/*.txt'; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Have the API server check all objects, and store nothing.")
@click.option("--print", "print_only", is_flag=True, help="Print the objects as YAML instead; connects to no cluster.")
@click.option("--force-conflicts", is_flag=True, help="Take over fields that others manage.")
def apply(
    manifest: Path,
    cluster: ClusterOptions,
    overrides: tuple[str, ...],
    include: tuple[str, ...],
    dry_run: bool,
    print_only: bool,
    force_conflicts: bool,
) -> None:
    """Apply the objects of MANIFEST to a cluster, with the files beside it that its RolloutJobs need.

    These are modules of entrypoints, what they import from the manifest's directory (of packages all files), and a
    dataset with a relative path: at most 1 MiB, in an immutable ConfigMap that is deleted with its job. The job names
    it in spec.workers.files. Objects of other kinds are applied first; all are applied on the server side.
    `kuberoll validate --cluster` shows what would be shipped, and what the cluster must have.

    The exit code is 2 for a mistake in the manifest, something in it that no cluster has, or a missing permission; 1 if
    the API server refuses an object, or does not answer.

    \b
    Examples:
      kuberoll apply job.yaml -n rollouts
      kuberoll apply job.yaml --set spec.output.uri=s3://bucket/run-1 --dry-run
    """
    try:
        loaded = load_manifest(manifest, overrides)
        namespace = cluster.namespace or _namespace_of(loaded)
        if namespace is None:
            namespace = "default" if print_only else cluster.resolved_namespace()
        jobs = _jobs_of(loaded, manifest, namespace, include)
    except (ManifestError, ConsoleError, AccessError, OSError) as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    others = [dict(document.value) for document in loaded.others]
    if print_only:
        _print([*others, *(item for job in jobs for item in (job.files, job.job) if item is not None)])
        return
    run(_apply(others, jobs, namespace, cluster, force=force_conflicts, dry_run=dry_run))


def _namespace_of(manifest: Manifest) -> str | None:
    """The one namespace that the manifest's jobs name; None if they name none.

    Raises:
        ConsoleError: They name several.
    """
    named = {item.job.metadata.namespace for item in manifest.jobs}
    if len(named) > 1:
        raise ConsoleError(
            "the RolloutJobs name different namespaces; put them into separate files, or choose one with -n"
        )
    return next(iter(named))


def _jobs_of(manifest: Manifest, file: Path, namespace: str, include: tuple[str, ...]) -> list[JobObjects]:
    """The objects of the manifest's jobs.

    Raises:
        ManifestError: No cluster can run one of them.
        OSError: A file beside the manifest cannot be read.
    """
    from kuberoll_api.manifest.cluster import check_for_cluster
    from kuberoll_operator.console.applying import JobObjects
    from kuberoll_operator.console.shipping import applied_object, files_config_map, with_files

    found, mistakes = [], []
    others = [document.value for document in manifest.others]
    for item in manifest.jobs:
        check = check_for_cluster(item.job, file.parent, include=include, others=others)
        mistakes += [item.mistake(*problem) for problem in check.problems]
        if mistakes:
            continue
        for note in check.notes:
            click.echo(str(item.mistake(note.path, f"note: {note.message}")), err=True)
        job, beside = item.job, check.beside
        if not beside.files:
            found.append(JobObjects(job=applied_object(job, namespace)))
            continue
        contents = {name: path.read_bytes() for name, path in beside.files.items()}
        programs = [name for name, path in beside.files.items() if path.stat().st_mode & 0o100]
        found.append(
            JobObjects(
                job=applied_object(with_files(job, contents, programs), namespace),
                files=files_config_map(job.metadata.name, namespace, contents),
                contents=str(beside),
            )
        )
    if mistakes:
        raise ManifestError(mistakes)
    return found


def _print(items: list[Object]) -> None:
    from kuberoll_operator.commands.render import to_yaml

    click.echo("".join(f"---\n{to_yaml(item)}" for item in items), nl=False)


async def _apply(
    others: list[Object],
    jobs: list[JobObjects],
    namespace: str,
    cluster: ClusterOptions,
    *,
    force: bool,
    dry_run: bool,
) -> int:
    from kuberoll_operator.console.applying import Applying

    mode = " (dry run)" if dry_run else ""
    async with open_connection(cluster) as connection:
        applying = Applying(connection.client, force=force, dry_run=dry_run)
        for applied in await applying.apply_others(others, namespace):
            click.echo(f"{applied}{mode}")
        for job, written in await applying.apply_jobs(jobs):
            for applied in written:
                contents = f": {job.contents}" if applied.live["kind"] == "ConfigMap" else ""
                click.echo(f"{applied}{mode}{contents}")
    if not dry_run:
        for job in jobs:
            name = job.job["metadata"]["name"]
            click.echo(f"kubectl get rlj {name} -n {namespace} -w    # or: kuberoll logs rlj/{name} -n {namespace} -f")
    return 0
