"""A RolloutJob on this machine: generation, workers, metrics, aggregation, and their shutdown."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import RecordError
from kuberoll_workers.data.shards import share
from kuberoll_workers.dataset.inputs import repeats_of
from kuberoll_workers.local.generation import (
    HOST_PATIENCE_SECONDS,
    REFRESH_SECONDS,
    EngineHost,
    PolicyEndpoint,
    RunFailed,
    ServedEndpoint,
    StartClock,
    external_endpoint,
    literal_variables,
    serve_args,
    served_endpoint,
    served_ready,
    simulated_endpoint,
    simulated_shares,
    write_secret,
)
from kuberoll_workers.local.metrics import serve_metrics
from kuberoll_workers.local.preflight import JobRefused, Preflight, check
from kuberoll_workers.local.processes import Child
from kuberoll_workers.local.reporter import Reporter, RunProgress, RunResult, clock
from kuberoll_workers.local.scratch import scratch_directory
from kuberoll_workers.local.watchdog import run_variables, watchdog
from kuberoll_workers.output.records import FAILURES
from kuberoll_workers.output.run_directory import (
    RunDirectory,
    RunRefused,
    check_contents,
    new_manifest,
)
from kuberoll_workers.output.run_files import NotARun, RunFiles
from kuberoll_workers.output.run_state import read_state
from kuberoll_workers.output.storage import DirectoryStorage, Storage, StorageError, open_storage
from kuberoll_workers.run_end import RunEnd, end_run
from kuberoll_workers.worker import Progress, WorkerConfig, planned_trajectories

if TYPE_CHECKING:
    from kuberoll_workers.local.engine_load import EngineLoad

EXIT_POSTPROCESSING = 3
"""Exit code: every trajectory is stored, but the aggregates, the report or the list of files could not be made."""

_COMMANDS = {"aggregation": "aggregate", "report": "report"}

WORKER_PATIENCE_SECONDS = 5.0
# A shorter shutdown is not worth a line.
_NOTABLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of the command line.

    Attributes:
        base: The manifest's directory, where its relative paths start.
        output: The run's directory or URI.
        force: Continue the run there even if its dataset or settings have changed.
        metrics_port: Where `/metrics` is served; 0: any free port.
        monitor: Run a local Prometheus, which ends with the run.
        serve: Put a Simulated engine behind Ray Serve, as real ones are, instead of into the workers.
        endpoint: As in `generation.served_endpoint`.
    """

    base: Path
    output: str
    resume: bool = False
    force: bool = False
    metrics_port: int = 0
    monitor: bool = False
    serve: bool = False
    endpoint: str | None = None


def run(job: RolloutJob, options: RunOptions, reporter: Reporter) -> RunResult:
    """Run a job to its end.

    Raises:
        JobRefused: The job cannot run here; nothing was started and nothing written.
    """
    started = time.perf_counter()
    # The module of an entrypoint may be next to the manifest or in the working directory.
    sys.path[:0] = import_directories(options.base)
    shards = job.spec.workers.shards or max(1, job.spec.workers.replicas)
    storage = _storage(options.output)
    _check_output(storage, options)
    preflight = check(job, base=options.base)
    args = serve_args(job, preflight.source)
    served = served_endpoint(job, args, options.endpoint)
    directory = RunDirectory(storage)
    try:
        resumed = _open_run(directory, job, options, preflight, shards)
        for note in preflight.notes:
            reporter.note(note)
        if resumed:
            reporter.note(f"continuing the run in {options.output}")
        elif options.resume:
            reporter.note(f"{options.output} contains no run yet: starting one")
        reporter.phase("checks", time.perf_counter() - started)
        result = _LocalRun(job, options, storage, preflight, args, served, shards, reporter).execute(started)
    except RunRefused as error:
        raise JobRefused(str(error)) from error
    finally:
        directory.close()
    return result


def _check_output(storage: Storage, options: RunOptions) -> None:
    """Check the output before everything that takes longer; it is checked again when it is locked.

    Raises:
        JobRefused: It contains a run, which must not be resumed, or something else.
    """
    try:
        check_contents(storage, resume=options.resume)
    except (RunRefused, StorageError, OSError) as error:
        raise JobRefused(describe_error(error)) from error
    except Exception as error:
        # Every object store's library raises its own exceptions.
        raise JobRefused(f"--output {options.output}: {type(error).__name__}: {error}") from error


def _open_run(directory: RunDirectory, job: RolloutJob, options: RunOptions, preflight: Preflight, shards: int) -> bool:
    """Open the run's directory and check that what is stored can be continued; True if there is an earlier part.

    Raises:
        JobRefused: It cannot be used.
    """
    inputs = preflight.inputs
    try:
        resumed = directory.open(
            new_manifest(job, shards=shards, inputs=inputs.as_json()), resume=options.resume, force=options.force
        )
        if resumed:
            # The workers check this too, but only after the engine has started.
            read_state(
                directory.storage,
                shards=range(shards),
                shard_count=shards,
                repeats=repeats_of(job),
                logs={},
                tasks=None if options.force else inputs.tasks,
                rollouts=None if options.force else inputs.rollouts,
            )
    except (RunRefused, RecordError, StorageError, OSError) as error:
        raise JobRefused(describe_error(error)) from error
    except Exception as error:
        # Every object store's library raises its own exceptions.
        raise JobRefused(f"--output {options.output}: {type(error).__name__}: {error}") from error
    return resumed


class _LocalRun:
    def __init__(
        self,
        job: RolloutJob,
        options: RunOptions,
        storage: Storage,
        preflight: Preflight,
        args: ServeArgs,
        served: ServedEndpoint | None,
        shards: int,
        reporter: Reporter,
    ) -> None:
        self._job = job
        self._options = options
        self._storage = storage
        self._preflight = preflight
        self._shards = shards
        self._reporter = reporter
        self._local = local_directory(job, storage)
        self._logs = self._local / "logs"
        self._interrupts = 0
        self._workers: list[Child] = []
        self._progress: list[Progress] = []
        self._main: asyncio.Task[None] | None = None
        self._seconds: dict[str, float] = {}
        self._args = args
        self._served = served
        self._clock = StartClock(reporter, self._seconds)
        self._parts = AsyncExitStack()
        self._load: EngineLoad | None = None
        self._workers_started = 0.0
        self._problems: list[str] = []

    def execute(self, started: float) -> RunResult:
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._local != Path(self._options.output):
            self._reporter.note(f"logs: {self._logs}")
        run_id = uuid.uuid4().hex
        with ExitStack() as stack:
            scratch = stack.enter_context(scratch_directory())
            stack.enter_context(watchdog(run_id, scratch))
            self._seconds["checks"] = time.perf_counter() - started
            runner = stack.enter_context(asyncio.Runner())
            try:
                runner.run(self._supervise(run_id, scratch))
                # The engine shuts down meanwhile.
                result = self._result(started)
                self._reporter.finish(result)
            finally:
                stopping = time.perf_counter()
                with suppress(KeyboardInterrupt):
                    # The watchdog ends the remaining processes.
                    runner.run(self._parts.aclose())
        if (seconds := time.perf_counter() - stopping) >= _NOTABLE_SECONDS:
            self._reporter.phase("shutdown", seconds)
        return result

    async def _supervise(self, run_id: str, scratch: Path) -> None:
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            await self._run(run_id, scratch)
        except RunFailed as error:
            self._problems.append(str(error))
        except asyncio.CancelledError:
            # Cancelled by the second Ctrl-C; the watchdog ends the remaining processes.
            if self._interrupts == 0:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        assert self._main is not None
        if self._interrupts == 1 and self._workers:
            self._reporter.note("finishing the trajectories in flight; press Ctrl-C again to stop at once")
            for worker in self._workers:
                worker.signal(signal.SIGTERM)
        else:
            self._main.cancel()

    async def _run(self, run_id: str, scratch: Path) -> None:
        metrics_directory = scratch / "metrics"
        metrics_directory.mkdir()
        environment = run_variables(run_id)
        stack = self._parts
        port = stack.enter_context(serve_metrics(metrics_directory, self._options.metrics_port))
        self._reporter.note(f"metrics: http://127.0.0.1:{port}/metrics")
        assignment = self._assignment()
        workers: list[Child] = []
        host: EngineHost | None = None
        try:
            # They initialize while the engine starts.
            for number in range(len(assignment)):
                worker = await self._start_worker(number, metrics_directory, environment)
                workers.append(worker)
            if self._needs_host:
                host = await EngineHost.start(
                    self._job, self._args, scratch=scratch, log=self._logs / "generation.log",
                    environment=environment,
                )  # fmt: skip
                stack.push_async_callback(self._stop, host.child, HOST_PATIENCE_SECONDS)
            endpoint = await self._started(host, scratch)
            if self._options.monitor:
                await self._start_monitor(environment, port, endpoint.metrics_port)
            engines = (
                simulated_shares(self._args, len(assignment)) if endpoint.url is None else [None] * len(assignment)
            )
            self._workers_started = time.perf_counter()
            for number, (worker, shards) in enumerate(zip(workers, assignment, strict=True)):
                # Metrics of workers are summed, so each gets its share.
                planned = share(self._planned, number, len(assignment))
                config = self._worker_config(endpoint, shards, planned, engines[number])
                await worker.send_line(config.encode())
                self._workers.append(worker)
                self._progress.append(Progress())
            await self._watch(None if host is None else host.child, endpoint)
            self._seconds["rollouts"] = time.perf_counter() - self._workers_started
        finally:
            await self._stop_workers(workers)
            if host is not None:
                host.child.signal(signal.SIGTERM)

    @property
    def _needs_host(self) -> bool:
        generation = self._job.spec.generation
        if generation.external is not None or self._served is not None:
            return False
        return generation.engine != "Simulated" or self._options.serve

    async def _started(self, host: EngineHost | None, scratch: Path) -> PolicyEndpoint:
        """Wait until the job's engine can generate.

        Raises:
            RunFailed: It cannot, or not in time.
        """
        external = self._job.spec.generation.external
        deadline = float(self._job.spec.startup_deadline_seconds)
        if external is not None or self._served is not None:
            async with self._clock.ticking():
                return await self._elsewhere(external, deadline)
        if host is None:
            return simulated_endpoint(self._args)
        endpoint = await host.ready(self._clock, deadline=deadline)
        tokens = write_secret(scratch / "tokens.json", msgspec.json.encode(host.tokens))
        self._reporter.note(f"policy: {endpoint.url} (tokens, until the run ends: {tokens})")
        return endpoint

    async def _elsewhere(self, external: External | None, deadline: float) -> PolicyEndpoint:
        """Wait for an engine that this run does not start."""
        self._clock.begin("endpoint")

        def report(trouble: str) -> None:
            left = clock(max(0.0, deadline - self._clock.elapsed))
            self._reporter.note(f"waiting for the endpoint, {left} left: {trouble}")

        if external is not None:
            endpoint = await external_endpoint(
                external,
                window=self._job.spec.rollout.max_sequence_length,
                deadline=deadline,
                environment={**os.environ, **literal_variables(self._job.spec.workers.env)},
                trouble=report,
            )
        else:
            assert self._served is not None
            self._reporter.note(f"engine: {self._served.description}")
            weights = self._job.spec.weights
            endpoint = await served_ready(
                self._served,
                version=None if weights is None else weights.version,
                deadline=deadline,
                trouble=report,
            )
        self._clock.finish("endpoint", self._clock.elapsed)
        return endpoint

    async def _start_worker(self, number: int, metrics: Path, environment: Mapping[str, str]) -> Child:
        """Start a worker without its configuration: it initializes while the engine starts."""
        return await Child.start(
            "kuberoll_workers.worker",
            ["--tokenizer", self._preflight.source.tokenizer],
            log=self._logs / f"worker-{number}.log",
            environment={
                **environment,
                "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                **self._python_path(),
                **literal_variables(self._job.spec.workers.env),
            },
        )

    async def _stop_workers(self, workers: Sequence[Child]) -> None:
        for worker in workers:
            await self._stop(worker, WORKER_PATIENCE_SECONDS)

    async def _stop(self, child: Child, patience: float) -> None:
        # After a second Ctrl-C do not wait; the watchdog ends the remaining processes.
        await child.stop(patience if self._interrupts < 2 else 0.0)

    async def _start_monitor(self, environment: Mapping[str, str], port: int, engine_port: int | None) -> None:
        from kuberoll_workers.monitor.prometheus import PrometheusUnavailable, Target, graph_url, prometheus

        job = self._job.metadata.name
        targets = [Target(name="kuberoll", address=f"127.0.0.1:{port}")]
        if engine_port is not None:
            # The engine's metrics do not have the job's name.
            targets.append(Target(name="engine", address=f"127.0.0.1:{engine_port}", labels={"rolloutjob": job}))
        directory = self._local / "prometheus"
        try:
            url = await self._parts.enter_async_context(prometheus(targets, directory, environment=environment))
        except PrometheusUnavailable as error:
            self._reporter.note(f"--monitor: {error}. The run continues without it")
            return
        self._reporter.note(f"prometheus: {url} (data: {directory})")
        self._reporter.link("graphs", graph_url(url))
        self._reporter.note(f"alerts: {url}/alerts")

    def _assignment(self) -> list[list[int]]:
        """Shards by worker process; a shard's results do not depend on its process."""
        workers = max(1, min(self._job.spec.workers.replicas, self._shards))
        return [list(range(number, self._shards, workers)) for number in range(workers)]

    def _worker_config(
        self, endpoint: PolicyEndpoint, shards: list[int], planned: int, engine: ServeArgs | None
    ) -> WorkerConfig:
        return WorkerConfig(
            job=self._job,
            base=str(self._options.base.resolve()),
            tokenizer=self._preflight.source.tokenizer,
            endpoint=endpoint.url,
            max_model_len=endpoint.max_model_len,
            output=self._output_location(),
            turns=str(self._local.resolve()) if self._job.spec.rollout.journal_turns else None,
            shards=shards,
            shard_count=self._shards,
            # With --force, stored trajectories may be from a longer dataset.
            tasks=None if self._options.force else self._preflight.inputs.tasks,
            rollouts=None if self._options.force else self._preflight.inputs.rollouts,
            blocks=list(self._preflight.inputs.blocks),
            planned=planned,
            token=endpoint.token,
            simulated=engine,
        )

    def _output_location(self) -> str:
        # Workers may have another working directory.
        return (
            str(self._storage.path.resolve()) if isinstance(self._storage, DirectoryStorage) else self._options.output
        )

    def _python_path(self) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([*import_directories(self._options.base), *([given] if given else [])])}

    async def _watch(self, host: Child | None, endpoint: PolicyEndpoint) -> None:
        """Wait until all workers have ended.

        Raises:
            RunFailed: Generation ended first; workers cannot continue without it.
        """
        readers = asyncio.gather(*(self._follow(number) for number in range(len(self._workers))))
        host_end = asyncio.create_task(host.wait()) if host is not None else None
        refresh = asyncio.create_task(self._refresh())
        load = self._poll_load(endpoint)
        try:
            waiting: set[asyncio.Future[Any]] = {readers}
            if host_end is not None:
                waiting.add(host_end)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not readers.done() and host is not None:
                raise RunFailed(
                    f"generation ended unexpectedly (exit code {host.returncode}); see {host.log}\n{host.log_tail()}"
                )
            await readers
            self._reporter.progress(self._totals())
        finally:
            ending = [task for task in (readers, refresh, host_end, load) if task is not None]
            for task in ending:
                task.cancel()
            # Their results have been read or no longer matter.
            await asyncio.gather(*ending, return_exceptions=True)

    def _poll_load(self, endpoint: PolicyEndpoint) -> asyncio.Task[None] | None:
        """Start to poll the engine's load, if the engine is one of KubeRoll's."""
        if endpoint.url is None or self._job.spec.generation.external is not None:
            return None
        from kuberoll_workers.local.engine_load import EngineLoad

        self._load = EngineLoad(endpoint.url, endpoint.token)
        return asyncio.create_task(self._load.poll())

    async def _follow(self, number: int) -> None:
        worker = self._workers[number]
        problem: str | None = None
        async for report in worker.reports():
            if "problem" in report:
                problem = str(report["problem"])
            else:
                self._progress[number] = msgspec.convert(report, Progress)
        code = await worker.wait()
        if self._interrupts and code == -signal.SIGTERM:
            return  # it was told to drain before it was ready
        if problem is not None:
            # Several workers may report the same problem.
            if problem not in self._problems:
                self._problems.append(problem)
        elif code != 0 or not self._progress[number].done:
            self._problems.append(
                f"worker {number} ended unexpectedly (exit code {code}); see {worker.log}\n{worker.log_tail()}"
            )

    async def _refresh(self) -> None:
        while True:
            self._reporter.progress(self._totals())
            await asyncio.sleep(REFRESH_SECONDS)

    def _totals(self) -> RunProgress:
        total = Progress()
        for field in fields(Progress):
            values = [getattr(progress, field.name) for progress in self._progress]
            setattr(total, field.name, all(values) if field.name == "done" else sum(values))
        return RunProgress(
            planned=self._planned,
            progress=total,
            seconds=time.perf_counter() - self._workers_started,
            tokens_in_flight=0 if self._load is None else self._load.tokens,
        )

    def _result(self, started: float) -> RunResult:
        result = RunResult(seconds=self._seconds, location=self._options.output)
        end = RunEnd(planned=self._planned, wanted=self._job.spec.rollout.groups.wanted)
        if self._workers:
            result.totals = self._totals()
            run = RunFiles(self._options.output)
            end = end_run(
                self._job,
                run,
                trajectories=self._preflight.inputs.trajectories,
                note=self._reporter.note,
                tokenizer=self._preflight.source.tokenizer,
            )
            self._seconds |= end.seconds
        if end.aggregates is not None:
            result.summaries, result.tail = end.aggregates.summaries, end.aggregates.tail
            result.causes = end.aggregates.contents.causes.by_count()
        failed_steps = [
            f"{step}: {describe_error(error)}; run `kuberoll {_COMMANDS[step]} {self._options.output}` to make it again"
            for step, error in end.failed_steps.items()
        ]
        try:
            result.files = self._storage.files()
        except Exception as error:
            # Every object store's library raises its own exceptions.
            failed_steps.append(f"files: {describe_error(error)}")
        self._seconds["total"] = time.perf_counter() - started
        result.exit_code, result.problem = self._outcome(end)
        if failed_steps:
            problem = result.problem or "all trajectories are stored, but not everything could be made from them:"
            result.exit_code = result.exit_code or EXIT_POSTPROCESSING
            result.problem = "\n".join([problem, *failed_steps])
        return result

    @property
    def _planned(self) -> int:
        """Number of trajectories that the run should finish."""
        wanted = self._job.spec.rollout.groups.wanted
        return planned_trajectories(self._job, self._preflight.inputs.trajectories, wanted=wanted)

    def _outcome(self, end: RunEnd) -> tuple[int, str | None]:
        """The exit code, and why it is not 0."""
        stored, missing, failed = 0, end.missing, 0
        if end.aggregates is not None:
            stored, failed = end.aggregates.trajectories, end.aggregates.failed
        elif self._workers:
            # Without aggregates, only the workers have counts.
            stored = sum(progress.trajectories + progress.resumed for progress in self._progress)
            missing = max(0, end.planned - stored)
        resume = f"continue with --resume --output {self._options.output}"
        words = f"{stored} of {end.planned} trajectories are stored; {resume}"
        if self._problems:
            return 1, "\n".join([*self._problems, words])
        if self._interrupts and missing:
            return 130, f"interrupted: {words}"
        if missing:
            # Resuming does not help if the dataset has no more groups.
            return 1, (None if end.wanted is None else end.problem()) or f"only {words}"
        budget = self._job.spec.rollout.max_failed_fraction
        if failed > budget * end.planned:
            return 1, (
                f"{failed} of {end.planned} trajectories failed, more than rollout.maxFailedFraction ({budget:g}) "
                f"allows; their causes are in {self._storage.where(FAILURES)}. To retry them, {resume}; "
                "add --force if you have changed code or data"
            )
        return 0, None


def describe_error(error: BaseException) -> str:
    """Text of an error for the user; with the exception's type unless its message is written for users."""
    words = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{words}: free some space there first"
    for_users = isinstance(error, RecordError | RunRefused | StorageError | NotARun | OSError)
    return words if for_users else f"{type(error).__name__}: {words}"


def import_directories(base: Path) -> list[str]:
    """Directories in which modules of entrypoints are searched, besides installed packages."""
    return list(dict.fromkeys([str(base.resolve()), str(Path.cwd())]))


def local_directory(job: RolloutJob, storage: Storage) -> Path:
    """Local directory of a run for logs and turn journals: its output, if that is a directory."""
    if isinstance(storage, DirectoryStorage):
        return storage.path
    place = hashlib.blake2b(storage.location.encode(), digest_size=4).hexdigest()
    return Path("runs") / f"{job.metadata.name}-{place}"


def _storage(output: str) -> Storage:
    if output.startswith("pvc:"):
        raise JobRefused(
            f"--output {output}: this is a volume of a cluster; give a directory or an object store with --output"
        )
    if output.startswith("memory:"):
        raise JobRefused(f"--output {output}: memory belongs to one process, and a run has several: give a directory")
    try:
        return open_storage(output)
    except StorageError as error:
        raise JobRefused(f"--output {error}") from error
