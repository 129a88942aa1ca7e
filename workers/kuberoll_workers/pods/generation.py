"""A generation pod: the Serve app with one replica, under a Ray of its own, until it is told to end.

    python -m kuberoll_workers.pods.generation --config FILE

A replica may span pods: then this is one of its group, which leads it, or follows the one that does.

FILE is a `contract.PodConfig`. Generation is on its port; `/healthz`, `/livez`, `/weights` and `/metrics` are on
8080, answered by this process, however busy the engine is. The file may change while the pod runs: its `spec.weights`
are followed, the rest is read at the start only. See docs/pods.md.
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
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from kuberoll_api.contract import (
    APPLICATION,
    DEPLOYMENT,
    EXIT_FAILED,
    EXIT_REFUSED,
    SCOPES,
    STATUS_PORT,
    PodConfig,
    PodWeights,
    ServeArgs,
    token_variable,
    user_config,
    weights_source,
)
from kuberoll_api.http_server import serving
from kuberoll_api.logs import log_to_stderr
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.pods.files import ConfigRefused, clip, read_config, write_termination_message
from kuberoll_workers.pods.http import health_route, json_route
from kuberoll_workers.policy.auth import Tokens, take_tokens
from kuberoll_workers.serving import controller
from kuberoll_workers.serving.app import requested_gpus
from kuberoll_workers.serving.engines.interface import OWN_VERSION
from kuberoll_workers.serving.engines.registry import ENGINES
from kuberoll_workers.serving.group import PodGroup, follow, pod_group
from kuberoll_workers.serving.host import (
    Host,
    HostConfig,
    adopt_orphans,
    end_descendants,
    exit_on_signal,
    metrics_port,
)
from kuberoll_workers.serving.ray_settings import free_ports, haproxy_problem, ray_environment, serve_environment
from kuberoll_workers.serving.weights import version_of, wanted_weights

PORT_VARIABLE = "KUBEROLL_PORT"
"""Environment variable of a port in place of the configured one, for several pods on one machine."""

_LOOK_SECONDS = 2.0
_DRAIN_SECONDS = 20.0
_METRICS_SECONDS = 10.0
_ASK_SECONDS = 10.0

_log = logging.getLogger(__name__)


class EngineLost(Exception):
    """The engine was ready once and does not become ready again."""


class Status:
    """What a pod knows of itself; written by its main thread, read by the one that answers.

    Attributes:
        problem: Why it cannot generate; None: it can.
        metrics_port: Where Ray's agent has its metrics; None: not yet.
        address: Of that agent.
        wanted: Version of the weights that the job asks for.
        served: Version of those that it generates with; None: with none, or nobody knows.
        weights_problem: Why the wanted ones are not served; None: they are, or are being loaded.
    """

    def __init__(self) -> None:
        self.problem: str | None = "the engine is starting"
        self.metrics_port: int | None = None
        self.address = "127.0.0.1"
        self.wanted: str | None = None
        self.served: str | None = None
        self.weights_problem: str | None = None

    def weights(self) -> PodWeights:
        """The answer at `/weights`."""
        return PodWeights(wanted=self.wanted, served=self.served, problem=self.weights_problem)

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
                async with http.get(f"http://{self.address}:{self.metrics_port}/metrics") as answer:
                    content_type = answer.headers.get("content-type", "text/plain")
                    return web.Response(body=await answer.read(), headers={"content-type": content_type})
            except (aiohttp.ClientError, OSError) as error:
                return web.Response(status=503, text=f"Ray's metrics: {type(error).__name__}: {error}")

        return [
            health_route(problem),
            web.get("/livez", alive),
            json_route("/weights", self.weights),
            web.get("/metrics", metrics),
        ]


@contextmanager
def serve_status(status: Status, *, host: str, port: int) -> Iterator[None]:
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


def host_config(
    job: RolloutJob, *, port: int, scratch: Path, tokens: Tokens, group: PodGroup | None = None
) -> HostConfig:
    """What the host of a pod is told: one replica, its GPUs those of the pod, or of the group that it leads."""
    generation = job.spec.generation
    placed = {"gpus": requested_gpus(generation)} if group is None else _spread(job)
    return HostConfig(
        app=ServeArgs.of(
            generation,
            weights=weights_source(job.spec.weights),
            drain_seconds=_DRAIN_SECONDS,
            replicas=1,
            autoscaling=None,
            **placed,
        ),
        scratch=str(scratch),
        routing=generation.routing,
        # Serve's parts look for each other on loopback, and others for them at the pod's address.
        address="0.0.0.0",
        port=port,
        tokens=tokens,
        group=group,
        patience=float(job.spec.startup_deadline_seconds),
    )


def _spread(job: RolloutJob) -> dict[str, Any]:
    """The arguments of a replica that spans pods: one GPU a part, as vLLM wants it; the first has the replica's CPU."""
    generation = job.spec.generation
    gpus = round(generation.gpus_per_replica or ENGINES[generation.engine].world_size(generation.engine_args))
    return {"gpus": None, "bundles": [{"CPU": 1.0, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(gpus - 1))]}


class JobFile:
    """The file of the job, looked at again and again: whoever mounts it changes it in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: bytes | None = None

    def reread(self) -> None:
        """Take what it says for a change."""
        self._read = None

    def read_if_changed(self) -> tuple[PodConfig, RolloutJob] | None:
        """What it says, if that is not what it said before.

        Raises:
            ConfigRefused, ValidationError: It cannot be used; said once for each change.
        """
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise ConfigRefused(f"{self._path}: {error}") from error
        if data == self._read:
            return None
        self._read = data
        config = read_config(self._path)
        return config, RolloutJob.model_validate(config.job)


def run(host: Host, status: Status, file: JobFile, *, patience: float, group: PodGroup | None = None) -> None:
    """Start, and watch over it until a signal ends the process.

    Args:
        patience: Seconds that an engine which was lost has to come back.
        group: The pods that the replica spans.

    Raises:
        EngineLost: It did not.
        Exception: What Ray or Serve raised while it started.
    """
    host.start()
    if group is not None:
        status.address = group.address
    status.metrics_port = metrics_port(None if group is None else group.address)
    asyncio.run(_report_weights(status))
    status.problem = None
    lost: float | None = None
    wake = threading.Event()
    while True:
        wake.wait(_LOOK_SECONDS)
        problem = _serve_problem()
        if problem != status.problem:
            _log.log(logging.INFO if problem is None else logging.WARNING, problem or "the engine is ready again")
        status.problem = problem
        asyncio.run(_follow_weights(status, file))
        if problem is None:
            lost = None
        elif lost is None:
            lost = time.monotonic()
        elif time.monotonic() - lost > patience:
            raise EngineLost(problem)


async def _follow_weights(status: Status, file: JobFile) -> None:
    """Have Serve load what the job asks for now, and see what is served; trouble is said and tried again."""
    try:
        if (read := file.read_if_changed()) is not None:
            weights = read[1].spec.weights
            wanted = weights_source(weights)
            status.wanted = version_of(wanted)
            if wanted_weights(await controller.get_user_config(APPLICATION, DEPLOYMENT)) != wanted:
                _log.info("the job asks for the weights %s", status.wanted)
                await controller.set_user_config(APPLICATION, DEPLOYMENT, user_config(wanted))
    except (ConfigRefused, ValidationError) as error:
        _log.warning("the job has changed, but cannot be read: %s", error)
    except Exception:
        file.reread()
        _log.exception("the job's weights are not handed to Serve")
    await _report_weights(status)


async def _report_weights(status: Status) -> None:
    try:
        states = await controller.call_each_replica(APPLICATION, DEPLOYMENT, "weights_state", seconds=_ASK_SECONDS)
    except Exception as error:
        status.served, status.weights_problem = None, f"{type(error).__name__}: {error}"
        return
    status.served = states[0]["version"] if states else None
    problem = states[0]["problem"] if states else None
    if problem is not None and problem != status.weights_problem:
        _log.warning("the weights %s are not served: %s", status.wanted, problem)
    status.weights_problem = problem


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


def _follow(group: PodGroup, job: RolloutJob, scratch: Path) -> int:
    """Be a part of the replica that another pod leads; the exit code."""
    status = Status()
    status.problem = f"this pod is a part of the replica of {group.leader}"
    # Where vLLM puts its parts, they read the same settings.
    settings = serve_environment(job.spec.generation.routing, scratch, free_ports(3), haproxy=haproxy_problem() is None)
    os.environ.update(ray_environment(group.token) | settings)
    try:
        with serve_status(status, host=group.address, port=STATUS_PORT):
            follow(group, seconds=float(job.spec.startup_deadline_seconds))
    except Exception as error:
        write_termination_message(clip(str(error)).encode())
        _log.error("%s", error)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)
    return 0


def _tokens() -> Tokens:
    try:
        found = take_tokens(os.environ)
    except ValueError as error:
        raise ConfigRefused(str(error)) from error
    if found is None:
        # Whoever reaches the port could do everything.
        raise ConfigRefused(f"{', '.join(map(token_variable, SCOPES))}: not set; the policy's tokens are awaited there")
    return found


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.generation", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    arguments = parser.parse_args()
    log_to_stderr()
    file = JobFile(arguments.config)
    try:
        read = file.read_if_changed()
        assert read is not None
        config, job = read
        tokens = _tokens()
        group = pod_group(os.environ, tokens.weights)
    except (ConfigRefused, ValidationError, ValueError) as error:
        _log.error("%s", error)
        write_termination_message(clip(str(error)).encode())
        sys.exit(EXIT_REFUSED)
    log_to_stderr(job=job.metadata.name)
    port = int(os.environ.get(PORT_VARIABLE) or config.port)
    # Always /tmp, and short: the paths of Ray's and the proxy's sockets have little room.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    os.environ["TMPDIR"] = str(scratch)
    adopt_orphans()
    signal.signal(signal.SIGTERM, exit_on_signal)
    if group is not None and group.index > 0:
        sys.exit(_follow(group, job, scratch))
    host = Host(host_config(job, port=port, scratch=scratch, tokens=tokens, group=group), sys.stderr)
    status = Status()
    status.wanted = OWN_VERSION if job.spec.weights is None else job.spec.weights.version
    code = 0
    try:
        with serve_status(status, host=os.environ.get("POD_IP") or "0.0.0.0", port=STATUS_PORT):
            try:
                run(host, status, file, patience=float(job.spec.startup_deadline_seconds), group=group)
            finally:
                started, status.problem = status.metrics_port is not None, status.problem or "the pod is ending"
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if started:
                    _log.info("ending: finishing the requests under way")
                    host.drain(_DRAIN_SECONDS)
    except Exception as error:
        code, cause = EXIT_FAILED, host.failure(error)
        write_termination_message(clip(cause).encode())
        host.report_failure(cause)
    finally:
        host.stop()
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)
    sys.exit(code)


if __name__ == "__main__":
    main()
