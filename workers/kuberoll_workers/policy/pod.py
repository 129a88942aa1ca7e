"""A generation pod: the Serve app with one replica, under a Ray of its own, until it is told to end.

    python -m kuberoll_workers.policy.pod --config FILE

FILE is a `pod_contract.PodConfig`. Generation is on its port; `/healthz`, `/livez` and `/metrics` are on 8080, answered
by this process, however busy the engine is: see docs/pods.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from pydantic import ValidationError

from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_workers.pod_contract import (
    EXIT_FAILED,
    EXIT_REFUSED,
    ConfigRefused,
    clipped,
    leave_message,
    log_to_stderr,
    read_config,
)
from kuberoll_workers.pod_http import health_route, serving
from kuberoll_workers.policy.app import DEPLOYMENT, app_args
from kuberoll_workers.policy.host import APPLICATION, Host, HostConfig, adopt_orphans, exit_on_signal

STATUS_PORT = 8080
PORT_VARIABLE = "KUBEROLL_PORT"
"""Environment variable of a port in place of the configured one, for several pods on one machine."""

_LOOK_SECONDS = 2.0
_DRAIN_SECONDS = 20.0
_METRICS_SECONDS = 10.0

_log = logging.getLogger(__name__)


class EngineLost(Exception):
    """The engine was ready once and does not become ready again."""


class Status:
    """What a pod knows of itself; written by its main thread, read by the one that answers.

    Attributes:
        problem: Why it cannot generate; None: it can.
        metrics_port: Where Ray's agent has its metrics, on this machine; None: not yet.
    """

    def __init__(self) -> None:
        self.problem: str | None = "the engine is starting"
        self.metrics_port: int | None = None

    async def routes(self, http: aiohttp.ClientSession) -> list[web.RouteDef]:
        """What it answers."""

        async def problem() -> str | None:
            return self.problem

        async def alive(_: web.Request) -> web.Response:
            return web.Response(text="ok")

        async def metrics(_: web.Request) -> web.Response:
            if self.metrics_port is None:
                return web.Response(status=503, text="Ray is starting")
            try:
                async with http.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
                    content_type = answer.headers.get("content-type", "text/plain")
                    return web.Response(body=await answer.read(), headers={"content-type": content_type})
            except (aiohttp.ClientError, OSError) as error:
                return web.Response(status=503, text=f"Ray's metrics: {type(error).__name__}: {error}")

        return [health_route(problem), web.get("/livez", alive), web.get("/metrics", metrics)]


@contextmanager
def answering(status: Status, *, host: str, port: int) -> Iterator[None]:
    """Answer for a pod from a thread, whatever the main thread waits for.

    Raises:
        OSError: The address cannot be had.
    """
    bound: Future[asyncio.AbstractEventLoop] = Future()
    end = asyncio.Event()

    async def serve() -> None:
        timeout = aiohttp.ClientTimeout(total=_METRICS_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            serving(await status.routes(http), host=host, port=port),
        ):
            bound.set_result(asyncio.get_running_loop())
            await end.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if bound.done():
                raise
            bound.set_exception(error)

    thread = threading.Thread(target=run, name="kuberoll-status", daemon=True)
    thread.start()
    loop = bound.result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def host_config(job: RolloutJob, *, port: int, scratch: Path) -> HostConfig:
    """What the host of a pod is told: one replica, its GPUs those of the pod."""
    generation = job.spec.generation
    model = generation.model
    app = app_args(generation, model=model.source, tokenizer=model.tokenizer or model.source)
    return HostConfig(
        app=msgspec.structs.replace(app, replicas=1),
        scratch=str(scratch),
        routing=generation.routing,
        # Serve's parts look for each other on loopback, and others for them at the pod's address.
        address="0.0.0.0",
        port=port,
    )


def run(host: Host, status: Status, *, patience: float) -> None:
    """Start, and watch over it until a signal ends the process.

    Args:
        patience: Seconds that an engine which was lost has to come back.

    Raises:
        EngineLost: It did not.
        Exception: What Ray or Serve raised while it started.
    """
    host.start()
    status.metrics_port = _metrics_port()
    status.problem = None
    lost: float | None = None
    wake = threading.Event()
    while True:
        wake.wait(_LOOK_SECONDS)
        problem = _serve_problem()
        if problem != status.problem:
            _log.log(logging.INFO if problem is None else logging.WARNING, problem or "the engine is ready again")
        status.problem = problem
        if problem is None:
            lost = None
        elif lost is None:
            lost = time.monotonic()
        elif time.monotonic() - lost > patience:
            raise EngineLost(problem)


def _metrics_port() -> int | None:
    import ray

    for node in ray.nodes():
        return int(node["MetricsExportPort"]) or None
    return None


def _serve_problem() -> str | None:
    """What Serve's controller says is wrong."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus, DeploymentStatus

    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return "Serve does not know the application"
    deployment = application.deployments[DEPLOYMENT]
    if application.status == ApplicationStatus.RUNNING and deployment.status == DeploymentStatus.HEALTHY:
        return None
    return f"the engine is {deployment.status.value}: {deployment.message}".rstrip(": ")


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.policy.pod", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        config = read_config(arguments.config)
        job = RolloutJob.model_validate(config.job)
    except (ConfigRefused, ValidationError) as error:
        _log.error("%s", error)
        leave_message(clipped(str(error)).encode())
        sys.exit(EXIT_REFUSED)
    log_to_stderr(job=job.metadata.name)
    port = int(os.environ.get(PORT_VARIABLE) or config.port)
    # Always /tmp, and short: the paths of Ray's and the proxy's sockets have little room.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    os.environ["TMPDIR"] = str(scratch)
    adopt_orphans()
    signal.signal(signal.SIGTERM, exit_on_signal)
    host, status = Host(host_config(job, port=port, scratch=scratch), sys.stderr), Status()
    code = 0
    try:
        with answering(status, host=os.environ.get("POD_IP") or "0.0.0.0", port=STATUS_PORT):
            try:
                run(host, status, patience=float(job.spec.startup_deadline_seconds))
            finally:
                started, status.problem = status.metrics_port is not None, status.problem or "the pod is ending"
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if started:
                    _log.info("ending: finishing the requests under way")
                    host.drain(_DRAIN_SECONDS)
    except Exception as error:
        code, cause = EXIT_FAILED, host.failure(error)
        leave_message(clipped(cause).encode())
        host.say_failed(cause)
    finally:
        host.stop()
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)
    sys.exit(code)


if __name__ == "__main__":
    main()
