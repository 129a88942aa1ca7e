"""A run's report, from its files."""

from __future__ import annotations

from typing import NamedTuple

from kuberoll_workers.collection.report.data import report_data
from kuberoll_workers.collection.report.page import render
from kuberoll_workers.collection.run_files import RunFiles

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


def make_report(run: RunFiles) -> Report:
    """Read a run and make its page; memory is bounded.

    Raises:
        RecordError: A line is not what it should be, with file and line.
        RunRefused: The manifest cannot be read.
    """
    data = report_data(run.read(), location=run.location, manifest=run.manifest())
    return Report(render(data), len(data.browsed), data.offered)
