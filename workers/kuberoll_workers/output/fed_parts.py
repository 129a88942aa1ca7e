"""What workers and consumers say to each other on the direct path; docs/how-to/direct-path.md describes it.

A worker answers `GET /v1/parts?epoch=E&after=N&seconds=S` with the parts of its journals that it has written since, or
waits for one. `POST /v1/plan` tells it that the consumer has written a new plan.
"""

from __future__ import annotations

from typing import Final

import msgspec

PARTS_PATH: Final = "/v1/parts"
PLAN_PATH: Final = "/v1/plan"

MOST_SECONDS: Final = 30.0
"""Seconds that a request may wait at most."""

ANSWER_BYTES: Final = 4 << 20
"""Bytes of lines in an answer at most."""


class FedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a journal, which is in the object store already.

    Attributes:
        file: Its name within the run: `shard-00000/worker-….jsonl`.
        lines: Its content, byte for byte.
    """

    file: str
    lines: bytes


class FedParts(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, as MessagePack.

    Attributes:
        epoch: Names the worker's process: places of another one mean nothing.
        next: Place from which to ask next.
        gap: True if parts before `next` are not in this answer: the journals have them.
        shards: Shards that the worker writes.
        ended: True if it writes no more.
        parts: Parts in the order in which they were written.
    """

    epoch: str
    next: int
    gap: bool = False
    shards: list[int] = []
    ended: bool = False
    parts: list[FedPart] = []
