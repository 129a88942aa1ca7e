"""Where the test kubelet's containers run: as processes of this machine (`process_runtime`), or in a container runtime
(`tests.containers.runtime`)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.cluster.volumes import Find

Object = dict[str, Any]


class End(NamedTuple):
    """How a container ended; `reason` and `message` as in its state `terminated`."""

    code: int
    reason: str
    message: str = ""


class StartError(Exception):
    """A container could not be started; the message is that of its state."""


class Execution(Protocol):
    """A container that runs."""

    async def wait(self) -> End:
        """Returns when its first process has ended, and with it everything that it started."""

    async def stop(self, grace: float) -> None:
        """SIGTERM to its first process; SIGKILL after so many seconds. Returns when it has ended, or before."""

    async def kill(self) -> None:
        """SIGKILL to everything in it; returns when that is gone."""

    async def execute(self, command: Sequence[str], seconds: float) -> int:
        """The exit code of another command in it."""


class Launch(Protocol):
    """A container that is ready to be started.

    Attributes:
        termination_log: File of its termination message.
    """

    termination_log: Path

    async def start(self) -> Execution:
        """Starts it.

        Raises:
            StartError: It could not be started.
        """

    def log_tail(self, size: int) -> bytes:
        """The end of what it wrote since this start."""


class PodHome(Protocol):
    """What a runtime has of one pod.

    Attributes:
        address: Of the pod; empty before `open`.
    """

    address: str

    async def open(self) -> None:
        """Gives the pod its address and namespaces."""

    async def has_image(self, name: str) -> bool:
        """Whether an image is there."""

    async def make_volumes(self, find: Find) -> None:
        """Makes the volumes; again, to have them show what is there now.

        Raises:
            NotYet: A ConfigMap, Secret or claim is not there.
        """

    def update(self, pod: Object) -> None:
        """Takes a changed pod: its labels and annotations."""

    async def launch(self, container: Object, variables: Mapping[str, str], attempt: int) -> Launch:
        """Prepares a container.

        Args:
            container: Its spec.
            variables: Its environment, as the pod's spec says.
            attempt: How often it was started before.

        Raises:
            NotYet: It cannot be started as it is.
        """

    def is_running(self, container: str) -> bool:
        """Whether a container has processes."""

    async def close(self) -> None:
        """Ends everything that the pod has, and removes it."""


class Runtime(Protocol):
    """What starts pods on a node.

    Attributes:
        address: Of the node.
        port_offset: Added to the ports of Services.
    """

    address: str
    port_offset: int

    async def start(self, resolve: Callable[[str], str], lookup: Callable[[str], list[str] | None]) -> None:
        """Begins.

        Args:
            resolve: Replaces the names of Services in a text by addresses.
            lookup: Gives the addresses of `<service>.<namespace>.svc`; None: there is no such Service.
        """

    def pod(self, pod: Object, root: Path, claims: Path) -> PodHome:
        """A new pod.

        Args:
            root: Directory that it alone has.
            claims: Directory of its namespace's claims.
        """

    def service_address(self, number: int) -> str:
        """One of the addresses of Services; the same for the same number."""

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket at an address of a Service."""

    def text(self, log: Path) -> str:
        """What a container wrote, of its log."""

    async def close(self) -> None:
        """Ends what `start` began."""
