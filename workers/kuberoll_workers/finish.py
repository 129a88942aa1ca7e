"""The end of a run: what is written beside its shards when all of them are done.

    python -m kuberoll_workers.finish --config FILE

FILE is a `contract.PodConfig`. Run again, it does the same again; see docs/pods.md for what it says.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kuberoll_api.contract import EXIT_DRAINED, EXIT_FAILED, EXIT_REFUSED, EnvironmentResult, FinishMessage, PodConfig
from kuberoll_api.logs import log_to_stderr
from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_workers.collection.aggregate import Aggregates, EnvironmentSummary, aggregate
from kuberoll_workers.collection.records import DROPPED, FAILURES
from kuberoll_workers.collection.run_directory import MANIFEST, RunRefused
from kuberoll_workers.collection.run_files import RunFiles
from kuberoll_workers.collection.tracking import log_run
from kuberoll_workers.pod_files import encode_message, leave_message, read_config
from kuberoll_workers.refusals import ended_by
from kuberoll_workers.worker import environment_source, trajectories_to_come

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run came to.

    Attributes:
        planned: Trajectories that it was to come to.
    """

    aggregates: Aggregates
    planned: int
    wanted: int | None

    @property
    def failed(self) -> int:
        """Trajectories given up for good."""
        return sum(summary.failed for summary in self.aggregates.summaries.values())

    @property
    def dropped(self) -> int:
        """Trajectories that were not wanted."""
        return sum(lot.trajectories for lot in self.aggregates.tail.dropped.values())

    @property
    def missing(self) -> int:
        """Planned ones of which nothing is known: neither finished, nor failed, nor filtered out."""
        # Where a number of groups is wanted, those that were filtered out were replaced.
        filtered = self.aggregates.tail.filtered if self.wanted is None else 0
        return max(0, self.planned - self.aggregates.trajectories - self.failed - filtered)

    def problem(self) -> str | None:
        """Why the run is not complete; None: it is."""
        if not self.missing:
            return None
        if self.wanted is not None:
            return (
                f"only {self.aggregates.trajectories} trajectories are kept, rollout.groups.wanted asks for "
                f"{self.wanted} groups and the dataset has no more; give it more rows, or want fewer"
            )
        return (
            f"{self.missing} of {self.planned} trajectories are missing: {self.aggregates.trajectories} finished, "
            f"{self.failed} failed, {self.dropped} dropped"
        )

    def message(self, cause: str) -> FinishMessage:
        """The termination message."""
        summaries = self.aggregates.summaries
        reward = sum(summary.reward for summary in summaries.values())
        finished = self.aggregates.trajectories
        return FinishMessage(
            trajectories=finished,
            failed=self.failed,
            dropped=self.dropped,
            planned=self.planned,
            missing=self.missing,
            mean_reward=reward / finished if finished else None,
            environments={name: _result_of(summary) for name, summary in summaries.items()},
            cause=cause,
        )


def _result_of(summary: EnvironmentSummary) -> EnvironmentResult:
    success = summary.success
    # Without a threshold the numbers are rewards and no rates.
    rates = {} if success is None or success.threshold is None else success.pass_at_k
    return EnvironmentResult(
        trajectories=summary.trajectories,
        failed=summary.failed,
        mean_reward=summary.mean_reward,
        pass_at_1=rates.get(1),
    )


def finish_run(job: RolloutJob, run: RunFiles, *, note: Callable[[str], None]) -> Finished:
    """Bring a run whose workers have ended into its final form: its numbers, its report, what trackers are told.

    Args:
        note: Takes lines for the user.

    Raises:
        RunRefused: There is no manifest, or it cannot be read.
        RecordError: A line is not what it should be, with file and line.
    """
    manifest = run.manifest()
    if manifest is None:
        raise RunRefused(f"{run.location} has no {MANIFEST}, so nothing says what the run is to come to")
    for journal in (FAILURES, DROPPED):
        run.storage.compact(journal)
    names = [spec.name for spec in job.spec.environments]
    aggregates = aggregate([run], make=environment_source(job), environments=names)
    for file in aggregates.write_beside(run):
        note(f"wrote {file}")
    _write_report(run, note)
    log_run(job, run, note=note)
    wanted = job.spec.rollout.groups.wanted
    planned = trajectories_to_come(job, int(manifest.inputs["trajectories"]), wanted=wanted)
    return Finished(aggregates=aggregates, planned=planned, wanted=wanted)


def _write_report(run: RunFiles, note: Callable[[str], None]) -> None:
    # The trajectories and numbers are there; `kuberoll report` can make the page at any time.
    try:
        from kuberoll_workers.collection.report.make import PAGE, read_report

        note(f"wrote {run.write(PAGE, read_report(run).page)}")
    except Exception as error:
        _log.warning("no report", exc_info=error)
        note(f"warning: the report was not written: {type(error).__name__}: {error}")


def finish_pod(config: PodConfig) -> tuple[int, FinishMessage]:
    """Finish the run of a configuration.

    Returns:
        Exit code and termination message. A run that is not complete is no success, but for shards that the job may
        do without (`workers.maxFailedShards`).
    """
    job = RolloutJob.model_validate(config.job)
    done = finish_run(job, RunFiles(config.output), note=_log.info)
    problem = done.problem()
    tolerated = job.spec.workers.max_failed_shards > 0
    return 0 if problem is None or tolerated else EXIT_REFUSED, done.message(problem or "")


def _stop(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(EXIT_DRAINED)


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.finish", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    arguments = parser.parse_args()
    log_to_stderr()
    signal.signal(signal.SIGTERM, _stop)
    try:
        config = read_config(arguments.config)
        log_to_stderr(job=config.job.get("metadata", {}).get("name"))
        code, message = finish_pod(config)
        if message.cause:
            _log.log(logging.ERROR if code else logging.WARNING, message.cause)
    except SystemExit as stopped:
        code, message = int(str(stopped.code)), FinishMessage(cause="stopped before the end")
    except Exception as error:
        code, cause = ended_by(error)
        message = FinishMessage(cause=cause)
        _log.error(cause, exc_info=code == EXIT_FAILED)
    leave_message(encode_message(message))
    logging.shutdown()
    sys.stdout.flush()
    # A tracker's client that was given up may still wait in its thread.
    os._exit(code)


if __name__ == "__main__":
    main()
