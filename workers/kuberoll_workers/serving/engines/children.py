"""Exit codes of processes that a library starts by `multiprocessing` and does not report."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_LOOK_SECONDS = 0.05


@contextmanager
def started_children() -> Iterator[list[BaseProcess]]:
    """Collect the children that this process starts while the context lasts; the list grows meanwhile."""
    import multiprocessing

    before = set(multiprocessing.active_children())
    children: list[BaseProcess] = []

    def look() -> None:
        children.extend(
            child for child in multiprocessing.active_children() if child not in before and child not in children
        )

    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_LOOK_SECONDS):
            look()

    thread = threading.Thread(target=run, name="kuberoll-children", daemon=True)
    thread.start()
    try:
        yield children
    finally:
        ended.set()
        thread.join()
        look()


def exit_codes(children: Sequence[BaseProcess], *, seconds: float = 0.0) -> dict[str, int | None]:
    """Exit codes by process name, as in `multiprocessing`: negative numbers are signals, None is a running process.

    Args:
        seconds: Time to wait for each running process: the pipe to its parent closes before there is an exit code.
    """
    for child in children:
        if seconds:
            child.join(seconds)
    return {child.name: child.exitcode for child in children}
