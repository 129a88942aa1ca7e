"""One environment worker: runs some shards of a job against a policy endpoint.

A child process of `kuberoll run` is `python -m kuberoll_workers.worker`; a pod of the cluster (`pods.worker`) does the
same work. It reads two lines of JSON from standard input: a WorkerStart, with which it initializes while the engine
starts, and a WorkerConfig, with which it begins. Progress goes to standard output, one JSON object per line, the last
one with `"done": true`, or one with a `"problem"` if it cannot continue. `"waiting"` says why the policy does not
answer (null: it does again), with the `"seconds"` of `OutageLimit.trouble`; `"held"` and `"starved"` say who waits for
whom, as a `PaceReport`; `"direct"` says where it serves the direct path. Logs go to standard error. SIGTERM drains:
no new trajectories are started, and those in flight are finished and stored.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import msgspec

from kuberoll_api.plugins import MissingPlugin
from kuberoll_workers.data.lifetime import end_with_parent, watch_parent
from kuberoll_workers.data.record import RecordError
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tracebacks import with_frames
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.plan_follower import PaceReport
from kuberoll_workers.output.storage import StorageError
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.policy.readiness import answering_text, waiting_text
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig, WorkerStart
from kuberoll_workers.worker.garbage import tune_garbage_collector
from kuberoll_workers.worker.run import run_worker

REPORT_SECONDS = 0.25

_log = logging.getLogger(__name__)


async def _main(config: WorkerConfig, tokenizer: HuggingFaceTokenizer, reports: TextIO) -> str | None:
    """Run the config's shards; return the problem, for the user, that ended them, or None."""
    drain, progress = Drain(), Progress()
    problem: str | None = None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.set)
    metrics = RolloutMetrics(str(config.job.metadata.name))
    background = [
        asyncio.create_task(metrics.watch_event_loop()),
        asyncio.create_task(_report(progress, metrics, reports)),
    ]

    def trouble(reason: str | None, seconds: float) -> None:
        _log.warning("%s", answering_text(seconds) if reason is None else waiting_text(reason, seconds))
        _write({"waiting": reason, "seconds": seconds}, reports)

    def pace_report(report: PaceReport) -> None:
        _write(report._asdict(), reports)

    feed = PartFeed() if config.direct_token is not None else None
    try:
        async with direct_path(feed, config.direct_token, metrics, reports):
            progress.complete = await run_worker(
                config,
                metrics=metrics,
                drain=drain,
                progress=progress,
                tokenizer=tokenizer,
                trouble=trouble,
                pace_report=pace_report,
                feed=feed,
            )
        progress.done = True
    except BaseException as error:
        if (problem := problem_of(error)) is None:
            raise
        _write({"problem": problem}, reports)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
    progress.update(metrics.activity())
    _write(progress, reports)
    return problem


@asynccontextmanager
async def direct_path(
    feed: PartFeed | None, token: str | None, metrics: RolloutMetrics, reports: TextIO
) -> AsyncIterator[None]:
    """Serve a feed to consumers on this machine while the body runs, and report where."""
    if feed is None or token is None:
        yield
        return
    # Only here: its HTTP server takes a moment to import.
    from kuberoll_api.http_server import serving
    from kuberoll_workers.output.feed_server import feed_routes

    async with serving(feed_routes(feed, [token], metrics.direct), host="127.0.0.1", port=0) as port:
        _write({"direct": f"127.0.0.1:{port}"}, reports)
        try:
            yield
        finally:
            # The server's end waits for those who wait.
            feed.end()


_REFUSALS = (
    DatasetError,
    MissingPlugin,
    OSError,
    PolicyUnavailable,
    RecordError,
    StorageError,
    TemplateRefused,
    UnusableEnvironment,
)


def problem_of(error: BaseException) -> str | None:
    """The message for the user about an error that ended a worker; None for a bug, which needs its traceback."""
    if isinstance(error, BaseExceptionGroup):
        # The others follow from the first one.
        return next((words for inner in error.exceptions if (words := problem_of(inner)) is not None), None)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error}: free some space there; what is stored is kept"
    return with_frames(error) or type(error).__name__ if isinstance(error, _REFUSALS) else None


async def _report(progress: Progress, metrics: RolloutMetrics, reports: TextIO) -> None:
    while True:
        progress.update(metrics.activity())
        _write(progress, reports)
        await asyncio.sleep(REPORT_SECONDS)


def _write(report: Progress | dict[str, Any], reports: TextIO) -> None:
    reports.write(msgspec.json.encode(report).decode() + "\n")
    reports.flush()


def _log_to(path: str) -> None:
    with Path(path).open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())


def _own_stdout() -> TextIO:
    """Reserve standard output for reports: prints of environments and libraries go to standard error."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return reports


def main() -> None:
    """The process's entry point."""
    parent = os.getppid()
    end_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent has ended
    start = msgspec.json.decode(line, type=WorkerStart)
    _log_to(start.log)
    reports = _own_stdout()
    # If PyTorch is installed transformers imports it, which takes seconds; the engine's start takes longer.
    tokenizer = HuggingFaceTokenizer.load(start.tokenizer, revision=start.revision)
    if start.endpoint:
        # Its HTTP client is imported here, while there is time.
        importlib.import_module("kuberoll_workers.policy.endpoints")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    watch_parent(sys.stdin.fileno(), parent)
    tune_garbage_collector()
    try:
        problem = asyncio.run(_main(WorkerConfig.decode(line), tokenizer, reports))
    except Exception:
        problem = traceback.format_exc()
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    end(0 if problem is None else 1)


def end(code: int) -> NoReturn:
    """End this process, whatever threads code of environments has left in it.

    All results are stored by now. The interpreter would wait for such threads, perhaps for ever.
    """
    main = threading.main_thread()
    if left := [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]:
        _log.warning("the worker is done; threads that still run end with it: %s", ", ".join(left[:8]))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
