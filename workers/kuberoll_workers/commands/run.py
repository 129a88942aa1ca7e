"""`kuberoll run`: runs a RolloutJob on this machine, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kuberoll_workers.local.early_start import EarlyStart

DEFAULT_METRICS_PORT = 9464


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--output", metavar="DIR|URI", help="Output of the run.  [default: output.uri unless pvc://, or runs/<job>]"
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest.")
@click.option("--resume", is_flag=True, help="Continue the run in the output directory.")
@click.option("--force", is_flag=True, help="With --resume: continue even if dataset or settings have changed.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_METRICS_PORT,
    show_default=True,
    help="Port of /metrics during the run; 0 for any free one.",
)
@click.option(
    "--endpoint",
    metavar="URL|none",
    help="Generate at this engine of kuberoll serve.  [default: the one of the job's name; else one of its own]",
)
@click.option("--serve", is_flag=True, help="Put a Simulated engine behind Ray Serve, as a real one is.")
@click.option("--monitor", is_flag=True, help="Run a local Prometheus alongside, with graphs and alerts.")
def run(
    manifest: Path,
    output: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    force: bool,
    metrics_port: int,
    endpoint: str | None,
    serve: bool,
    monitor: bool,
) -> None:
    """Run the RolloutJob in MANIFEST on this machine.

    \b
    Examples:
      kuberoll run job.yaml
      kuberoll run job.yaml --set spec.generation.engine=Simulated
      kuberoll run job.yaml --output runs/first --resume

    Ctrl-C finishes the trajectories in flight and leaves a run that --resume continues; a second Ctrl-C stops at
    once. The exit code is 0 only if every trajectory finished, or failed within the failure budget; 1: some are missing
    or failed; 2: the job was rejected, nothing was started; 3: all are stored, but the aggregates or the report could
    not be written; 130: interrupted.
    """
    try:
        from kuberoll_workers.local.early_start import early_start

        with early_start(manifest.parent) as early:
            code = _run(
                early, manifest, overrides, output,
                resume=resume, force=force, metrics_port=metrics_port, monitor=monitor, serve=serve, endpoint=endpoint,
            )  # fmt: skip
    except KeyboardInterrupt:
        click.echo("interrupted before anything was started", err=True)
        sys.exit(130)
    sys.exit(code)


def _run(
    early: EarlyStart, manifest: Path, overrides: tuple[str, ...], output: str | None, **options: Any
) -> int:  # fmt: skip
    """Run the job; returns the exit code."""
    from rich.console import Console

    from kuberoll_api.manifest.loading import ManifestError, load_job

    try:
        job = load_job(manifest, overrides)
    except ManifestError as error:
        click.echo(str(error), err=True)
        return 2

    from kuberoll_workers.commands.console import reporter_for
    from kuberoll_workers.data.text import visible
    from kuberoll_workers.local.options import RunOptions
    from kuberoll_workers.local.preflight import JobRefused
    from kuberoll_workers.local.run import run as run_here

    uri = job.spec.output.uri
    # A claim exists only in the cluster that the manifest was written for.
    on_claim = output is None and uri is not None and uri.startswith("pvc:")
    location = output or (None if on_claim else uri) or f"runs/{job.metadata.name}"
    reporter = reporter_for(Console(highlight=False))
    if on_claim:
        reporter.note(f"spec.output.uri: {uri} is a volume of a cluster; writing to {location} instead")
    try:
        return run_here(job, RunOptions(base=manifest.parent, output=location, **options), reporter, early).exit_code
    except JobRefused as error:
        reporter.close()
        click.echo(visible(f"{manifest}: {error}"), err=True)
        return 2
    except KeyboardInterrupt:
        reporter.close()
        click.echo(f"interrupted; stored trajectories are kept: continue with --resume --output {location}", err=True)
        return 130
