"""The Serve app on this machine, under its own Ray, for as long as standard input is open.

    python -m kuberoll_workers.serving.host --config FILE

Events go to standard output, one JSON object a line: `{"event": "phase", "name", "seconds"}` as parts of the start are
done, then `{"event": "ready", "url", "info", "metrics_port"}` or `{"event": "failed", "message"}`. Ray's and the
engine's output goes to standard error. It ends on SIGTERM, or when its standard input closes because its parent has
ended, and so does every process that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import msgspec
import psutil

from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.serving import ray_head
from kuberoll_workers.serving.app import build, max_replicas, replica_gpus
from kuberoll_workers.serving.controller import start_serve
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.serving.exit_watcher import ExitWatcher
from kuberoll_workers.serving.group import OBJECT_STORE_BYTES, RAY_PORT, start_leader, wait_for_group
from kuberoll_workers.serving.host_config import HostConfig
from kuberoll_workers.serving.processes import kill_all
from kuberoll_workers.serving.ray_settings import (
    free_ports,
    haproxy_launcher,
    haproxy_problem,
    ray_environment,
    serve_environment,
)
from kuberoll_workers.serving.ray_start import start_in_attempts
from kuberoll_workers.serving.root_cause import MESSAGE_CHARACTERS, root_cause

_log = logging.getLogger(__name__)
_PROXY_SECONDS = 60.0
_PROXY_STOP_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Host:
    """Ray, Serve and the app, started and stopped in this process."""

    def __init__(self, config: HostConfig, events: TextIO) -> None:
        self._config = config
        self._events = events
        self._scratch = Path(config.scratch)
        self._ready = False
        self._exit_watcher = ExitWatcher()
        self._proxies: Future[None] | None = None

    def start(self) -> None:
        """Start Ray, Serve and the app, and report each phase; raises what Ray or Serve raised."""
        config = self._config
        free, *others = free_ports(4)
        port = config.port or free
        without = haproxy_problem()
        if without is not None:
            _log.warning("requests pass through Serve's own proxy, at ten times the cost: %s", without)
        settings = serve_environment(config.routing, self._scratch, others, haproxy=without is None)
        if without is None:
            settings["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(haproxy_launcher(self._scratch, others[:2]))
        group = config.group
        os.environ.update(ray_environment(None if group is None else group.token) | settings)
        began = time.perf_counter()
        tokens = {} if config.tokens is None else config.tokens.variables()
        os.environ.update(tokens)
        try:
            # Processes that Ray starts later, replicas among them, inherit the environment of this moment.
            self._start_ray()
        finally:
            for name in tokens:
                os.environ.pop(name, None)
        # Not earlier: processes of a failed start of Ray are killed, which is not the death of an engine.
        self._exit_watcher.start()
        began = self._phase("ray", began)

        from ray import serve

        self._proxies = start_serve(config.address, port)
        began = self._phase("serve", began)
        app = dataclasses.replace(config.app, tokens_required=config.tokens is not None)
        serve.run(build(msgspec.to_builtins(app)), name=config.app.application, route_prefix="/")
        began = self._phase("engine", began)
        self._proxies.result()
        url = f"http://{'127.0.0.1' if config.address == '0.0.0.0' else config.address}:{port}"
        info = asyncio.run(_wait(url, None if config.tokens is None else config.tokens.read))
        self._phase("proxy", began)
        self._ready = True
        own = None if group is None else group.address
        self._emit({"event": "ready", "url": url, "info": info, "metrics_port": metrics_port(own)})

    def _start_ray(self) -> None:
        import ray

        args = self._config.app
        replicas = max_replicas(args)
        cores = os.cpu_count() or 1
        # Logical CPUs: for replicas and Serve's own actors, or the machine's cores if there are more.
        cpus = max(cores, replicas + 2)
        common: dict[str, Any] = {"log_to_driver": True, "configure_logging": False, "namespace": "kuberoll"}
        group, sessions = self._config.group, self._scratch / "ray"
        if group is None:
            settings = {
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(sessions),
                # Not a network address, which may change on a laptop during the run.
                "_node_ip_address": "127.0.0.1",
            }
            with ray_head.alone():
                start_in_attempts(lambda: ray.init(**settings, **common), end_descendants, sessions)
        else:
            start_in_attempts(lambda: start_leader(group, sessions, cpus=cpus), end_descendants, sessions)
            ray.init(address=f"{group.address}:{RAY_PORT}", _node_ip_address=group.address, **common)
            wait_for_group(group, seconds=self._config.patience)
        # Ray has replaced our handler by its own.
        signal.signal(signal.SIGTERM, exit_on_signal)
        # Serve would wait for missing GPUs for ever.
        needed = replica_gpus(args, on_gpus=engine_kind(args.engine).on_gpus()) * replicas
        available = ray.cluster_resources().get("GPU", 0)
        if needed > available:
            raise RuntimeError(
                f"generation needs {needed:g} GPUs for {replicas} replicas, but this machine has {available:g}; "
                "lower spec.generation.replicas or engineArgs.tensor_parallel_size"
            )

    def drain(self, seconds: float) -> None:
        """Accept no more connections, and wait up to `seconds` for requests in flight."""
        proxies = [process for process in psutil.Process().children(recursive=True) if _is_haproxy(process)]
        for proxy in proxies:
            with contextlib.suppress(psutil.NoSuchProcess):
                # HAProxy's soft stop: it exits after its last response.
                proxy.send_signal(signal.SIGUSR1)
        psutil.wait_procs(proxies, timeout=seconds)

    def stop(self) -> None:
        """Stop everything that was started, including all descendants."""
        if self._config.drains:
            with contextlib.suppress(Exception):
                self._shut_down()
        self._exit_watcher.stop()
        end_descendants()

    def _shut_down(self) -> None:
        """Answer the requests in flight, then end Serve and Ray."""
        import ray
        from ray import serve

        # An app that is not ready has no requests to finish.
        if self._ready:
            serve.shutdown()
        elif self._proxies is not None:
            # A thread that still waits for them needs Ray.
            wait([self._proxies], timeout=_PROXY_STOP_SECONDS)
        ray.shutdown()

    def failure(self, error: BaseException) -> str:
        """The reason of a failed start, from the engine's logs if they have one."""
        logs = [
            path.read_text(errors="replace") for path in (self._scratch / "ray").glob("session_*/logs/worker-*.err")
        ]
        # Serve's controller logs the exception of the engine's constructor; the reason why a process of the engine died
        # is only in the log of that process.
        logs.sort(key=lambda log: ":actor_name:ServeController" not in log)
        cause = root_cause([*logs, "".join(traceback.format_exception(error))], self._exit_watcher.signal_exits())
        return cause or f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]

    def report_failure(self, message: str) -> None:
        """Report to the parent that generation has failed."""
        self._emit({"event": "failed", "message": message})

    def _phase(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self._emit({"event": "phase", "name": name, "seconds": now - began})
        return now

    def _emit(self, event: Mapping[str, Any]) -> None:
        # The parent may have ended.
        with contextlib.suppress(BrokenPipeError):
            self._events.write(msgspec.json.encode(event).decode() + "\n")
            self._events.flush()


def metrics_port(address: str | None = None) -> int | None:
    """Port of the metrics of this machine's Ray; None if it serves none.

    Args:
        address: Address of this machine among several; None: it is the only one.
    """
    import ray

    for node in ray.nodes():
        if address in (None, node["NodeManagerAddress"]):
            return int(node["MetricsExportPort"]) or None
    return None


async def _wait(url: str, token: str | None) -> dict[str, Any]:
    async with ServeClient(url, limit=1, token=token) as client:
        return dataclasses.asdict(await client.wait_ready(_PROXY_SECONDS))


def _is_haproxy(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "haproxy")
    except psutil.Error:
        return False


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that they can be ended too (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all descendants of this process, including those started meanwhile."""
    kill_all(lambda: psutil.Process().children(recursive=True))


def _end_with_parent() -> None:
    """Send this process a SIGTERM when its standard input closes."""

    def read() -> None:
        # Not `sys.stdin`: this thread would hold its lock when the interpreter closes it.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()


def exit_on_signal(number: int, _: FrameType | None) -> NoReturn:
    """Signal handler that raises SystemExit."""
    # A second signal must not interrupt the shutdown.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.serving.host", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a HostConfig")
    arguments = parser.parse_args()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=HostConfig)
    # Keep standard output for events: Ray and Serve print to it.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    adopt_orphans()
    signal.signal(signal.SIGTERM, exit_on_signal)
    _end_with_parent()
    host = Host(config, events)
    code = 0
    try:
        host.start()
        threading.Event().wait()
    except SystemExit:
        pass
    except Exception as error:
        code = 1
        host.report_failure(host.failure(error))
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        host.stop()
    sys.stderr.flush()
    # Not `sys.exit`: Ray's exit handler would wait for its processes, which have ended.
    os._exit(code)


if __name__ == "__main__":
    main()
