"""Calls of a model whose prompts begin with what earlier ones read and sampled: a forest of token sequences."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

_DIGEST_BYTES: Final = 16


class CallPrefixes:
    """Numbers of calls by all ids that they read and sampled."""

    def __init__(self) -> None:
        # Calls by a digest of all their ids, and the lengths for which there are any.
        self._ends: dict[bytes, int] = {}
        self._lengths: set[int] = set()

    def add(self, call: int, prompt: array[int], response: array[int]) -> None:
        """Add a call.

        The first of several with equal ids gets the children: which one the agent went on with is not known.
        """
        whole = prompt + response
        self._ends.setdefault(hashlib.blake2b(whole.tobytes(), digest_size=_DIGEST_BYTES).digest(), call)
        self._lengths.add(len(whole))

    def remove(self, call: int) -> None:
        """Remove a call, which then gets no children."""
        self._ends = {digest: found for digest, found in self._ends.items() if found != call}

    def parent(self, prompt: array[int]) -> tuple[int | None, int]:
        """The longest call that a prompt begins with, and the number of its ids; None and 0: it begins with none."""
        found: tuple[int | None, int] = (None, 0)
        digest, done = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
        for length in sorted(length for length in self._lengths if length <= len(prompt)):
            digest.update(prompt[done:length].tobytes())
            done = length
            if (call := self._ends.get(digest.copy().digest())) is not None:
                found = (call, length)
        return found


def paths(parents: Sequence[int | None]) -> Iterator[list[int]]:
    """The calls of each path from a root to a leaf, in the order of their leaves.

    Args:
        parents: The parent of each call; None: it is a root.
    """
    inner = set(parents)
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        chain, index = [], leaf
        while True:
            chain.append(index)
            if (parent := parents[index]) is None:
                break
            index = parent
        yield chain[::-1]
