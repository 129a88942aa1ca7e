"""Copy of a run's output from a reader: it survives lost connections and never overwrites local files."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.execution import StreamLost
from kuberoll_operator.console.local_files import Action, Contents, Directory, contents_of, decide
from kuberoll_operator.console.reader import OutputChanged, Reader, RemoteFile

ATTEMPTS: Final = 5
"""Number of connections in a row without any new data before the copy fails."""

RETRY_SECONDS: Final = 1.0

Connect = Callable[[], AbstractAsyncContextManager[Reader]]
"""Opens a new session with a reader."""


class ProgressDisplay(Protocol):
    """Receives the progress of a copy."""

    def begin(self, name: str, size: int | None, done: int) -> None: ...
    def advance(self, size: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class Outcome:
    """Result of a copy.

    Attributes:
        fetched: Names of files that were copied or brought up to date.
        skipped: Names of files that were up to date already.
    """

    fetched: list[str]
    skipped: list[str]


@dataclass(frozen=True, slots=True)
class _Step:
    file: RemoteFile
    action: Action
    begin: Path | None
    contents: Contents


class Copy:
    """One `kuberoll get` into a directory.

    Args:
        run: Identity of the run.
        snapshot: True if the run is still going on.
        include: Patterns of the names to copy; none for all.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        snapshot: bool,
        include: Sequence[str] = (),
        force: bool = False,
        progress: ProgressDisplay,
    ) -> None:
        self._path, self._run, self._snapshot = path, run, snapshot
        self._include, self._force, self._progress = include, force, progress
        self._received = 0
        self.outcome = Outcome([], [])

    async def run(self, connect: Connect) -> Outcome:
        """Copy everything, over as many connections as necessary.

        Raises:
            ConsoleError: Different local files have the same names, there is no output, or no connection brings new
                data.
        """
        await retry_connection(self._once, connect, received=lambda: self._received, note=self._progress.note)
        return self.outcome

    async def _once(self, reader: Reader) -> None:
        directory = Directory(self._path, f"{self._run} {reader.location}")
        files = [file for file in await reader.files() if self._wanted(file.name)]
        if not files:
            which = f" that matches {', '.join(self._include)}" if self._include else ""
            raise ConsoleError(f"there is nothing{which} at {reader.location} yet")
        steps = [await self._step(reader, directory, file) for file in files]
        others = [step.file.name for step in steps if step.action is Action.REFUSE]
        if others:
            raise ConsoleError(
                f"{self._path} has different files with these names, and nothing was copied: {', '.join(others)}; "
                "choose another directory with --output, or overwrite them with --force",
                code=2,
            )
        for step in steps:
            if step.action is Action.SKIP:
                directory.record(step.file.name, step.contents, snapshot=self._snapshot)
                if step.file.name not in self.outcome.fetched:
                    self.outcome.skipped.append(step.file.name)
            else:
                await self._fetch(reader, directory, step)
                self.outcome.fetched.append(step.file.name)

    def _wanted(self, name: str) -> bool:
        return not self._include or any(fnmatch.fnmatchcase(name, pattern) for pattern in self._include)

    async def _step(self, reader: Reader, directory: Directory, file: RemoteFile) -> _Step:
        partial, path = directory.partial(file.name), directory.path / file.name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            return _Step(file, Action.REFUSE, None, Contents(0, ""))
        local = await asyncio.to_thread(contents_of, path)
        begins = local is not None and await self._begins(reader, file, local)
        action = decide(file.size, local, begins=begins, copied=directory.copied(file.name), force=self._force)
        if action in (Action.SKIP, Action.REFUSE):
            return _Step(file, action, None, local or Contents(0, ""))
        # Resume an interrupted copy if it has more than the complete file.
        grown = await asyncio.to_thread(contents_of, partial)
        if grown and grown.size > (local.size if begins and local else 0) and await self._begins(reader, file, grown):
            return _Step(file, action, partial, grown)
        if action is Action.CONTINUE and local is not None:
            return _Step(file, action, path, local)
        return _Step(file, action, None, Contents(0, ""))

    async def _begins(self, reader: Reader, file: RemoteFile, local: Contents) -> bool:
        if local.size > file.size:
            return False
        return local.size == 0 or await reader.begins_with(file.name, local.size, local.sha256)

    async def _fetch(self, reader: Reader, directory: Directory, step: _Step) -> None:
        file, done = step.file, step.contents.size
        self._progress.begin(file.name, file.size, done)
        growing = await asyncio.to_thread(directory.open_partial, file.name, step.begin)
        try:
            async for chunk in reader.read(file, done):
                await asyncio.to_thread(growing.write, chunk)
                self._received += len(chunk)
                self._progress.advance(len(chunk))
            growing.flush()
            # Verify what is on disk, not what was received.
            contents = await asyncio.to_thread(contents_of, directory.partial(file.name))
            if contents is None or contents.size != file.size:
                raise ConsoleError(f"{directory.partial(file.name)} was changed by another program in the meantime")
            await asyncio.to_thread(directory.complete, file.name, growing, contents, snapshot=self._snapshot)
        finally:
            growing.close()


class Stream:
    """One `kuberoll get --stream`: the trajectories of all shards, written to an append-only stream."""

    def __init__(self, out: BinaryIO, *, note: Callable[[str], None]) -> None:
        self._out, self._note = out, note
        self._done: set[str] = set()
        self._shard = ""
        self._size, self._digest = 0, hashlib.sha256()
        self.written = 0

    async def run(self, connect: Connect) -> None:
        """Write everything.

        Raises:
            ConsoleError: No connection brings new data, or the trajectories already written are stored in another order
                by now.
        """
        await retry_connection(self._once, connect, received=lambda: self.written, note=self._note)

    async def _once(self, reader: Reader) -> None:
        shards = await reader.shards()
        if not shards:
            raise ConsoleError(f"there are no trajectories at {reader.location} yet")
        for shard in shards:
            if shard in self._done:
                continue
            if shard != self._shard:
                self._shard, self._size, self._digest = shard, 0, hashlib.sha256()
            try:
                async for chunk in reader.trajectories(shard, self._size, self._digest.hexdigest()):
                    await asyncio.to_thread(self._write, chunk)
            except OutputChanged as error:
                if self._size:
                    raise ConsoleError(
                        f"{error}: {self.written} bytes were written, and the rest cannot be determined; start again"
                    ) from error
                raise
            self._done.add(shard)

    def _write(self, chunk: bytes) -> None:
        self._out.write(chunk)
        self._out.flush()
        self._digest.update(chunk)
        self._size += len(chunk)
        self.written += len(chunk)


async def retry_connection(
    operation: Callable[[Reader], Awaitable[None]],
    connect: Connect,
    *,
    received: Callable[[], int],
    note: Callable[[str], None],
    attempts: int = ATTEMPTS,
    retry_seconds: float = RETRY_SECONDS,
) -> None:
    """Repeat an operation with a reader until it succeeds.

    Args:
        operation: The operation; resumes where it stopped.
        received: Bytes received so far; attempts that increase it do not count as failed.

    Raises:
        ConsoleError: `attempts` attempts in a row brought nothing.
    """
    left, before = attempts, received()
    while True:
        try:
            async with connect() as reader:
                await operation(reader)
                return
        except (StreamLost, OutputChanged) as error:
            left, before = attempts if received() > before else left - 1, received()
            if left <= 0:
                raise ConsoleError(
                    f"the connection to the reader broke off {attempts} times in a row: {error}; everything copied so "
                    "far is kept, and the same command resumes there"
                ) from error
            note(f"connection lost ({error}); retrying")
        await asyncio.sleep(retry_seconds)
