"""A generation pod: the Serve app with one replica, under its own Ray, until SIGTERM.

    python -m kuberoll_workers.pods.generation --config FILE

A replica may span a group of pods: then this pod is its leader or a follower.

FILE is a `contract.PodConfig`. Generation is on its port; `/healthz`, `/livez`, `/weights` and `/metrics` are on
8080, served by this process, however busy the engine is. The file may change while the pod runs: changes of its
`spec.weights` are applied, the rest is read at the start only. See docs/reference/pods.md.
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
    weights_source,
)
from kuberoll_api.http_server import serving
from kuberoll_api.logs import log_to_stderr
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.pods.files import ConfigRefused, clip, job_of, read_config, write_termination_message
from kuberoll_workers.pods.http import health_route, json_route
from kuberoll_workers.policy.auth import Tokens, take_tokens
from kuberoll_workers.serving import controller
from kuberoll_workers.serving.cached_models import hold_models
from kuberoll_workers.serving.engines.interface import OWN_VERSION
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.serving.group import ADDRESS_VARIABLE, PodGroup, follow, pod_group
from kuberoll_workers.serving.host import (
    Host,
    adopt_orphans,
    end_descendants,
    exit_on_signal,
    metrics_port,
)
from kuberoll_workers.serving.host_config import HostConfig, requested_gpus
from kuberoll_workers.serving.publications import Publications, VersionTaken
from kuberoll_workers.serving.ray_settings import free_ports, haproxy_problem, ray_environment, serve_environment
from kuberoll_workers.serving.ray_store import RayStore
from kuberoll_workers.serving.weights import version_of

PORT_VARIABLE = "KUBEROLL_PORT"
"""Environment variable that overrides the configured port, for several pods on one machine."""

_LOOK_SECONDS = 2.0
_DRAIN_SECONDS = 20.0
_METRICS_SECONDS = 10.0
_ASK_SECONDS = 10.0

_log = logging.getLogger(__name__)


class EngineLost(Exception):
    """The engine was ready and has not become ready again."""


class Status:
    """State of a pod; written by its main thread, read by the HTTP thread.

    Attributes:
        problem: Why it cannot generate; None: it can.
        metrics_port: Port of the metrics of Ray's agent; None: not known yet.
        address: Address of that agent.
        wanted: Version of the weights that the job names.
        served: Version of the weights that it generates with; None: none, or unknown.
        weights_problem: Why the wanted weights are not served; None: they are served or being loaded.
    """

    def __init__(self) -> None:
        self.problem: str | None = "the engine is starting"
        self.metrics_port: int | None = None
        self.address = "127.0.0.1"
        self.wanted: str | None = None
        self.served: str | None = None
        self.weights_problem: str | None = None

    def weights(self) -> PodWeights:
        """The response of `/weights`."""
        return PodWeights(wanted=self.wanted, served=self.served, problem=self.weights_problem)

    async def routes(self, http: aiohttp.ClientSession) -> list[web.RouteDef]:
        """The HTTP routes of a generation pod."""

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
    """Serve the pod's state from a thread while the context lasts.

    Raises:
        OSError: The address cannot be bound.
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
    job: RolloutJob,
    *,
    port: int,
    scratch: Path,
    tokens: Tokens,
    group: PodGroup | None = None,
    address: str | None = None,
) -> HostConfig:
    """Configuration of a pod's host: one replica with the GPUs of the pod, or of the group that it leads.

    Args:
        address: The pod's IP address; None: clients elsewhere are not told the replica's own URL.
    """
    generation = job.spec.generation
    placed = {"gpus": requested_gpus(generation)} if group is None else _spread(job)
    return HostConfig(
        app=ServeArgs.of(
            generation,
            weights=weights_source(job.spec.weights),
            drain_seconds=_DRAIN_SECONDS,
            # Serve knows an address inside the pod only, or one that no NetworkPolicy opens.
            own_url=None if address is None else f"http://{f'[{address}]' if ':' in address else address}:{port}",
            replicas=1,
            autoscaling=None,
            **placed,
        ),
        scratch=str(scratch),
        routing=generation.routing,
        # Serve's own parts connect on loopback, clients at the pod's address.
        address="0.0.0.0",
        port=port,
        tokens=tokens,
        group=group,
        patience=float(job.spec.startup_deadline_seconds),
    )


def _spread(job: RolloutJob) -> dict[str, Any]:
    """Arguments of a replica that spans pods: one GPU per bundle, as vLLM requires; the first has the replica's CPU."""
    generation = job.spec.generation
    gpus = round(generation.gpus_per_replica or engine_kind(generation.engine).world_size(generation.engine_args))
    return {"gpus": None, "bundles": [{"CPU": 1.0, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(gpus - 1))]}


class JobFile:
    """The job's file, read again after each change: Kubernetes updates mounted files in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: bytes | None = None

    def reread(self) -> None:
        """Make the next `read_if_changed` read the file again."""
        self._read = None

    def read_if_changed(self) -> tuple[PodConfig, RolloutJob] | None:
        """Read the file if it has changed since the last call; None if not.

        Raises:
            ConfigRefused, ValidationError: It is invalid; raised once for each change.
        """
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise ConfigRefused(f"{self._path}: {error}") from error
        if data == self._read:
            return None
        self._read = data
        config = read_config(self._path)
        return config, job_of(config)


def run(host: Host, status: Status, file: JobFile, *, patience: float, group: PodGroup | None = None) -> None:
    """Start the host, and supervise it until a signal ends the process.

    Args:
        patience: Seconds for a failed engine to become ready again.
        group: The pods that the replica spans.

    Raises:
        EngineLost: It did not become ready again.
        Exception: What Ray or Serve raised during the start.
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
    """Pass the weights that the job names to Serve, and update the status; errors are logged and retried."""
    try:
        if (read := file.read_if_changed()) is not None:
            weights = read[1].spec.weights
            wanted = weights_source(weights)
            status.wanted = version_of(wanted)
            publications = Publications(RayStore(controller.store_prefix(APPLICATION)))
            before = publications.newest()
            if publications.publish(wanted) != before:
                _log.info("the job asks for the weights %s", status.wanted)
                await controller.call_each_replica(APPLICATION, DEPLOYMENT, "follow_weights", seconds=_ASK_SECONDS)
    except VersionTaken as error:
        _log.warning("the job's weights are ignored: %s", error)
    except (ConfigRefused, ValidationError) as error:
        _log.warning("the job has changed, but cannot be read: %s", error)
    except Exception:
        file.reread()
        _log.exception("the job's weights could not be passed to Serve")
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
    """The problem that Serve's controller reports; None if there is none."""
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
    """Run a follower of another pod's replica; return the exit code."""
    status = Status()
    status.problem = f"this pod is a part of the replica of {group.leader}"
    # vLLM's workers in this pod read the same settings.
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
        tokens = take_tokens(os.environ)
    except ValueError as error:
        raise ConfigRefused(str(error)) from error
    if tokens is None:
        # Without tokens every client that reaches the port could do everything.
        raise ConfigRefused(f"{', '.join(map(token_variable, SCOPES))}: not set; they must have the policy's tokens")
    return tokens


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
    # Also while the engine's process is gone, and in pods whose engine is elsewhere.
    hold_models()
    port = int(os.environ.get(PORT_VARIABLE) or config.port)
    # Always /tmp, because paths must be short: those of Ray's and the proxy's sockets have little room.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    os.environ["TMPDIR"] = str(scratch)
    adopt_orphans()
    signal.signal(signal.SIGTERM, exit_on_signal)
    if group is not None and group.index > 0:
        sys.exit(_follow(group, job, scratch))
    address = os.environ.get(ADDRESS_VARIABLE) or None
    config_of_host = host_config(job, port=port, scratch=scratch, tokens=tokens, group=group, address=address)
    host = Host(config_of_host, sys.stderr)
    status = Status()
    status.wanted = OWN_VERSION if job.spec.weights is None else job.spec.weights.version
    code = 0
    try:
        with serve_status(status, host=address or "0.0.0.0", port=STATUS_PORT):
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
