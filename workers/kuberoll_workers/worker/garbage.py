"""Garbage collection of a process with millions of objects."""

from __future__ import annotations

import gc


def tune_garbage_collector() -> None:
    """Make garbage collection less frequent: a worker has millions of live objects and creates few cycles.

    With 10,000 trajectories in flight a full collection blocks the process for up to 0.4 s (`benchmarks/in_flight.py`),
    and by default follows every 700 surviving new objects.
    """
    gc.collect()
    # Exclude the present objects, mostly code, from further collections.
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
