"""CPU time of a run's processes, by what they do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Final

import psutil

PARTS: Final = {
    "engine": ("EngineCore", "spare_interpreter"),
    "replica": ("ray::ServeReplica",),
    "worker": ("kuberoll_workers.worker",),
    "command": ("bin/kuberoll", "kuberoll_workers.local"),
    "host": ("kuberoll_workers.serving.host",),
    "haproxy": ("haproxy",),
}
"""Words in the command lines of each part's processes; the first part that has one counts. All others are `ray`."""

OTHERS: Final = "ray"

_LOOK_SECONDS = 0.1


def part_of(command: str) -> str:
    """The part that a command line belongs to."""
    return next((part for part, words in PARTS.items() if any(word in command for word in words)), OTHERS)


class ProcessTimes:
    """Looks, ten times a second, at the CPU times of all processes below this one, in a thread of its own."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, dict[int, float]]] = []
        self._commands: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ProcessTimes:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> Mapping[str, float]:
        """CPU seconds of each part between two times, seconds since the epoch, within a tenth of a second."""
        inside = [times for at, times in self._looks if begin - _LOOK_SECONDS <= at <= end + _LOOK_SECONDS]
        if len(inside) < 2:
            raise ValueError("the processes were not looked at in this time")
        # The last look may have come when most of them had ended: each has what it had when it was seen last.
        last = {pid: seconds for times in inside for pid, seconds in times.items()}
        spent: Counter[str] = Counter()
        for pid, seconds in last.items():
            spent[part_of(self._commands[pid])] += seconds - inside[0].get(pid, 0.0)  # type: ignore[assignment]
        return dict(spent)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            times = {}
            for process in psutil.Process().children(recursive=True):
                try:
                    spent = process.cpu_times()
                    # A process may change its title after its start.
                    command = " ".join(process.cmdline())
                except psutil.Error:
                    continue
                times[process.pid] = spent.user + spent.system
                # One that ends has none any more.
                if command or process.pid not in self._commands:
                    self._commands[process.pid] = command
            self._looks.append((time.time(), times))
