"""Changes between two versions of weights: which elements differ, and by how much, losslessly.

A training step moves most bfloat16 weights by less than their last bit, so that few change, and those by one or two
units in the last place. Stored are, for blocks of each tensor,

- gaps: how many elements lie between one that changed and the one before, a byte each; 255 stands for a gap that is in
  `wide_gaps`;
- steps: the difference of the bits as integers, modulo their width, with the sign in the lowest bit, so that small
  steps either way are small numbers; the first bytes of all, then the second ones, and so on.

Both are compressed with Zstandard, whose entropy coder does the rest: 9 to 10 bits for each element that changed
(benchmarks/weights.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import numpy
from msgspec import Meta
from numpy.typing import NDArray

from kuberoll_workers.data.weights.tensors import DTYPES, Bits, Tensors

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BLOCK = 1 << 24
_WIDE = 255
# Higher levels take longer, and gain nothing: there are no repetitions, only frequencies.
_LEVEL = 1
_THREADS = min(8, os.cpu_count() or 1)

_Count = Annotated[int, Meta(ge=0)]


class ChangesRefused(ValueError):
    """Changes that cannot be made or applied; the message names the tensor."""


class BlockChanges(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one block of a tensor.

    Attributes:
        start: Its first element.
        changed: Number of elements that differ.
        gaps, wide_gaps, steps: Compressed; see the module.
    """

    name: str
    start: _Count
    changed: _Count
    gaps: bytes
    wide_gaps: bytes
    steps: bytes


class Changes(msgspec.Struct, frozen=True):
    """Changes of all tensors of a model.

    Attributes:
        shapes: Type and shape of every tensor, changed or not.
        blocks: Only those in which something changed.
    """

    shapes: dict[str, tuple[str, tuple[_Count, ...]]]
    blocks: list[BlockChanges]

    @property
    def changed(self) -> int:
        """Number of elements that differ."""
        return sum(block.changed for block in self.blocks)


def make_changes(old: Tensors, new: Tensors) -> Changes:
    """Compare two versions.

    Raises:
        ChangesRefused: They have other tensors, types or shapes.
    """
    _check_same(_shapes(old), _shapes(new))
    places = [(name, start) for name in sorted(new) for start in range(0, len(new[name].bits), _BLOCK)]

    def compare(place: tuple[str, int]) -> BlockChanges | None:
        name, start = place
        return _compare(name, start, *(part[name].bits[start : start + _BLOCK] for part in (old, new)))

    with ThreadPoolExecutor(_THREADS) as pool:
        blocks = [block for block in pool.map(compare, places) if block is not None]
    return Changes(shapes=_shapes(new), blocks=blocks)


def apply_changes(changes: Changes, tensors: Tensors) -> None:
    """Change tensors in place.

    Raises:
        ChangesRefused: They are not of these tensors, or damaged; the tensors may have been changed in part.
    """
    _check_same(_shapes(tensors), changes.shapes)
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda block: _apply(block, tensors[block.name].bits), changes.blocks):
            pass


def encode_changes(changes: Changes) -> bytes:
    """Changes as msgpack."""
    return msgspec.msgpack.encode(changes)


def decode_changes(data: bytes, *, where: str) -> Changes:
    """Read changes.

    Raises:
        ChangesRefused: They are damaged.
    """
    try:
        changes = msgspec.msgpack.decode(data, type=Changes)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ChangesRefused(f"{where} is damaged: {error}") from error
    for block in changes.blocks:
        if block.name not in changes.shapes:
            raise ChangesRefused(f"{where} is damaged: it changes {block.name!r}, which is not among its tensors")
    for name, (dtype, _) in changes.shapes.items():
        if dtype not in DTYPES:
            raise ChangesRefused(f"{where}: {name} has the type {dtype}, which is not supported")
    return changes


def _shapes(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _check_same(old: Mapping[str, tuple[str, Any]], new: Mapping[str, tuple[str, Any]]) -> None:
    if odd := sorted(old.keys() ^ new.keys()):
        raise ChangesRefused(f"{odd[0]} is only {'in the base' if odd[0] in old else 'in the new version'}")
    for name in sorted(new):
        if old[name] != new[name]:
            (was, before), (now, after) = old[name], new[name]
            raise ChangesRefused(f"{name} is {was} {list(before)} in the base, and {now} {list(after)} now")


def _compare(name: str, start: int, old: Bits, new: Bits) -> BlockChanges | None:
    positions = numpy.flatnonzero(old != new)
    if not len(positions):
        return None
    gaps = numpy.diff(positions, prepend=-1) - 1
    wide = gaps[gaps >= _WIDE].astype("<u4")
    steps = _folded(new[positions] - old[positions])
    return BlockChanges(
        name=name,
        start=start,
        changed=len(positions),
        gaps=_compressed(numpy.minimum(gaps, _WIDE).astype(numpy.uint8)),
        wide_gaps=_compressed(wide),
        steps=_compressed(steps.view(numpy.uint8).reshape(len(steps), -1).T),
    )


def _apply(block: BlockChanges, bits: Bits) -> None:
    try:
        part = bits[block.start : block.start + _BLOCK]
        gaps = _decompressed(block.gaps, block.changed, "<u1").astype(numpy.int64)
        places = numpy.flatnonzero(gaps == _WIDE)
        gaps[places] = _decompressed(block.wide_gaps, len(places), "<u4")
        positions = numpy.cumsum(gaps + 1) - 1
        if not len(positions) or positions[-1] >= len(part):
            raise ValueError("an element is beyond the end of the tensor")
        width = bits.dtype.itemsize
        raw = _decompressed(block.steps, block.changed * width, "<u1")
        steps = numpy.ascontiguousarray(raw.reshape(width, block.changed).T).view(bits.dtype).reshape(-1)
        part[positions] += _unfolded(steps)
    except (ValueError, zstd.ZstdError, MemoryError) as error:
        raise ChangesRefused(f"the changes of {block.name} from element {block.start} are damaged: {error}") from error


def _folded(steps: Bits) -> Bits:
    """0, -1, 1, -2, … as 0, 1, 2, 3, …"""
    bits = 8 * steps.dtype.itemsize
    negative = steps >> steps.dtype.type(bits - 1)
    folded: Bits = (steps << steps.dtype.type(1)) ^ (steps.dtype.type(0) - negative)
    return folded


def _unfolded(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    steps: Bits = (folded >> one) ^ (folded.dtype.type(0) - (folded & one))
    return steps


def _compressed(values: NDArray[Any]) -> bytes:
    return zstd.compress(numpy.ascontiguousarray(values).tobytes(), level=_LEVEL)


def _decompressed(data: bytes, count: int, dtype: str) -> NDArray[Any]:
    """
    Raises:
        ValueError: There are not so many values.
    """
    size = count * numpy.dtype(dtype).itemsize
    # One byte more than there may be, so that damaged data cannot fill the memory.
    plain = zstd.ZstdDecompressor().decompress(data, max_length=size + 1)
    if len(plain) != size:
        raise ValueError(f"{count} values were expected")
    return numpy.frombuffer(plain, dtype=dtype)
