"""The end of a run, on one machine and in a cluster: aggregates, what else is made of them, and what is missing."""

from __future__ import annotations

import functools
import graphlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from kuberoll_api import plugins
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.endings import EndedRun, Ending, EndingResult
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.worker.environments import environment_factory
from kuberoll_workers.worker.settings import planned_trajectories

AGGREGATION = "aggregation"
"""Name of the first step."""


@dataclass(slots=True, kw_only=True)
class RunEnd:
    """The result of a run.

    Attributes:
        planned: Number of trajectories that the run should finish; None: it ends when it is stopped.
        wanted: Number of prompt groups to keep; None: all of the dataset.
        aggregates: The aggregates; None if they could not be computed.
        files: Files of the aggregates and of the endings.
        summary: Lines of the endings for the user.
        failed_steps: The error of each step, `AGGREGATION` or an ending, that failed.
        seconds: Wall seconds of each step.
    """

    planned: int | None
    wanted: int | None
    aggregates: Aggregates | None = None
    files: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
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
    """Finish a run whose workers have ended: compute its aggregates, and make the endings of all installed packages.

    It may be repeated with the same result. If one step fails, the others are still done.

    Args:
        trajectories: Number of trajectories of the whole dataset; None: it has no end.
        note, tokenizer: As in `EndedRun`.
    """
    wanted = job.spec.rollout.groups.wanted
    end = RunEnd(planned=planned_trajectories(job, trajectories, wanted=wanted), wanted=wanted)
    endings = _endings(EndedRun(job=job, files=run, note=note, tokenizer=tokenizer))

    def offer(record: EndedRecord) -> None:
        for ending in endings.values():
            ending.offer(record)

    with end._step(AGGREGATION):
        for journal in (FAILURES, DROPPED):
            run.storage.compact(journal)
        names = [spec.name for spec in job.spec.environments]
        end.aggregates = aggregate([run], make=environment_factory(job), environments=names, observe=offer)
        end.files += end.aggregates.write_beside(run)
        end.summary += end.aggregates.warnings()
    for name, ending in endings.items():
        if end.aggregates is None:
            end.failed_steps[name] = end.failed_steps[AGGREGATION]
            continue
        with end._step(name):
            made = ending.make(end.aggregates)
            end.files += made.files
            end.summary += made.summary
    return end


class _GuardedEnding:
    """An ending whose first exception, also one of its import, waits until it is made."""

    def __init__(self, load: Callable[[], Ending]) -> None:
        self._error: Exception | None = None
        try:
            self._ending = load()
        except Exception as error:
            self._error = error

    def offer(self, record: EndedRecord) -> None:
        if self._error is None:
            try:
                self._ending.offer(record)
            except Exception as error:
                self._error = error

    def make(self, aggregates: Aggregates) -> EndingResult:
        if self._error is not None:
            raise self._error
        return self._ending.make(aggregates)


def _endings(run: EndedRun) -> dict[str, _GuardedEnding]:
    """The endings of a run by name, each after those that it needs."""
    if not plugins.installed(plugins.ENDINGS):
        run.note(f"warning: there will be no report: {plugins.absence(plugins.ENDINGS, 'report')}")
    makers: dict[str, Callable[[], Ending]] = {}
    needs: dict[str, set[str]] = {}
    for name in plugins.installed(plugins.ENDINGS):
        try:
            kind: type[Ending] = plugins.load(plugins.ENDINGS, name)
            if not kind.is_wanted(run.job):
                continue
            makers[name], needs[name] = functools.partial(kind, run), set(kind.after)
        except Exception as error:
            makers[name], needs[name] = functools.partial(_raise, error), set()
    sorter = graphlib.TopologicalSorter({name: after & makers.keys() for name, after in needs.items()})
    try:
        order = list(sorter.static_order())
    except graphlib.CycleError:
        # Whichever is first then says what it lacks.
        order = sorted(makers)
    return {name: _GuardedEnding(makers[name]) for name in order}


def _raise(error: Exception) -> NoReturn:
    raise error
