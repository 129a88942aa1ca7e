"""Global random numbers of libraries that have no generators of their own, a separate stream for each episode."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()


class RandomStream:
    """Random numbers of `random` and of `numpy.random`, from a seed, whatever other episodes draw meanwhile."""

    def __init__(self, seed: int) -> None:
        """
        Args:
            seed: 0 to 2³²−1.
        """
        import numpy

        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = numpy.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the global functions draw from this stream; one stream at a time is active in a process."""
        import numpy

        with _lock:
            before = random.getstate(), numpy.random.get_state()
            random.setstate(self._python)
            numpy.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), numpy.random.get_state()
                random.setstate(before[0])
                numpy.random.set_state(before[1])
