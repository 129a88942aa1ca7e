"""Tensors as bits: read from and written to safetensors files, and their digest.

Bits and not numbers: numpy has no bfloat16, and NaNs and negative zeros must stay what they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

Bits = NDArray[Any]
"""[elements], unsigned integers as wide as an element."""

# The format's names of types, with those of frameworks and the bytes of an element. Types of less than a byte are not
# among them.
_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BF16": ("bfloat16", 2),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "U8": ("uint8", 1),
}
_BY_FRAMEWORK_NAME: Final = {framework: name for name, (framework, _) in _TYPES.items()}
DTYPES: Final = tuple(_TYPES)
"""Names of the types in safetensors' format."""

_THREADS = min(8, os.cpu_count() or 1)


class UnusableWeights(ValueError):
    """Weights that cannot be read, written or compared; the message names the tensor or the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bits.

    Attributes:
        dtype: Name of its type in safetensors' format, such as BF16.
        bits: [elements] in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


Tensors = Mapping[str, Tensor]


def dtype_named(framework_name: str, *, where: str) -> str:
    """The format's name of a type that PyTorch or numpy calls so, such as bfloat16.

    Raises:
        UnusableWeights: The format has none, or its elements are smaller than a byte.
    """
    try:
        return _BY_FRAMEWORK_NAME[framework_name]
    except KeyError:
        raise UnusableWeights(
            f"{where}: weights of type {framework_name} cannot be published; use one of "
            f"{', '.join(sorted(_BY_FRAMEWORK_NAME))}"
        ) from None


def framework_name(dtype: str) -> str:
    """PyTorch's name of a type of the format, such as bfloat16."""
    return _TYPES[dtype][0]


def bits_type(dtype: str) -> numpy.dtype[Any]:
    """The unsigned type that is as wide as elements of a type."""
    return numpy.dtype(f"<u{_TYPES[dtype][1]}")


def read_file(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory.

    Args:
        writable: Changes of the bits change the file.

    Raises:
        UnusableWeights: It is no such file, is truncated, or has a type that is not supported.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # It checks that offsets, shapes and the file's length agree.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        content = numpy.memmap(path, dtype=numpy.uint8, mode="r+" if writable else "r")
    except (SafetensorError, OSError, ValueError) as error:
        raise UnusableWeights(f"{path}: {error}; was it written completely?") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype, (start, end) = entry["dtype"], entry["data_offsets"]
        if dtype not in _TYPES:
            raise UnusableWeights(f"{path}: {name} has the type {dtype}, which is not supported")
        raw = content[8 + length + start : 8 + length + end]
        tensors[name] = Tensor(dtype, tuple(entry["shape"]), raw.view(bits_type(dtype)))
    return tensors


def read_directory(path: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a directory, mapped into memory.

    Raises:
        UnusableWeights: There are none, one is in two files, or a file cannot be read, or is missing.
    """
    for index in path.glob("*.safetensors.index.json"):
        if missing := sorted(name for name in _indexed(index) if not (path / name).is_file()):
            raise UnusableWeights(
                f"{path}: {index.name} names {missing[0]}, which is not there; was it written completely?"
            )
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = read_file(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise UnusableWeights(f"{path}: {twice[0]} is in {file.name} and in another file")
        tensors |= found
    if not tensors:
        raise UnusableWeights(f"{path} has no *.safetensors; give the directory of a saved model")
    return tensors


def _indexed(index: Path) -> set[str]:
    """The files that an index of tensors names."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnusableWeights(f"{index}: not an index of tensors: {error!r}; was it written completely?") from error


def write_file(path: Path, tensors: Tensors) -> None:
    """Write tensors as one safetensors file, which is on the disk when this returns."""
    from safetensors import TensorSpec, serialize_file

    kept = {name: numpy.ascontiguousarray(tensor.bits) for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=_TYPES[tensor.dtype][0],
            shape=list(tensor.shape),
            data_ptr=kept[name].ctypes.data,
            data_len=kept[name].nbytes,
        )
        for name, tensor in tensors.items()
    }
    serialize_file(specs, str(path), {"format": "pt"})
    sync(path)


def sync(path: Path) -> None:
    """Have the system write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(tensors: Tensors) -> str:
    """Digest of names, types, shapes and bits, whichever way they are divided into files: SHA-256, hexadecimal."""
    names = sorted(tensors)
    with ThreadPoolExecutor(_THREADS) as pool:
        contents = list(pool.map(lambda name: _content_digest(tensors[name].bits), names))
    lines = [
        json.dumps([name, tensors[name].dtype, tensors[name].shape, content])
        for name, content in zip(names, contents, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all values."""
    return sum(tensor.bits.nbytes for tensor in tensors)


def _content_digest(bits: Bits) -> str:
    return hashlib.sha256(numpy.ascontiguousarray(bits).view(numpy.uint8).data).hexdigest()
