"""A journal in an object store: parts of bounded size and age, each whole or not there at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.data.record import AnyRecord
from kuberoll_workers.output.journal import BatchJournal, Observes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """When a part is written, and how patiently.

    Attributes:
        max_bytes: A part that has so many is written at once.
        max_seconds: A record waits no longer than so many for its part to be written.
        attempts: Tries of one upload, with waits that double from `backoff_seconds` to half a minute.
    """

    max_bytes: int = 32 << 20
    max_seconds: float = 15.0
    attempts: int = 8
    backoff_seconds: float = 0.5


class PartJournal(BatchJournal):
    """Adds to a folder of parts; those that are there are never touched."""

    def __init__(self, filesystem: Any, folder: str, *, owner: str, seconds: Observes, limits: PartLimits) -> None:
        """`owner` begins the names of the parts: two writers need different ones."""
        super().__init__(folder, seconds=seconds)
        self._fs = filesystem
        self._folder = folder
        self._owner = owner
        self._limits = limits
        self._numbers = self._free_numbers()
        self._enough = asyncio.Event()

    def _free_numbers(self) -> Iterator[int]:
        try:
            names = [str(path).rpartition("/")[2] for path in self._fs.ls(self._folder, detail=False)]
        except FileNotFoundError:
            names = []
        mine = [name.removesuffix(".jsonl").rpartition("-") for name in names]
        number = 1 + max((int(n) for owner, _, n in mine if owner == self._owner and n.isdigit()), default=0)
        while True:
            yield number
            number += 1

    def add(self, record: AnyRecord) -> tuple[asyncio.Future[None], int]:
        """Have one record stored soon; see `Journal.add`."""
        added = super().add(record)
        if self._size >= self._limits.max_bytes:
            self._enough.set()
        return added

    async def _gather(self) -> None:
        if not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.max_seconds):
                    await self._enough.wait()
            self._enough.clear()

    def _hurry(self) -> None:
        self._enough.set()

    async def _store(self, data: bytes) -> None:
        path = f"{self._folder}/{self._owner}-{next(self._numbers):08d}.jsonl"
        wait = self._limits.backoff_seconds
        for attempt in range(1, self._limits.attempts + 1):
            started = time.perf_counter()
            try:
                await asyncio.to_thread(self._fs.pipe_file, path, data)
            except Exception:
                self._seconds.failed()
                # The same name again: an upload that failed may have arrived all the same.
                if attempt == self._limits.attempts:
                    raise
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(30.0, 2 * wait)
            else:
                self._seconds.observe(time.perf_counter() - started)
                return
