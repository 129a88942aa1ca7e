"""Ray actors that serve several tests: the process of each takes seconds to start, most of them to import its class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Renewed:
    """An actor's class whose process becomes a new actor of the class: nothing of the old one is left."""

    def renew(self, *args: Any, **more: Any) -> None:
        vars(self).clear()
        type(self).__init__(self, *args, **more)


@contextmanager
def actor_pool(ray: Any, kind: type[Renewed]) -> Iterator[Callable[[], Any]]:
    """A function that gives makers of actors of a class, each for one test; processes are those of the test before.

    A test that kills an actor, or leaves it busy, makes one of its own.
    """
    handles: list[Any] = []

    def maker() -> Callable[..., Any]:
        used = iter(tuple(handles))

        def make(*args: Any, **more: Any) -> Any:
            if (handle := next(used, None)) is None:
                handles.append(ray.remote(kind).options(num_cpus=0).remote(*args, **more))
                return handles[-1]
            ray.get(handle.renew.remote(*args, **more))
            return handle

        return make

    try:
        yield maker
    finally:
        for handle in handles:
            ray.kill(handle)
