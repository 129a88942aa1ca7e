"""Creation of a run's report from its files."""

from __future__ import annotations

from typing import NamedTuple

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.report.data import report_data
from kuberoll_workers.analysis.report.page import render
from kuberoll_workers.analysis.report.trajectory_sample import TrajectorySample
from kuberoll_workers.output.run_files import RunFiles

PAGE = "report.html"


class Report(NamedTuple):
    """A report.

    Attributes:
        page: HTML in UTF-8.
        shown: Number of trajectories that can be read in it, of `offered` in the run.
    """

    page: bytes
    shown: int
    offered: int


def read_report(run: RunFiles) -> Report:
    """Read a run and create its report; memory is about 100 bytes per trajectory, besides the page.

    Raises:
        RecordError: A shard's Parquet file is invalid, or two environments have trajectories of the same task.
        RunRefused: The manifest cannot be read.
    """
    sample = TrajectorySample()
    return make_report(aggregate([run], observe=sample.offer), sample, location=run.location)


def make_report(aggregates: Aggregates, sample: TrajectorySample, *, location: str) -> Report:
    """Create a run's report from its aggregates and a sample that was offered all of its trajectories."""
    data = report_data(aggregates, sample, location=location)
    return Report(render(data), len(data.browsed), data.offered)
