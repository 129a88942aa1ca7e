"""What a driver of sandboxes does, and what it is told of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kuberoll_workers.data.causes import NO_EVIDENCE, Evidence
from kuberoll_workers.sandboxes.connection import Ticket

Network = Literal["None", "All"]
"""What a driver lets a sandbox reach: nothing but itself, or everything. An allowlist is the way out of a sandbox
without a network that its server and a proxy outside make (`sandboxes.egress`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox to make.

    Attributes:
        image: Its image: a name for a registry, `oci:DIRECTORY[:TAG]`, `docker-archive:FILE`, or `host:/`
            for the root of the host itself, which not every driver has.
        cpus: Processors that it may use; None: all.
        memory: Bytes of memory; None: all.
        storage: Bytes that it may write to its files; None: no limit of its own.
        processes: Processes and threads that it may have.
        network: What it reaches.
        user: Whom its commands run as; empty: as the image says.
        workdir: Working directory of its commands; empty: as the image says. It is made if it is missing.
        environment: Variables in addition to the image's.
        read_only: True if its root is read-only, but for /tmp, /run and, with Docker, the working directory.
        lease_seconds: It ends when no handle has been heard of for so long.
        start_seconds: The same for the first one.
        total_seconds: It ends after this time in any case.
    """

    image: str
    cpus: float | None = None
    memory: int | None = None
    storage: int | None = None
    processes: int = 4096
    network: Network = "None"
    user: str = ""
    workdir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False
    lease_seconds: float = 60.0
    start_seconds: float = 600.0
    total_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a sandbox that is lost."""

    text: str
    evidence: Evidence = NO_EVIDENCE


class Driver(Protocol):
    """Makes sandboxes and removes them.

    Whatever happens to this process, a sandbox ends by itself when its lease does, and what is left of it is removed:
    by the driver's own helpers, or by the next driver on this machine.
    """

    async def check(self) -> None:
        """Check that sandboxes can be made.

        Raises:
            SandboxUnavailable: They cannot; the message says what is missing and the way out.
        """
        ...

    def refusal(self, spec: SandboxSpec) -> str | None:
        """Why it can never make such a sandbox, with the way out; None: it may."""
        ...

    async def prepare(self, image: str) -> None:
        """Have an image here, so that its sandboxes start at once.

        Raises:
            SandboxUnavailable: It cannot be had.
        """
        ...

    async def create(self, name: str, spec: SandboxSpec) -> Ticket:
        """Make a sandbox; when this returns, its server answers.

        Args:
            name: Its name, unique on this machine: up to 40 lower-case letters, digits and hyphens.

        Raises:
            SandboxUnavailable: It cannot be made.
            SandboxLost: It ended while it started.
        """
        ...

    async def ending(self, name: str) -> Ending | None:
        """What became of a sandbox that is lost, as far as whoever made it knows; None: nothing is known."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a sandbox with all that it has; one that is gone is no error."""
        ...

    async def close(self) -> None:
        """Remove all sandboxes of this driver."""
        ...
