"""Content of a report: the numbers of a run, and some of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.analysis.report.numbers import run_numbers
from kuberoll_workers.analysis.report.observer import ReportObserver
from kuberoll_workers.analysis.report.trajectory_sample import ReadableTrajectory
from kuberoll_workers.data.text import one_line
from kuberoll_workers.output.run_directory import RunManifest

_MOST_SETTINGS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Content of a report.

    Attributes:
        head: Description of the run: `location`, `job`, `created`, `planned`, `settings` as pairs of strings.
        numbers: Numbers of all trajectories; see `run_numbers`.
        browsed: Trajectories with their text: all, or a sample.
        offered: Number of all trajectories.
    """

    head: dict[str, Any]
    numbers: dict[str, Any]
    browsed: Sequence[ReadableTrajectory]
    offered: int


def report_data(aggregates: Aggregates, observer: ReportObserver, *, location: str) -> ReportData:
    """Compute the content of a report.

    Args:
        aggregates: Numbers of the run.
        observer: It was offered all trajectories of the run.
        location: Location of the run, for display.
    """
    return ReportData(
        head=_head(location, aggregates.contents.manifest),
        numbers=run_numbers(aggregates, observer),
        browsed=observer.sample.items(),
        offered=observer.sample.offered,
    )


def _head(location: str, manifest: RunManifest | None) -> dict[str, Any]:
    if manifest is None:
        return {"location": location, "job": None, "created": None, "planned": None, "settings": []}
    wanted = manifest.identity.get("rollout.groups.wanted")
    settings = {**manifest.identity, **{f"versions.{name}": value for name, value in manifest.versions.items()}}
    return {
        "location": location,
        "job": manifest.job,
        "created": manifest.created,
        # With `wanted` the run stops at a number of groups.
        "planned": manifest.inputs.get("trajectories") if wanted is None else None,
        "settings": [
            (name, one_line(value if isinstance(value, str) else orjson.dumps(value).decode(), 300))
            for name, value in list(settings.items())[:_MOST_SETTINGS]
            if value is not None
        ],
    }
