"""Token sequences that share the memory of what they begin with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Final

from kuberoll_workers.data.messages import token_array

_DIGEST_BYTES: Final = 16
_BLOCK: Final = 128


class _Block:
    """So many ids after those of another block."""

    __slots__ = ("before", "digest", "ids", "users")

    def __init__(self, digest: bytes, ids: array[int], before: _Block | None) -> None:
        self.digest, self.ids, self.before = digest, ids, before
        # Blocks and chains that come after it.
        self.users = 0


class Chain:
    """One sequence; see `TokenChains.hold`."""

    __slots__ = ("_rest", "block", "length")

    def __init__(self, block: _Block | None, rest: array[int], length: int) -> None:
        self.block, self._rest, self.length = block, rest, length

    @property
    def rest(self) -> int:
        """Number of ids after the last block."""
        return len(self._rest)

    def ids(self, start: int = 0) -> array[int]:
        """Its ids from a position on."""
        parts, block, position = [self._rest], self.block, self.length - len(self._rest)
        while block is not None and position > start:
            parts.append(block.ids)
            position -= len(block.ids)
            block = block.before
        joined = token_array()
        for part in reversed(parts):
            joined.extend(part)
        return joined[start - position :]


class TokenChains:
    """Sequences in blocks of ids, each of which is stored once, whatever number of sequences begin with it.

    A chat whose every turn is held takes as many ids as its last turn, and less than one block more for each turn; so
    do chats that begin with the same instructions.

    Attributes:
        tokens: Number of stored ids: of each block that a held sequence has, once, and of what follows the last one.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self.tokens = 0

    def hold(self, ids: array[int]) -> Chain:
        """Store a sequence."""
        block: _Block | None = None
        whole = len(ids) - len(ids) % _BLOCK
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for start in range(0, whole, _BLOCK):
            part = ids[start : start + _BLOCK]
            digest.update(part.tobytes())
            name = digest.digest()
            found = self._blocks.get(name)
            if found is None:
                found = self._blocks[name] = _Block(name, part, block)
                self.tokens += _BLOCK
                if block is not None:
                    block.users += 1
            block = found
        if block is not None:
            block.users += 1
        rest = ids[whole:]
        self.tokens += len(rest)
        return Chain(block, rest, len(ids))

    def release(self, chain: Chain) -> None:
        """Remove a sequence that is held."""
        self.tokens -= chain.rest
        block = chain.block
        while block is not None:
            block.users -= 1
            if block.users:
                return
            del self._blocks[block.digest]
            self.tokens -= len(block.ids)
            block = block.before


def prefix_digests(ids: array[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Digests of the beginnings of a sequence, by their length; none for lengths beyond its own."""
    digest, done, found = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, dict[int, bytes]()
    for length in sorted({length for length in lengths if length <= len(ids)}):
        digest.update(ids[done:length].tobytes())
        done = length
        found[length] = digest.digest()
    return found
