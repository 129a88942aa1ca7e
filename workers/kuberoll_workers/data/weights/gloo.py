"""A group of processes in which one broadcasts bytes to all others, over TCP: PyTorch's Gloo."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any


class GlooGroup:
    """The trainer, which has rank 0, and the workers of the replicas.

    It is independent of PyTorch's default group. When a member dies, what the others do in it fails at once.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        rank: int,
        size: int,
        seconds: float,
        listener: socket.socket | None = None,
    ) -> None:
        """Wait until all members are there.

        Args:
            host, port: Where rank 0 has the members' addresses.
            seconds: For which the members wait for each other, here and in each broadcast.
            listener: A socket that listens there, on rank 0; it is used up.

        Raises:
            RuntimeError: They were not all there in time.
        """
        from torch import distributed

        gloo: Any = distributed.ProcessGroupGloo

        timeout = timedelta(seconds=seconds)
        options = gloo._Options()
        options._timeout = timeout
        # The address that the others can reach; that of the machine's name may be another.
        options._devices = [gloo.create_device(hostname=own_address(host, port))]
        self._store: Any = distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._group: Any = gloo(self._store, rank, size, options)

    def broadcast(self, buffer: Any, chunk_bytes: int) -> None:
        """Have the bytes of rank 0 in all members.

        Args:
            buffer: [bytes], a uint8 tensor on the CPU; what it holds on other ranks is overwritten.
            chunk_bytes: Bytes of one transfer, equal on all ranks.

        Raises:
            RuntimeError: A member is gone, or too slow.
        """
        for begin in range(0, len(buffer), chunk_bytes):
            group = self._group
            if group is None:
                raise RuntimeError("the group was closed")
            group.broadcast(buffer[begin : begin + chunk_bytes], 0).wait()

    def close(self) -> None:
        """Leave the group; what other threads and members do in it fails."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()


def own_address(host: str, port: int) -> str:
    """The address of this machine from which another one, or itself, is reached."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Nothing is sent: the system only chooses the way.
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
