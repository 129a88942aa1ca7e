"""A RolloutJob on this machine: generation, workers, metrics, aggregation, and their shutdown."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.generation import External
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.provenance import model_commit
from kuberoll_workers.data.shards import share
from kuberoll_workers.local.early_start import EarlyStart
from kuberoll_workers.local.errors import describe_error
from kuberoll_workers.local.generation import (
    HOST_PATIENCE_SECONDS,
    REFRESH_SECONDS,
    Engine,
    EngineHost,
    FirstEnd,
    KeptEngine,
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
    while_serving,
    write_secret,
)
from kuberoll_workers.local.metrics import serve_metrics
from kuberoll_workers.local.options import RunOptions, import_directories
from kuberoll_workers.local.outages import OutageNotes
from kuberoll_workers.local.outcome import outcome
from kuberoll_workers.local.preflight import JobRefused, Preflight, check
from kuberoll_workers.local.processes import Child, see_log
from kuberoll_workers.local.reporter import Reporter, RunProgress, RunResult
from kuberoll_workers.local.run_output import check_output, local_directory, open_run, storage_of
from kuberoll_workers.local.watchdog import watchdog
from kuberoll_workers.local.worker_setup import WorkerSetup
from kuberoll_workers.output.journal import write_atomically
from kuberoll_workers.output.policy_file import POLICY_FILE, PolicyFile
from kuberoll_workers.output.records import FAILURES
from kuberoll_workers.output.run_directory import (
    RunDirectory,
    RunRefused,
)
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.workers_file import WORKERS_FILE, WorkersFile
from kuberoll_workers.policy.auth import Tokens
from kuberoll_workers.policy.readiness import waiting_text
from kuberoll_workers.worker.config import Progress
from kuberoll_workers.worker.settings import planned_trajectories

if TYPE_CHECKING:
    from kuberoll_workers.local.engine_load import EngineLoad
    from kuberoll_workers.local.services import ServiceProcess

EXIT_POSTPROCESSING = 3
"""Exit code: every trajectory is stored, but the aggregates, the report or the list of files could not be made."""

# Commands that make again what could not be made; other endings have none.
_COMMANDS = {"aggregation": "kuberoll aggregate", "report": "kuberoll report"}

WORKER_PATIENCE_SECONDS = 5.0
# A shorter shutdown is not worth a line.
_NOTABLE_SECONDS = 1.0


def run(job: RolloutJob, options: RunOptions, reporter: Reporter, early: EarlyStart) -> RunResult:
    """Run a job to its end.

    Raises:
        JobRefused: The job cannot run here; nothing was started and nothing written.
    """
    started = time.perf_counter()
    # The module of an entrypoint may be next to the manifest or in the working directory.
    sys.path[:0] = import_directories(options.base)
    shards = job.spec.workers.shard_count
    storage = storage_of(options.output)
    preflight = check(job, base=options.base, earlier=check_output(storage, options))
    args = serve_args(job, preflight.source)
    served = served_endpoint(job, args, options.endpoint)
    directory = RunDirectory(storage)
    try:
        resumed = open_run(directory, job, options, preflight, shards)
        for note in preflight.notes:
            reporter.note(note)
        if resumed:
            reporter.note(f"continuing the run in {options.output}")
        elif options.resume:
            reporter.note(f"{options.output} contains no run yet: starting one")
        reporter.phase("checks", time.perf_counter() - started)
        result = _LocalRun(job, options, directory, preflight, args, served, shards, reporter, early).execute(started)
    except RunRefused as error:
        raise JobRefused(str(error)) from error
    finally:
        directory.close()
    return result


class _LocalRun:
    def __init__(
        self,
        job: RolloutJob,
        options: RunOptions,
        directory: RunDirectory,
        preflight: Preflight,
        args: ServeArgs,
        served: ServedEndpoint | None,
        shards: int,
        reporter: Reporter,
        early: EarlyStart,
    ) -> None:
        self._job = job
        self._options = options
        self._storage = storage = directory.storage
        self._preflight = preflight
        self._reporter = reporter
        self._local = local_directory(job, storage)
        self._early = early
        self._logs = self._local / "logs"
        self._interrupts = 0
        self._workers: list[Child] = []
        self._progress: list[Progress] = []
        self._main: asyncio.Task[None] | None = None
        self._seconds: dict[str, float] = {}
        self._args = args
        self._served = served
        self._commit = model_commit(directory.manifest.sources)
        self._setup = WorkerSetup(
            job=job, options=options, storage=storage, preflight=preflight, shards=shards, directory=self._local,
            manifest=directory.manifest, early=early, endpoint=self._has_endpoint,
        )  # fmt: skip
        self._clock = StartClock(reporter, self._seconds)
        self._parts = AsyncExitStack()
        self._load: EngineLoad | None = None
        self._workers_started = 0.0
        self._problems: list[str] = []
        self._outages = OutageNotes(reporter)
        self._held = ""
        self._direct: dict[int, str] = {}
        self._direct_token = None if isinstance(storage, DirectoryStorage) else secrets.token_hex(32)

    def execute(self, started: float) -> RunResult:
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._local != Path(self._options.output):
            self._reporter.note(f"logs: {self._logs}")
        early = self._early
        with watchdog(early.run_id, early.scratch):
            self._seconds["checks"] = time.perf_counter() - started
            try:
                early.runner.run(self._supervise())
                # The engine shuts down meanwhile.
                result = self._result(started)
                self._reporter.finish(result)
            finally:
                stopping = time.perf_counter()
                with suppress(KeyboardInterrupt):
                    # The watchdog ends the remaining processes.
                    early.runner.run(self._parts.aclose())
        if (seconds := time.perf_counter() - stopping) >= _NOTABLE_SECONDS:
            self._reporter.phase("shutdown", seconds)
        return result

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            await self._run()
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

    async def _run(self) -> None:
        scratch, environment = self._early.scratch, self._early.variables
        stack = self._parts
        port = stack.enter_context(serve_metrics(self._early.metrics, self._options.metrics_port))
        self._reporter.note(f"metrics: http://127.0.0.1:{port}/metrics")
        assignment = self._setup.assignment()
        workers: list[Child] = []
        host: EngineHost | None = None
        services: list[ServiceProcess] = []
        try:
            # They initialize while the engine starts.
            for number in range(len(assignment)):
                worker = await self._setup.start(number)
                workers.append(worker)
            if self._needs_host:
                host = await EngineHost.start(
                    self._job, self._args, scratch=scratch, log=self._logs / "generation.log",
                    environment=environment, drains=False,
                )  # fmt: skip
                stack.push_async_callback(self._stop, host, HOST_PATIENCE_SECONDS)
            services = await self._start_services()
            endpoint = await self._started(host, scratch)
            engines_of_all = [*([] if (own := host or self._kept_engine) is None else [own]), *services]
            engine = FirstEnd(engines_of_all) if engines_of_all else None
            await while_serving(engine, self._services_ready(services))
            if self._options.monitor:
                await self._start_monitor(environment, port, endpoint.metrics_port)
            engines = (
                simulated_shares(self._args, len(assignment)) if endpoint.url is None else [None] * len(assignment)
            )
            self._workers_started = time.perf_counter()
            for number, (worker, shards) in enumerate(zip(workers, assignment, strict=True)):
                # Metrics of workers are summed, so each gets its share.
                planned = None if self._planned is None else share(self._planned, number, len(assignment))
                config = self._setup.config(
                    endpoint,
                    shards,
                    planned,
                    engines[number],
                    {service.name: service.endpoint for service in services},
                    self._direct_token,
                )
                await worker.send_line(config.encode())
                self._workers.append(worker)
                self._progress.append(Progress())
            await self._watch(engine, endpoint)
            self._seconds["rollouts"] = time.perf_counter() - self._workers_started
        finally:
            for name in (POLICY_FILE, WORKERS_FILE):
                (self._local / name).unlink(missing_ok=True)
            await self._stop_workers(workers)
            if host is not None:
                host.terminate()
            for service in services:
                service.terminate()

    async def _start_services(self) -> list[ServiceProcess]:
        """Start the servers of the job's services."""
        if not self._job.spec.services:
            return []
        from kuberoll_workers.local.services import start_services

        services = await start_services(
            self._job.spec.services,
            self._preflight.services,
            scratch=self._early.scratch,
            logs=self._logs,
            environment=self._early.variables,
        )
        for service in services:
            self._parts.push_async_callback(self._stop, service, HOST_PATIENCE_SECONDS)
        return services

    async def _services_ready(self, services: Sequence[ServiceProcess]) -> None:
        """Wait until the services can be asked.

        Raises:
            RunFailed: One cannot, or not in time.
        """
        for service in services:
            await service.ready(self._clock, deadline=float(self._job.spec.startup_deadline_seconds))

    @property
    def _kept_engine(self) -> KeptEngine | None:
        return None if self._served is None else self._served.engine

    @property
    def _generates_elsewhere(self) -> bool:
        return self._job.spec.generation.external is not None or self._served is not None

    @property
    def _has_endpoint(self) -> bool:
        """False if the workers simulate the engine."""
        simulated = self._job.spec.generation.engine == "Simulated" and not self._options.serve
        # Workers that simulate the engine themselves have no endpoint for environments.
        asked = any(spec.needs_endpoint for spec in self._job.spec.environments)
        return self._generates_elsewhere or asked or not simulated

    @property
    def _needs_host(self) -> bool:
        return self._has_endpoint and not self._generates_elsewhere

    async def _started(self, host: EngineHost | None, scratch: Path) -> PolicyEndpoint:
        """Wait until the job's engine can generate.

        Raises:
            RunFailed: It cannot, or not in time.
        """
        external = self._job.spec.generation.external
        deadline = float(self._job.spec.startup_deadline_seconds)
        if self._generates_elsewhere:
            async with self._clock.ticking():
                return await self._elsewhere(external, deadline)
        if host is None:
            return simulated_endpoint(self._args)
        endpoint = await host.ready(self._clock, deadline=deadline)
        assert endpoint.url is not None
        tokens = self._write_policy(endpoint.url, host.tokens, scratch)
        self._reporter.note(f"policy: {endpoint.url} (tokens, until the run ends: {tokens})")
        return endpoint

    def _write_policy(self, url: str, tokens: Tokens, scratch: Path) -> Path:
        """Write where a trainer of this user publishes weights, until the run ends; return the file of the tokens."""
        path = write_secret(scratch / "tokens.json", msgspec.json.encode(tokens))
        file = self._local / POLICY_FILE
        # One that a killed run left may have other permissions.
        file.unlink(missing_ok=True)
        write_secret(file, msgspec.json.encode(PolicyFile(url=url, tokens=str(path))))
        return path

    def _write_workers(self) -> None:
        """Write where a trainer of this user finds the workers, until the run ends."""
        path = self._early.scratch / "worker-tokens.json"
        if not path.exists():
            write_secret(path, msgspec.json.encode({"read": self._direct_token}))
        addresses = [address for _, address in sorted(self._direct.items())]
        # Trainers look at it at any time.
        write_atomically(
            self._local / WORKERS_FILE, msgspec.json.encode(WorkersFile(addresses=addresses, tokens=str(path)))
        )

    async def _elsewhere(self, external: External | None, deadline: float) -> PolicyEndpoint:
        """Wait for an engine that this run does not start."""
        self._clock.begin("endpoint")

        def report(trouble: str) -> None:
            self._reporter.note(waiting_text(trouble, deadline - self._clock.elapsed))

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
            ready = served_ready(
                self._served,
                version=None if weights is None else weights.version,
                deadline=deadline,
                trouble=report,
                commit=self._commit,
            )
            endpoint = await while_serving(self._kept_engine, ready)
            if (kept := self._kept_engine) is not None and endpoint.url is not None:
                self._write_policy(endpoint.url, kept.tokens, self._early.scratch)
        self._clock.finish("endpoint", self._clock.elapsed)
        return endpoint

    async def _stop_workers(self, workers: Sequence[Child]) -> None:
        for worker in workers:
            await self._stop(worker, WORKER_PATIENCE_SECONDS)

    async def _stop(self, part: Child | EngineHost | ServiceProcess, patience: float) -> None:
        # After a second Ctrl-C do not wait; the watchdog ends the remaining processes.
        await part.stop(patience if self._interrupts < 2 else 0.0)

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

    async def _watch(self, engine: Engine | None, endpoint: PolicyEndpoint) -> None:
        """Wait until all workers have ended.

        Raises:
            RunFailed: The engine ended first; workers cannot continue without it.
        """
        readers = asyncio.gather(*(self._follow(number) for number in range(len(self._workers))))
        refresh = asyncio.create_task(self._refresh())
        load = self._poll_load(endpoint)
        try:
            await while_serving(engine, readers)
            self._reporter.progress(self._totals())
        finally:
            ending = [task for task in (refresh, load) if task is not None]
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
            elif "held" in report:
                # All workers wait for the same trainer.
                if report["held"] and report["held"] != self._held:
                    self._reporter.note(f"held back: {report['held']}")
                self._held = str(report["held"])
            elif "direct" in report:
                self._direct[number] = str(report["direct"])
                self._write_workers()
            elif "waiting" in report:
                self._outages.add(number, report["waiting"], report["seconds"])
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
            self._problems.append(f"worker {number} ended unexpectedly (exit code {code}); {see_log(worker.log)}")

    async def _refresh(self) -> None:
        while True:
            self._reporter.progress(self._totals())
            await asyncio.sleep(REFRESH_SECONDS)

    def _totals(self) -> RunProgress:
        return RunProgress(
            planned=self._planned,
            progress=Progress.sum(self._progress),
            seconds=time.perf_counter() - self._workers_started,
            tokens_in_flight=0 if self._load is None else self._load.tokens,
        )

    def _result(self, started: float) -> RunResult:
        # Not before the first trajectory: aggregates and report are a tenth of all imports.
        from kuberoll_workers.run_end import RunEnd, end_run

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
            result.unscored = end.aggregates.unscored
            result.summary = end.summary
        failed_steps = [
            f"{step}: {describe_error(error)}"
            + (f"; run `{_COMMANDS[step]} {self._options.output}` to make it again" if step in _COMMANDS else "")
            for step, error in end.failed_steps.items()
        ]
        try:
            result.files = self._storage.files()
        except Exception as error:
            # Every object store's library raises its own exceptions.
            failed_steps.append(f"files: {describe_error(error)}")
        self._seconds["total"] = time.perf_counter() - started
        result.exit_code, result.problem = outcome(
            end,
            location=self._options.output,
            failures=self._storage.where(FAILURES),
            max_failed_fraction=self._job.spec.rollout.max_failed_fraction,
            problems=self._problems,
            interrupted=self._interrupts > 0,
            counted=sum(progress.trajectories + progress.resumed for progress in self._progress),
            stopped=bool(self._progress) and all(progress.complete for progress in self._progress),
        )
        if failed_steps:
            problem = result.problem or "all trajectories are stored, but not everything could be made from them:"
            result.exit_code = result.exit_code or EXIT_POSTPROCESSING
            result.problem = "\n".join([problem, *failed_steps])
        return result

    @property
    def _planned(self) -> int | None:
        """Number of trajectories that the run should finish; None: it ends when it is stopped."""
        wanted = self._job.spec.rollout.groups.wanted
        return planned_trajectories(self._job, self._preflight.inputs.trajectories, wanted=wanted)
