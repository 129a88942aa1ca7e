"""CPU time of a program with all its processes, also of those that nobody waits for.

The kernel adds up what a process has used, to the nanosecond, but passes it on only to a parent that waits: a program
that ignores SIGCHLD loses the time of its children. Here each process is counted by itself, by its clock: while it
lives, and once more when it exits, which it cannot do unseen. What has been killed, or was made and never seen, is
counted as if it had run until it was missed. The sum may be too large, never too small by more than a look's rounding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable


def of_process(process: int) -> float | None:
    """CPU seconds of a process with all its threads, those that have ended among them; None if it is gone."""
    try:
        # CPUCLOCK_SCHED of the process, see clock_getcpuclockid(3).
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return None


class CpuTime:
    """The sum for one program.

    Attributes:
        seconds: What has been counted so far.
    """

    def __init__(
        self,
        now: float,
        *,
        processors: int | None = None,
        clock: Callable[[int], float | None] = of_process,
    ) -> None:
        """
        Args:
            now: Monotonic seconds.
            processors: Number of processors that the program may use.
            clock: CPU seconds of a process; None if it is gone.
        """
        self._clock = clock
        self._processors = processors or len(os.sched_getaffinity(0))
        self._last = now
        self._alive: dict[int, float] = {}
        self._exiting: set[int] = set()
        self._ended = 0.0
        # The first process is made by the supervisor.
        self._made, self._made_before, self._seen = 1, 1, 0

    @property
    def seconds(self) -> float:
        return self._ended + sum(self._alive.values())

    def making(self) -> None:
        """Count a process that is about to be made."""
        self._made += 1

    def exiting(self, process: int) -> None:
        """Count a process that waits for its exit."""
        self._count(process)
        self._exiting.add(process)

    def look(self, processes: Iterable[int], now: float) -> None:
        """Count all processes that are there."""
        there = set(processes)
        for process in there:
            self._count(process)
        missed = 0
        for process in self._alive.keys() - there:
            self._ended += self._alive.pop(process)
            # What was killed may have run since the last look.
            missed += process not in self._exiting
            self._exiting.discard(process)
        # One that was made before the last look is there now, or has ended unseen.
        unseen = max(0, self._made_before - self._seen)
        self._seen += unseen
        self._made_before = self._made
        # No more of them can have run than there are processors.
        self._ended += min(missed + unseen, self._processors) * (now - self._last)
        self._last = now

    def _count(self, process: int) -> None:
        used = self._clock(process)
        if used is None:
            return
        before = self._alive.get(process)
        if before is None:
            self._seen += 1
        elif used < before:
            # Another process has its number.
            self._seen += 1
            self._ended += before
        self._alive[process] = used
