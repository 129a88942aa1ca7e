"""A copy of a version's weights in the trainer's memory, as one buffer that can be sent piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from kuberoll_workers.data.weights import offers
from kuberoll_workers.data.weights.tensors import Tensor, bits_type, framework_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights of a version.

    Attributes:
        described: Names, types and shapes of the tensors, in the order in which they are sent.
        dtypes: Their types by safetensors' names.
        offsets, sizes: Where each is in the buffer, in bytes.
        buffer: [bytes], uint8.
    """

    version: int
    described: offers.Tensors
    dtypes: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    buffer: NDArray[numpy.uint8]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in the buffer's memory."""
        return {
            name: Tensor(dtype, tuple(shape), self._raw(offset, size).view(bits_type(dtype)))
            for name, shape, dtype, offset, size in zip(
                self.described.names, self.described.shapes, self.dtypes, self.offsets, self.sizes, strict=True
            )
        }

    def torch_tensors(self) -> Iterator[tuple[str, Any]]:
        """The tensors as PyTorch's, in the buffer's memory."""
        import torch

        for name, kind, shape, offset, size in zip(
            self.described.names,
            self.described.dtype_names,
            self.described.shapes,
            self.offsets,
            self.sizes,
            strict=True,
        ):
            raw = torch.from_numpy(self._raw(offset, size))
            yield name, raw.view(getattr(torch, kind)).view(tuple(shape))

    def _raw(self, offset: int, size: int) -> NDArray[numpy.uint8]:
        return self.buffer[offset : offset + size]


def take_snapshot(tensors: dict[str, Tensor], version: int, *, into: Snapshot | None = None) -> Snapshot:
    """Copy tensors.

    Args:
        into: A snapshot whose memory is used again, if it is large enough.
    """
    sizes = [tensor.bits.nbytes for tensor in tensors.values()]
    offsets, total = offers.places(sizes)
    buffer = into.buffer if into is not None and len(into.buffer) == total else numpy.zeros(total, numpy.uint8)
    for tensor, offset, size in zip(tensors.values(), offsets, sizes, strict=True):
        buffer[offset : offset + size].view(tensor.bits.dtype)[...] = tensor.bits.reshape(-1)
    return Snapshot(
        version=version,
        described=offers.Tensors(
            names=list(tensors),
            dtype_names=[framework_name(tensor.dtype) for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        ),
        dtypes=tuple(tensor.dtype for tensor in tensors.values()),
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        buffer=buffer,
    )
