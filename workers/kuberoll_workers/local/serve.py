"""The engine of a RolloutJob on this machine, until it is interrupted: `kuberoll serve`."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.local import engines
from kuberoll_workers.local.engines import EngineExists, ServedEngine
from kuberoll_workers.local.generation import (
    HOST_PATIENCE_SECONDS,
    EngineHost,
    PolicyEndpoint,
    StartClock,
    serve_args,
    while_serving,
    write_secret,
)
from kuberoll_workers.local.preflight import JobRefused, check_model, check_template
from kuberoll_workers.local.reporter import Reporter
from kuberoll_workers.local.scratch import scratch_directory
from kuberoll_workers.local.watchdog import run_variables, watchdog


class StartInterrupted(Exception):
    """SIGINT or SIGTERM came before the engine was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the command line.

    Attributes:
        base: The manifest's directory, where its relative paths start.
        manifest: The manifest's path, for the command to run it.
        port: Port to serve at; 0: any free one.
    """

    base: Path
    manifest: Path
    port: int = 0


def serve(job: RolloutJob, options: ServeOptions, reporter: Reporter) -> None:
    """Serve a job's engine until SIGINT or SIGTERM.

    Raises:
        JobRefused: The engine cannot be served here; nothing was started.
        RunFailed: It has failed.
        StartInterrupted: It was interrupted before it was ready.
    """
    if job.spec.generation.external is not None:
        raise JobRefused("spec.generation.external: this engine is managed elsewhere; there is nothing to serve here")
    name = job.metadata.name
    source = check_model(job, base=options.base)
    check_template(job, source)
    args = serve_args(job, source)
    run_id = uuid.uuid4().hex
    with ExitStack() as stack:
        try:
            file = stack.enter_context(engines.claim(name))
        except EngineExists as error:
            raise JobRefused(str(error)) from error
        log = file.with_suffix(".log")
        log.unlink(missing_ok=True)
        header = file.with_suffix(".header")
        stack.callback(header.unlink, missing_ok=True)
        scratch = stack.enter_context(scratch_directory())
        stack.enter_context(watchdog(run_id, scratch))
        runner = stack.enter_context(asyncio.Runner())

        def ready(endpoint: PolicyEndpoint, host: EngineHost) -> None:
            assert endpoint.url is not None
            engine = ServedEngine(
                name=name,
                url=endpoint.url,
                pid=os.getpid(),
                tokens=host.tokens,
                args=msgspec.to_builtins(args),
                log=str(log),
            )
            write_secret(header, f"Authorization: Bearer {engine.tokens.read}\n".encode())
            engines.publish(file, engine)
            reporter.close()
            for line in introduction(engine, file, header, options.manifest):
                reporter.note(line)

        async def main() -> None:
            host = await EngineHost.start(
                job, args, scratch=scratch, log=log, environment=run_variables(run_id), drains=True, port=options.port
            )
            try:
                await _serve(host, float(job.spec.startup_deadline_seconds), reporter, ready)
            finally:
                # The engine may take a while to end, and cannot be used any more.
                engines.withdraw(file)
                reporter.close()
                await host.stop(HOST_PATIENCE_SECONDS)

        runner.run(main())


def introduction(engine: ServedEngine, file: Path, header: Path, manifest: Path) -> list[str]:
    """Lines that say how to use the engine.

    Args:
        file: Of its tokens.
        header: Of the HTTP header with the token for reading.
    """
    return [
        f"policy: {engine.url} (OpenAI-compatible: {engine.url}/v1)",
        f"tokens: {file}",
        f"try: curl -H {shlex.quote(f'@{header}')} {engine.url}/v1/models",
        f"run: kuberoll run {manifest} finds this engine by the job's name",
        "Ctrl-C ends it",
    ]


async def _serve(
    host: EngineHost, deadline: float, reporter: Reporter, ready: Callable[[PolicyEndpoint, EngineHost], None]
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stop = asyncio.create_task(stopped.wait())
    starting = asyncio.create_task(host.ready(StartClock(reporter, {}), deadline=deadline))
    try:
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            reporter.note("ending what was started; press Ctrl-C again to end it at once")
            raise StartInterrupted
        ready(starting.result(), host)
        await while_serving(host, stop)
        reporter.note("ending the engine; press Ctrl-C again to end it at once")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for task in (stop, starting):
            task.cancel()
        await asyncio.gather(stop, starting, return_exceptions=True)
