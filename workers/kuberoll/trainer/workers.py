"""Where the workers of a run are, for the direct path."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from kuberoll_api.contract import PROGRESS_PORT
from kuberoll_workers.output.workers_file import WORKERS_FILE, WorkersFile


class WorkerSource(Protocol):
    """A list of workers that changes while a run lasts."""

    def find(self) -> list[WorkerAddress]:
        """The workers that may be there now; none while they are not known."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker.

    Attributes:
        token: Of the scope `read`.
    """

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers behind some names: those of a RolloutJob are all addresses of the name `JOB-workers.NAMESPACE.svc`.

    Attributes:
        names: `host:port` of each; several addresses of a host are as many workers. Without a port it is that of worker
            pods.
        token: Of the scope `read`.
    """

    names: tuple[str, ...]
    token: str = field(repr=False)

    def __init__(self, *names: str, token: str) -> None:
        if not names:
            raise ValueError("names: give the host:port of the workers, such as 'puzzles-workers.team-a.svc:9464'")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "token", token)
        for name in names:
            _host_and_port(name)

    def find(self) -> list[WorkerAddress]:
        """All addresses of the names."""
        found: dict[WorkerAddress, None] = {}
        for name in self.names:
            host, port = _host_and_port(name)
            try:
                resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError:
                continue  # a headless Service without a pod has no name
            found |= {WorkerAddress(str(item[4][0]), port, self.token): None for item in resolved}
        return list(found)


@dataclass(frozen=True, slots=True)
class RunWorkers:
    """The workers of a `kuberoll run` on this machine whose output is an object store.

    Attributes:
        directory: Where the run's logs are.
    """

    directory: Path

    def find(self) -> list[WorkerAddress]:
        """The workers that run now, as the run's file says."""
        try:
            workers = msgspec.json.decode((self.directory / WORKERS_FILE).read_bytes(), type=WorkersFile)
            tokens = msgspec.json.decode(Path(workers.tokens).read_bytes(), type=dict[str, str])
            return [WorkerAddress(*_host_and_port(address), tokens["read"]) for address in workers.addresses]
        except (OSError, msgspec.MsgspecError, KeyError, ValueError):
            return []  # the run has not begun, or has ended, or is another user's


def run_workers(directory: str | Path) -> RunWorkers:
    """The workers of a `kuberoll run` on this machine whose output is an object store.

    Args:
        directory: Where the run's logs are: it says so at its start. The run need not have begun.
    """
    return RunWorkers(Path(directory))


def _host_and_port(name: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[address]:port`.

    Raises:
        ValueError: It is none of these.
    """
    host, separator, port = name.rpartition(":")
    if not separator or (":" in host and not host.endswith("]")):
        host, port = name, str(PROGRESS_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in name or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{name!r}: expected the host:port of workers, such as 'puzzles-workers.team-a.svc:9464'")
    return host, int(port)
