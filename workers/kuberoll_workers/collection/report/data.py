"""From the records of a run to what its report shows, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kuberoll_workers.collection.precedence import EndedRecord
from kuberoll_workers.collection.report.browsed import MOST, MOST_BYTES, Browsed, BrowsedSample
from kuberoll_workers.collection.report.numbers import RunNumbers
from kuberoll_workers.collection.report.row import row_of
from kuberoll_workers.collection.report.text import one_line
from kuberoll_workers.collection.run_directory import RunManifest

_MOST_SETTINGS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """What a report shows.

    Attributes:
        head: What the run is: `location`, `job`, `created`, `planned`, `settings` as pairs of texts.
        numbers: Over all trajectories; see `RunNumbers.as_json`.
        browsed: Trajectories to read: all, or a sample.
        offered: How many there are.
    """

    head: dict[str, Any]
    numbers: dict[str, Any]
    browsed: Sequence[Browsed]
    offered: int


def report_data(
    records: Iterable[EndedRecord],
    *,
    location: str,
    manifest: RunManifest | None = None,
    most: int = MOST,
    most_bytes: int = MOST_BYTES,
) -> ReportData:
    """Compute a report.

    Memory: 16 bytes a finished trajectory for its group, and the trajectories to read, compressed.

    Args:
        records: Every trajectory once.
        location: Where the run is, for people.
        most, most_bytes: Bounds of the trajectories to read, and of their compressed text.
    """
    numbers, sample = RunNumbers(), BrowsedSample(most=most, most_bytes=most_bytes)
    for record in records:
        numbers.add(row_of(record))
        sample.offer(record)
    return ReportData(
        head=_head(location, manifest),
        numbers=numbers.as_json(),
        browsed=sample.items(),
        offered=sample.offered,
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
        # With `wanted` the run stops when it has groups enough.
        "planned": manifest.inputs.get("trajectories") if wanted is None else None,
        "settings": [
            (name, one_line(value if isinstance(value, str) else orjson.dumps(value).decode(), 300))
            for name, value in list(settings.items())[:_MOST_SETTINGS]
            if value is not None
        ],
    }
