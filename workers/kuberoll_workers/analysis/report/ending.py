"""The report as an ending of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.analysis.endings import EndedRun, EndingResult
from kuberoll_workers.analysis.report.distance import distance, distance_text
from kuberoll_workers.analysis.report.make import PAGE, make_report, report_observer
from kuberoll_workers.analysis.report.token_texts import stored_tokenizer
from kuberoll_workers.output.precedence import EndedRecord


class ReportEnding:
    """Writes the report beside the run; see `analysis.endings.Ending`."""

    after: ClassVar[Sequence[str]] = ()

    def __init__(self, run: EndedRun) -> None:
        self._run = run.files
        texts = None if run.tokenizer is None else stored_tokenizer(run.tokenizer)
        self._observer = report_observer(run.files, texts=texts)

    @staticmethod
    def is_wanted(_: RolloutJob) -> bool:
        """All runs have one."""
        return True

    @staticmethod
    def check(_: RolloutJob) -> None:
        """Nothing can be missing."""

    def offer(self, record: EndedRecord) -> None:
        """See `analysis.endings.Ending`."""
        self._observer.offer(record)

    def make(self, aggregates: Aggregates) -> EndingResult:
        """See `analysis.endings.Ending`."""
        page = make_report(aggregates, self._observer, location=self._run.location).page
        found = distance(self._observer.throughput)
        return EndingResult(
            files=[self._run.write(PAGE, page)], summary=[] if found is None else [distance_text(found)]
        )
