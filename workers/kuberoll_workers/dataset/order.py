"""Order of a dataset's rows: shuffled by a seed, and mixed from several sources.

Both depend on the rows' numbers only, not on workers, shards or versions of a library, so that every process of a run,
and every later one that resumes it, has the same order.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from kuberoll_workers.dataset.record_file import RecordFile
from kuberoll_workers.dataset.rows import DatasetError, RowPosition

_MEMORY_BYTES = 32 << 20

_Item = TypeVar("_Item")


class NumberedRow(NamedTuple):
    """A row that is not validated yet.

    Attributes:
        part: Index of its source.
        number: Its number within the source, in the source's own order.
    """

    part: int
    number: int
    place: RowPosition
    row: Any


def derived_seed(seed: int, name: str) -> int:
    """Seed for one of several sources; two sources of equal size have different orders."""
    return int.from_bytes(hashlib.blake2b(b"%d/%s" % (seed, name.encode()), digest_size=8).digest(), "big")


def shuffled_order(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A random permutation of `range(count)`, of shape `(count,)`; the same for the same seed, everywhere and for ever.

    Numbers are sorted by their hash (SplitMix64, as in `rollouts.seeds`): no generator of random numbers of a library
    promises the same shuffle in its next version.
    """
    state = np.uint64(seed & (2**64 - 1)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")


def shuffled(rows: Iterable[NumberedRow], seed: int) -> Iterator[NumberedRow]:
    """The rows in a random order.

    They are written to a temporary file, beyond 32 MiB on disk, so that memory grows by some 50 bytes for each row.

    Raises:
        DatasetError: A row cannot be written as JSON.
    """
    with tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="kuberoll-rows-") as file:
        texts, parts, numbers = RecordFile(file), array("H"), array("Q")
        files: dict[tuple[str, str], int] = {}
        places, lines = array("I"), array("Q")
        for part, number, place, row in rows:
            try:
                text = orjson.dumps(row)
            except (TypeError, RecursionError) as error:
                raise DatasetError(f"{place}: the row cannot be written as JSON: {error}") from error
            texts.append(text)
            parts.append(part)
            numbers.append(number)
            places.append(files.setdefault((place.before, place.after), len(files)))
            lines.append(place.number)
        named = list(files)
        for index in array("q", shuffled_order(len(parts), seed).tobytes()):
            row = orjson.loads(texts.read(index))
            before, after = named[places[index]]
            yield NumberedRow(parts[index], numbers[index], RowPosition(before, lines[index], after), row)


def mixed(streams: Sequence[Iterator[_Item]], weights: Sequence[float]) -> Iterator[_Item]:
    """Items of several streams in proportion to their weights, evenly spread; ends with the first stream that does.

    The next item is always of the stream whose share is furthest behind (Webster's method), so the shares hold in every
    part of the whole.
    """
    taken = [0] * len(streams)
    while True:
        ahead = [weight / (2 * count + 1) for weight, count in zip(weights, taken, strict=True)]
        best = max(range(len(streams)), key=lambda index: (ahead[index], -index))
        try:
            item = next(streams[best])
        except StopIteration:
            return
        taken[best] += 1
        yield item
