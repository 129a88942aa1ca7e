"""`kuberoll serve`: keeps the engine of a RolloutJob up on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kuberoll_api.manifest.loading import ManifestError, load_job


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="any free one", help="Port to serve at.")
def serve(manifest: Path, overrides: tuple[str, ...], port: int) -> None:
    """Keep the engine of the RolloutJob in MANIFEST up until Ctrl-C.

    `kuberoll run` with a manifest of the same name uses it, and starts in a second or two. Its URL and the file with
    its tokens are printed; new weights are published with POST /v1/weights.

    \b
    Examples:
      kuberoll serve job.yaml
      kuberoll run job.yaml --output runs/first      # in another terminal

    The exit code is 0 after Ctrl-C, 1 if the engine failed, 2 if it was rejected, 130 if it was interrupted before it
    was ready or while it ended.
    """
    try:
        job = load_job(manifest, overrides)
    except ManifestError as error:
        click.echo(str(error), err=True)
        sys.exit(2)

    try:
        from rich.console import Console

        from kuberoll_workers.commands.console import reporter_for
        from kuberoll_workers.data.text import visible
        from kuberoll_workers.local.generation import RunFailed
        from kuberoll_workers.local.preflight import JobRefused
        from kuberoll_workers.local.serve import ServeOptions, StartInterrupted
        from kuberoll_workers.local.serve import serve as serve_here
    except KeyboardInterrupt:
        click.echo("interrupted before anything was started", err=True)
        sys.exit(130)

    reporter = reporter_for(Console(highlight=False))
    try:
        serve_here(job, ServeOptions(base=manifest.parent, manifest=manifest, port=port), reporter)
    except (JobRefused, RunFailed) as error:
        reporter.close()
        click.echo(visible(f"{manifest}: {error}"), err=True)
        sys.exit(2 if isinstance(error, JobRefused) else 1)
    except (KeyboardInterrupt, StartInterrupted):
        reporter.close()
        click.echo("interrupted; nothing of the engine is left", err=True)
        sys.exit(130)
    finally:
        reporter.close()
