"""Progress of a copy: a bar on a terminal, otherwise a line for each file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

from kuberoll_operator.console.copying import ProgressDisplay

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


@contextmanager
def progress_of(stream: TextIO) -> Iterator[ProgressDisplay]:
    """Progress of a copy, shown on a stream."""
    if not stream.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(file=stream, highlight=False)) as bars:
        yield _Bars(bars)


class _Lines:
    def begin(self, name: str, size: int | None, done: int) -> None:
        rest = f", {done} of them copied before" if done else ""
        click.echo(f"{name}: {size} bytes{rest}", err=True)

    def advance(self, size: int) -> None:
        del size

    def note(self, text: str) -> None:
        click.echo(text, err=True)


class _Bars:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def begin(self, name: str, size: int | None, done: int) -> None:
        self._task = self._bars.add_task(name, total=size, completed=done)

    def advance(self, size: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, size)

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False)
