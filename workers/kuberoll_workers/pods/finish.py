"""A finish pod: it aggregates and reports a run whose shards are all done.

    python -m kuberoll_workers.pods.finish --config FILE

FILE is a `contract.PodConfig`. It may run again with the same result; docs/reference/worker-pods.md has its messages.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kuberoll_api.contract import (
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_REFUSED,
    FAILURE_CHARACTERS,
    EnvironmentResult,
    FinishMessage,
    PodConfig,
)
from kuberoll_api.logs import log_to_stderr
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, EnvironmentSummary
from kuberoll_workers.analysis.aggregation.environments import MetricsFailure
from kuberoll_workers.data.text import visible
from kuberoll_workers.output.run_directory import MANIFEST, RunRefused
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.pods.exit_codes import exit_status
from kuberoll_workers.pods.files import add_modules, encode_message, job_of, read_config, write_termination_message
from kuberoll_workers.run_end import AGGREGATION, RunEnd, end_run

_log = logging.getLogger(__name__)


def finish_message(end: RunEnd, aggregates: Aggregates, cause: str) -> FinishMessage:
    """Make the termination message."""
    reward = sum(summary.reward for summary in aggregates.summaries.values())
    return FinishMessage(
        trajectories=aggregates.trajectories,
        failed=aggregates.failed,
        dropped=len(aggregates.contents.dropped),
        planned=aggregates.trajectories + aggregates.failed if end.planned is None else end.planned,
        missing=end.missing,
        mean_reward=reward / aggregates.trajectories if aggregates.trajectories else None,
        environments={name: _result_of(summary) for name, summary in aggregates.summaries.items()},
        failure=_failure_of(aggregates),
        cause=cause,
    )


def _failure_of(aggregates: Aggregates) -> str:
    causes = aggregates.contents.causes.by_count()
    if not causes:
        return ""
    unscored = f" ({aggregates.unscored} of all only lack a score)" if aggregates.unscored else ""
    count = f"{causes[0].count} of them{unscored}: "
    return count + causes[0].headline(FAILURE_CHARACTERS - len(count))


def _result_of(summary: EnvironmentSummary) -> EnvironmentResult:
    success = summary.success
    # Without a threshold the numbers are rewards, not rates.
    rates = {} if success is None or success.threshold is None else success.pass_at_k
    return EnvironmentResult(
        trajectories=summary.trajectories,
        failed=summary.failed,
        mean_reward=summary.mean_reward,
        pass_at_1=rates.get(1),
    )


def finish_pod(config: PodConfig) -> tuple[int, FinishMessage]:
    """Finish the run of a configuration.

    Returns:
        Exit code and termination message. An incomplete run fails, unless the job tolerates failed shards
        (`workers.maxFailedShards`).

    Raises:
        RunRefused: The manifest is missing or cannot be read.
        Exception: The aggregates could not be computed or written.
    """
    job = job_of(config)
    run = RunFiles(config.output)
    manifest = run.manifest()
    if manifest is None:
        raise RunRefused(f"{run.location} has no {MANIFEST}, so the expected number of trajectories is unknown")
    end = end_run(job, run, trajectories=manifest.inputs["trajectories"], note=_log.info)
    for file in end.files:
        _log.info("wrote %s", file)
    if end.aggregates is None or AGGREGATION in end.failed_steps:
        raise end.failed_steps[AGGREGATION]
    for step, error in end.failed_steps.items():
        # Trajectories and aggregates are stored: what else is made of them can be made at any time.
        _log.warning("the %s was not made", step, exc_info=error)
    for name, summary in end.aggregates.summaries.items():
        if isinstance(missing := summary.metrics, MetricsFailure):
            text = missing.error if missing.traceback is None else f"{missing.error}\n{missing.traceback.text.rstrip()}"
            _log.warning("environment %s: its own metrics are missing: %s", name, visible(text))
    for warning in end.aggregates.warnings():
        _log.warning("environment %s", visible(warning))
    problem = end.problem()
    tolerated = job.spec.workers.max_failed_shards > 0
    return 0 if problem is None or tolerated else EXIT_REFUSED, finish_message(end, end.aggregates, problem or "")


def _stop(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(EXIT_DRAINED)


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.finish", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    arguments = parser.parse_args()
    log_to_stderr()
    signal.signal(signal.SIGTERM, _stop)
    try:
        config = read_config(arguments.config)
        log_to_stderr(job=config.job.get("metadata", {}).get("name"))
        add_modules(config)
        code, message = finish_pod(config)
        if message.cause:
            _log.log(logging.ERROR if code else logging.WARNING, message.cause)
    except SystemExit as stopped:
        code, message = int(str(stopped.code)), FinishMessage(cause="stopped before the end")
    except Exception as error:
        code, cause = exit_status(error)
        message = FinishMessage(cause=cause)
        _log.error(cause, exc_info=code == EXIT_FAILED)
    write_termination_message(encode_message(message))
    logging.shutdown()
    sys.stdout.flush()
    # A tracking client that timed out may still be waiting in its thread.
    os._exit(code)


if __name__ == "__main__":
    main()
