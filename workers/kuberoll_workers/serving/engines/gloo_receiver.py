"""What a worker of an engine does to receive weights over Gloo: in the background, into memory of its own.

The model is touched only when everything is there. Until then the engine goes on generating, and a transfer that fails
leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.data.weights.gloo import GlooGroup
from kuberoll_workers.data.weights.offers import Tensors, places


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooInitInfo:
    """How a worker finds its group; names are those of vLLM's other backends.

    Attributes:
        rank_offset: Rank of the replica's first worker.
        seconds: For which the members wait for each other.
        chunk_bytes: Bytes of one transfer.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    seconds: float
    chunk_bytes: int


class GlooReceiver:
    """One worker's member of the group. A transfer is `update`, then `take`; it may be given up by `abort`."""

    def __init__(self, rank: int) -> None:
        """`rank` is that of the worker among those of its replica."""
        self._rank = rank
        self._thread = _thread()
        self._chunk_bytes = 1
        self._joining: Future[GlooGroup] | None = None
        self._receiving: Future[list[tuple[str, Any]]] | None = None

    def join(self, info: GlooInitInfo) -> None:
        """Leave the present group, and begin to join another; this returns at once."""
        self.abort()
        self._chunk_bytes = info.chunk_bytes
        self._joining = self._thread.submit(
            GlooGroup,
            host=info.master_address,
            port=info.master_port,
            rank=info.rank_offset + self._rank,
            size=info.world_size,
            seconds=info.seconds,
        )

    def update(self, tensors: Tensors) -> None:
        """Begin to receive; this returns at once.

        Raises:
            RuntimeError: There is no group, or a transfer has begun already.
        """
        if self._joining is None or self._receiving is not None:
            raise RuntimeError("weights can be received once, and only by a member of a group")
        self._receiving = self._thread.submit(_receive, self._joining, tensors, self._chunk_bytes)

    def done(self) -> bool:
        """Whether all tensors are there.

        Raises:
            RuntimeError: They cannot be received.
        """
        if self._receiving is None:
            raise RuntimeError("no weights are being received")
        if self._receiving.done():
            self._receiving.result()
            return True
        return False

    def take(self) -> list[tuple[str, Any]]:
        """Wait for the tensors, on the CPU, with their names.

        Raises:
            RuntimeError: They cannot be received.
        """
        if self._receiving is None:
            raise RuntimeError("no weights are being received")
        receiving, self._receiving = self._receiving, None
        return receiving.result()

    def abort(self) -> None:
        """Leave the group, whatever it does."""
        joining, self._joining, self._receiving = self._joining, None, None
        if joining is None:
            return
        # It ends with an error, or when its time is up.
        joining.add_done_callback(_close)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = _thread()


def _receive(joining: Future[GlooGroup], tensors: Tensors, chunk_bytes: int) -> list[tuple[str, Any]]:
    import torch

    types = [getattr(torch, name) for name in tensors.dtype_names]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(tensors.shapes, types, strict=True)]
    offsets, total = places(sizes)
    buffer = torch.empty(total, dtype=torch.uint8)
    joining.result().broadcast(buffer, chunk_bytes)

    def parts() -> Iterator[tuple[str, Any]]:
        for name, shape, kind, offset, size in zip(tensors.names, tensors.shapes, types, offsets, sizes, strict=True):
            yield name, buffer[offset : offset + size].view(kind).view(tuple(shape))

    return list(parts())


def _close(joining: Future[GlooGroup]) -> None:
    if not joining.cancelled() and joining.exception() is None:
        joining.result().close()


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kuberoll-weights")
