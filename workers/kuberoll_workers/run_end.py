"""The end of a run, on one machine and in a cluster: aggregates, report, and a check for missing trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.report.distance import Distance, distance
from kuberoll_workers.analysis.report.make import PAGE, make_report, report_observer
from kuberoll_workers.analysis.report.observer import ReportObserver
from kuberoll_workers.analysis.report.token_texts import TokenTexts, stored_tokenizer
from kuberoll_workers.analysis.tracking import log_run
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.worker.environments import environment_factory
from kuberoll_workers.worker.settings import planned_trajectories


@dataclass(slots=True, kw_only=True)
class RunEnd:
    """The result of a run.

    Attributes:
        planned: Number of trajectories that the run should finish; None: it ends when it is stopped.
        wanted: Number of prompt groups to keep; None: all of the dataset.
        aggregates: The aggregates; None if they could not be computed.
        files: Files of the aggregates and the report.
        distance: Of the run from its bound; None if no times are known.
        failed_steps: The error of each step, `aggregation` or `report`, that failed.
        seconds: Wall seconds of each step.
    """

    planned: int | None
    wanted: int | None
    aggregates: Aggregates | None = None
    files: list[str] = field(default_factory=list)
    distance: Distance | None = None
    failed_steps: dict[str, Exception] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Planned trajectories that have neither finished, nor failed, nor been given up with their group."""
        planned = self.planned or 0
        if self.aggregates is None:
            return planned
        # With a wanted number of groups, those that were given up are replaced.
        given_up = self.aggregates.tail.given_up if self.wanted is None else 0
        return max(0, planned - self.aggregates.trajectories - self.aggregates.failed - given_up)

    def problem(self) -> str | None:
        """The reason why the run is incomplete; None if it is complete, or if there are no aggregates."""
        if self.aggregates is None or not self.missing:
            return None
        finished = self.aggregates.trajectories
        if self.wanted is not None:
            return (
                f"only {finished} trajectories are kept, rollout.groups.wanted asks for {self.wanted} groups "
                "and the dataset has no more; add rows, or lower rollout.groups.wanted"
            )
        return (
            f"{self.missing} of {self.planned} trajectories are missing: {finished} finished, "
            f"{self.aggregates.failed} failed, {len(self.aggregates.contents.dropped)} dropped"
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            # The trajectories are stored; a full disk, an unavailable store or a bug must not hide that.
            self.failed_steps[name] = error
        finally:
            self.seconds[name] = time.perf_counter() - began


def end_run(
    job: RolloutJob,
    run: RunFiles,
    *,
    trajectories: int | None,
    note: Callable[[str], None],
    tokenizer: str | None = None,
) -> RunEnd:
    """Finish a run whose workers have ended: make its aggregates and report, and log it to trackers.

    It may be repeated with the same result. If one step fails, the others are still done.

    Args:
        trajectories: Number of trajectories of the whole dataset; None: it has no end.
        note: Called with messages of trackers for the user.
        tokenizer: Directory or hub id of the tokenizer, for the report; None: as the manifest names it.
    """
    wanted = job.spec.rollout.groups.wanted
    end = RunEnd(planned=planned_trajectories(job, trajectories, wanted=wanted), wanted=wanted)
    report = _ReportObserver(run, None if tokenizer is None else stored_tokenizer(tokenizer))
    with end._step("aggregation"):
        for journal in (FAILURES, DROPPED):
            run.storage.compact(journal)
        names = [spec.name for spec in job.spec.environments]
        end.aggregates = aggregate([run], make=environment_factory(job), environments=names, observe=report.offer)
        end.files += end.aggregates.write_beside(run)
    if end.aggregates is None:
        # It needs the aggregates.
        end.failed_steps["report"] = end.failed_steps["aggregation"]
        return end
    with end._step("report"):
        observer = report.complete()
        end.distance = distance(observer.throughput)
        page = make_report(end.aggregates, observer, location=run.location).page
        end.files.append(run.write(PAGE, page))
    if job.spec.output.tracking is not None:
        began = time.perf_counter()
        log_run(job, run, note=note)
        end.seconds["tracking"] = time.perf_counter() - began
    return end


class _ReportObserver:
    """Collects the report's part while the aggregates are computed; its errors affect only the report."""

    def __init__(self, run: RunFiles, texts: TokenTexts | None) -> None:
        self._error: Exception | None = None
        self._observer = ReportObserver()
        try:
            self._observer = report_observer(run, texts=texts)
        except Exception as error:
            self._error = error

    def offer(self, record: EndedRecord) -> None:
        if self._error is None:
            try:
                self._observer.offer(record)
            except Exception as error:
                self._error = error

    def complete(self) -> ReportObserver:
        if self._error is not None:
            raise self._error
        return self._observer
