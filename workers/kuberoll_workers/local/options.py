"""Options of `kuberoll run`, and where modules of entrypoints are searched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of the command line.

    Attributes:
        base: The manifest's directory, where its relative paths start.
        output: The run's directory or URI.
        force: Continue the run there even if its dataset or settings have changed.
        metrics_port: Where `/metrics` is served; 0: any free port.
        monitor: Run a local Prometheus, which ends with the run.
        serve: Put a Simulated engine behind Ray Serve, as real ones are, instead of into the workers.
        endpoint: As in `generation.served_endpoint`.
    """

    base: Path
    output: str
    resume: bool = False
    force: bool = False
    metrics_port: int = 0
    monitor: bool = False
    serve: bool = False
    endpoint: str | None = None


def import_directories(base: Path) -> list[str]:
    """Directories in which modules of entrypoints are searched, besides installed packages."""
    return list(dict.fromkeys([str(base.resolve()), str(Path.cwd())]))
