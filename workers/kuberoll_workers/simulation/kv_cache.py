"""A model of an engine's key-value cache: blocks, prefixes that are reused, and eviction of the oldest.

Sequences here only grow, as trajectories do, so a prefix needs no hashes of tokens: it is the first blocks of a prompt
group's common prompt, then the blocks of one trajectory. A sequence's blocks are evicted from its end, and the sequence
that was used the longest time ago goes first: the order of vLLM's queue of free blocks, which are appended in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Hit(NamedTuple):
    """Blocks of a sequence that are in the cache.

    Attributes:
        shared: Of its group's common prompt.
        own: Of its trajectory, after the shared ones.
        idle: Those of both that no sequence holds now, so that holding them takes room.
    """

    shared: int
    own: int
    idle: int


class Held:
    """Blocks that one sequence holds.

    Attributes:
        trajectory, group: What its tokens belong to.
        common: Number of full blocks of its group's common prompt.
        shared: Blocks that it shares, or may share, with its group; the first ones.
        private: Its other blocks.
    """

    __slots__ = ("common", "group", "private", "shared", "trajectory")

    def __init__(self, trajectory: int, group: int, common: int) -> None:
        self.trajectory = trajectory
        self.group = group
        self.common = common
        self.shared = 0
        self.private = 0


class _Common:
    __slots__ = ("blocks", "holders")

    def __init__(self) -> None:
        self.blocks = 0
        self.holders = 0


@dataclass(frozen=True, slots=True)
class _Own:
    """Cached blocks of a trajectory, from number `start` to `end`, exclusive."""

    start: int
    end: int


_Key = tuple[bool, int]
"""A group's common prompt (True) or a trajectory (False), with its number."""


class KvCache:
    """Blocks of one engine's key-value cache.

    Attributes:
        capacity: Number of blocks.
        blank: Free blocks without a prefix that could be reused; they are taken first.
        evictable: Free blocks with one.
    """

    def __init__(self, capacity: int, block_tokens: int, *, reuse: bool = True) -> None:
        """`reuse` is False for an engine without prefix caching."""
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.blank = capacity
        self.evictable = 0
        self._reuse = reuse
        self._common: dict[int, _Common] = {}
        self._own: dict[int, _Own] = {}
        # Prefixes that nobody holds, the one used the longest time ago first; their numbers of blocks.
        self._idle: dict[_Key, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.blank + self.evictable

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.capacity - self.blank - self.evictable

    def find(self, held: Held, tokens: int) -> Hit:
        """Find the cached prefix of a sequence of so many tokens; its last token is never taken from the cache."""
        most = (tokens - 1) // self.block_tokens
        common = self._common.get(held.group)
        own = self._own.get(held.trajectory)
        here = 0 if common is None else min(common.blocks, held.common, most)
        if own is not None and own.start <= here and own.end > own.start and most > own.start:
            shared, mine = own.start, min(own.end, most) - own.start
        else:
            shared, mine = here, 0
        idle = mine
        if shared and common is not None and not common.holders:
            # It is held as a whole.
            idle += common.blocks
        return Hit(shared, mine, idle)

    def hold(self, held: Held, hit: Hit) -> None:
        """Hold the cached prefix of a sequence that begins."""
        if hit.shared:
            common = self._common[held.group]
            if not common.holders:
                self.evictable -= self._idle.pop((True, held.group))
            common.holders += 1
            held.shared = hit.shared
        if hit.own:
            own = self._own.pop(held.trajectory)
            size = self._idle.pop((False, held.trajectory))
            self.evictable -= size
            # What the sequence does not continue cannot be reached any more.
            self.blank += own.end - own.start - hit.own
            held.private = hit.own

    def take(self, held: Held, blocks: int) -> None:
        """Take further blocks for a sequence, evicting what is needed.

        Raises:
            ValueError: There are not so many; check `available` before.
        """
        self.take_anonymous(blocks)
        held.private += blocks

    def take_anonymous(self, blocks: int) -> None:
        """Take blocks whose sequences count them themselves."""
        if blocks > self.available:
            raise ValueError(f"{blocks} blocks are wanted and {self.available} are free")
        while self.blank < blocks:
            self._evict(blocks - self.blank)
        self.blank -= blocks

    def share(self, held: Held, before: int, after: int) -> None:
        """Offer a sequence's new full blocks of the common prompt to its group.

        Args:
            before, after: Its computed tokens, before and after.
        """
        target = min(held.common, after // self.block_tokens)
        if not self._reuse or target <= held.shared or before // self.block_tokens != held.shared:
            return
        common = self._common.get(held.group)
        if (0 if common is None else common.blocks) != held.shared:
            # Another sequence computes the same blocks at the same time: these stay this one's own.
            return
        if common is None:
            common = self._common[held.group] = _Common()
        if not held.shared:
            common.holders += 1
        held.private -= target - held.shared
        common.blocks = held.shared = target

    def release(self, held: Held, tokens: int) -> None:
        """Release a sequence with so many computed tokens; what is full remains for later turns."""
        full = tokens // self.block_tokens - held.shared if self._reuse else 0
        self.blank += held.private - full
        if full > 0:
            self._forget(held.trajectory)
            self._own[held.trajectory] = _Own(held.shared, held.shared + full)
            self._idle[(False, held.trajectory)] = full
            self.evictable += full
        if held.shared:
            common = self._common[held.group]
            common.holders -= 1
            if not common.holders:
                self._idle[(True, held.group)] = common.blocks
                self.evictable += common.blocks
        held.shared = held.private = 0

    def clear(self) -> None:
        """Forget all prefixes that nobody holds."""
        for is_common, number in self._idle:
            del (self._common if is_common else self._own)[number]
        self._idle.clear()
        self.blank += self.evictable
        self.evictable = 0

    def _forget(self, trajectory: int) -> None:
        if self._own.pop(trajectory, None) is not None:
            size = self._idle.pop((False, trajectory))
            self.evictable -= size
            self.blank += size

    def _evict(self, wanted: int) -> None:
        key, size = next(iter(self._idle.items()))
        is_common, number = key
        taken = min(wanted, size)
        self.evictable -= taken
        self.blank += taken
        if taken == size:
            del self._idle[key]
            del (self._common if is_common else self._own)[number]
            return
        self._idle[key] = size - taken
        if is_common:
            self._common[number].blocks -= taken
        else:
            own = self._own[number]
            self._own[number] = _Own(own.start, own.end - taken)
