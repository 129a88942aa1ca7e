"""A run's report, from its files."""

from __future__ import annotations

from typing import NamedTuple

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.report.browsed import BrowsedSample
from kuberoll_workers.analysis.report.data import report_data
from kuberoll_workers.analysis.report.page import render
from kuberoll_workers.output.run_files import RunFiles

PAGE = "report.html"


class Report(NamedTuple):
    """A report.

    Attributes:
        page: HTML, UTF-8.
        shown: Trajectories that can be read in it, of `offered` that there are.
    """

    page: bytes
    shown: int
    offered: int


def read_report(run: RunFiles) -> Report:
    """Read a run and make its report; memory is some 100 bytes a trajectory, besides the page.

    Raises:
        RecordError: A shard's Parquet file is none, or two environments have trajectories of one task.
        RunRefused: The manifest cannot be read.
    """
    sample = BrowsedSample()
    return make_report(aggregate([run], observe=sample.offer), sample, location=run.location)


def make_report(aggregates: Aggregates, sample: BrowsedSample, *, location: str) -> Report:
    """Make the report of a run from its numbers and a sample that was offered every trajectory of it."""
    data = report_data(aggregates, sample, location=location)
    return Report(render(data), len(data.browsed), data.offered)
