"""Journal in an object store: parts of bounded size and age, each complete or absent."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.data.record import AnyRecord
from kuberoll_workers.output.journal import BatchJournal, WriteObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """Limits of a part, and retries of its upload.

    Attributes:
        max_bytes: Size in bytes at which a part is written at once.
        max_seconds: Maximum time that a record waits for its part to be written.
        attempts: Maximum number of attempts of an upload, with a backoff that doubles from `backoff_seconds` up to 30
            s.
    """

    max_bytes: int = 32 << 20
    max_seconds: float = 15.0
    attempts: int = 8
    backoff_seconds: float = 0.5


class PartJournal(BatchJournal):
    """Adds parts to a folder; existing parts are never changed."""

    def __init__(
        self,
        filesystem: Any,
        folder: str,
        *,
        owner: str,
        seconds: WriteObserver,
        limits: PartLimits,
        written: Callable[[str, bytes], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            owner: What names of new parts start with; unique among writers.
            written: Called with the name within the folder, and the content, of each part that is in the store now.
            sleep: Waits for so many seconds, between attempts of an upload.
        """
        super().__init__(folder, seconds=seconds)
        self._fs = filesystem
        self._folder = folder
        self._owner = owner
        self._limits = limits
        self._told = written
        self._sleep = sleep
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
        """Schedule the storage of one record; see `Journal.add`."""
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

    def hurry(self) -> None:
        """Write the records that wait for others now; see `Journal.hurry`."""
        # Else the next record would not wait.
        if self._pending:
            self._enough.set()

    async def _store(self, data: bytes) -> None:
        name = f"{self._owner}-{next(self._numbers):08d}.jsonl"
        path = f"{self._folder}/{name}"
        wait = self._limits.backoff_seconds
        for attempt in range(1, self._limits.attempts + 1):
            started = time.perf_counter()
            try:
                await asyncio.to_thread(self._fs.pipe_file, path, data)
            except Exception:
                self._seconds.failed()
                # The same name again: a failed upload may have arrived nevertheless.
                if attempt == self._limits.attempts:
                    raise
                await self._sleep(wait * random.uniform(0.5, 1.0))
                wait = min(30.0, 2 * wait)
            else:
                self._seconds.observe(time.perf_counter() - started)
                if self._told is not None:
                    self._told(name, data)
                return
