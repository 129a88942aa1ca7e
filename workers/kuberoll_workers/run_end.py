"""The end of a run, on one machine and in a cluster: its numbers, its report, and whether all of it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.report.make import PAGE, make_report
from kuberoll_workers.analysis.report.trajectory_sample import TrajectorySample
from kuberoll_workers.analysis.tracking import log_run
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.worker import environment_factory, planned_trajectories


@dataclass(slots=True, kw_only=True)
class RunEnd:
    """The result of a run.

    Attributes:
        planned: Trajectories that the run is to come to.
        wanted: Prompt groups after which it has enough; None: all of the dataset's.
        aggregates: The numbers; None where they could not be computed.
        files: Where the numbers and the report are.
        failed_steps: Why a step, `aggregation` or `report`, could not be done.
        seconds: Wall seconds of each step.
    """

    planned: int
    wanted: int | None
    aggregates: Aggregates | None = None
    files: list[str] = field(default_factory=list)
    failed_steps: dict[str, Exception] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Planned trajectories that have neither finished, nor failed, nor been filtered out."""
        if self.aggregates is None:
            return self.planned
        # Where a number of groups is wanted, others came in the place of those that were filtered out.
        filtered = self.aggregates.tail.filtered if self.wanted is None else 0
        return max(0, self.planned - self.aggregates.trajectories - self.aggregates.failed - filtered)

    def problem(self) -> str | None:
        """Why the run is not complete; None: it is, or nobody could count."""
        if self.aggregates is None or not self.missing:
            return None
        finished = self.aggregates.trajectories
        if self.wanted is not None:
            return (
                f"only {finished} trajectories are kept, rollout.groups.wanted asks for {self.wanted} groups "
                "and the dataset has no more; give it more rows, or want fewer"
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
            # The trajectories are stored; a full disk, a store that is away or a fault of ours must not hide that.
            self.failed_steps[name] = error
        finally:
            self.seconds[name] = time.perf_counter() - began


def end_run(job: RolloutJob, run: RunFiles, *, trajectories: int, note: Callable[[str], None]) -> RunEnd:
    """Bring a run whose workers have ended into its final form: its numbers, its report, what trackers are told.

    Done again, it comes to the same. Where one of them cannot be made, the others are.

    Args:
        trajectories: What the dataset comes to.
        note: Takes lines for the user: what trackers say.
    """
    wanted = job.spec.rollout.groups.wanted
    end = RunEnd(planned=planned_trajectories(job, trajectories, wanted=wanted), wanted=wanted)
    sample = _ReportSample()
    with end._step("aggregation"):
        for journal in (FAILURES, DROPPED):
            run.storage.compact(journal)
        names = [spec.name for spec in job.spec.environments]
        end.aggregates = aggregate([run], make=environment_factory(job), environments=names, observe=sample.offer)
        end.files += end.aggregates.write_beside(run)
    if end.aggregates is None:
        # It is made of the numbers.
        end.failed_steps["report"] = end.failed_steps["aggregation"]
        return end
    with end._step("report"):
        page = make_report(end.aggregates, sample.complete(), location=run.location).page
        end.files.append(run.write(PAGE, page))
    if job.spec.output.tracking is not None:
        began = time.perf_counter()
        log_run(job, run, note=note)
        end.seconds["tracking"] = time.perf_counter() - began
    return end


class _ReportSample:
    """Takes the report's sample in the pass that computes the numbers; its fault costs the report and nothing else."""

    def __init__(self) -> None:
        self._sample = TrajectorySample()
        self._error: Exception | None = None

    def offer(self, record: EndedRecord) -> None:
        if self._error is None:
            try:
                self._sample.offer(record)
            except Exception as error:
                self._error = error

    def complete(self) -> TrajectorySample:
        if self._error is not None:
            raise self._error
        return self._sample
