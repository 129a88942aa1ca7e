"""Creation of a run's report from its files."""

from __future__ import annotations

from typing import NamedTuple

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.report.data import report_data
from kuberoll_workers.analysis.report.observer import ReportObserver
from kuberoll_workers.analysis.report.page import render
from kuberoll_workers.analysis.report.token_texts import TokenTexts, stored_tokenizer
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


def read_report(run: RunFiles, *, texts: TokenTexts | None = None) -> Report:
    """Read a run and create its report; memory is about 100 bytes per trajectory, besides the page.

    Args:
        texts: Texts of tokens; None: those of the run's own tokenizer if it is on this machine.

    Raises:
        RecordError: A shard's Parquet file is invalid, or two environments have trajectories of the same task.
        RunRefused: The manifest cannot be read.
    """
    observer = report_observer(run, texts=texts)
    return make_report(aggregate([run], observe=observer.offer), observer, location=run.location)


def report_observer(run: RunFiles, *, texts: TokenTexts | None = None) -> ReportObserver:
    """An observer of a run's trajectories, for its report.

    Raises:
        RunRefused: The manifest cannot be read.
    """
    return ReportObserver(TrajectorySample(texts=texts or own_texts(run)))


def own_texts(run: RunFiles) -> TokenTexts | None:
    """Texts of the tokens of the run's own tokenizer; None if it is not on this machine.

    Raises:
        RunRefused: The manifest cannot be read.
    """
    manifest = run.manifest()
    if manifest is None:
        return None
    model = {name: manifest.identity.get(f"generation.model.{name}") for name in ("tokenizer", "source", "revision")}
    return stored_tokenizer(model["tokenizer"] or model["source"], model["revision"])


def make_report(aggregates: Aggregates, observer: ReportObserver, *, location: str) -> Report:
    """Create a run's report from its aggregates and an observer that was offered all of its trajectories."""
    data = report_data(aggregates, observer, location=location)
    return Report(render(data), len(data.browsed), data.offered)
