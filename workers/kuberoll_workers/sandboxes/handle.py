"""The handle of a sandbox: commands, files, a shell and ports, wherever the sandbox is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.sandboxes.connection import Connection, Pool, Ticket
from kuberoll_workers.sandboxes.errors import CommandNotStarted, SandboxError, SandboxLost
from kuberoll_workers.sandboxes.guest.files import as_it_is, check_within
from kuberoll_workers.sandboxes.guest.frames import Header
from kuberoll_workers.sandboxes.keys import context_of
from kuberoll_workers.sandboxes.ports import Forward, Reverse

OUTPUT_BYTES: Final = 1 << 20
"""Bytes that are kept of each of a command's outputs, unless it is said otherwise."""
READ_BYTES: Final = 64 << 20
"""Bytes that a file may have that is read at once, unless it is said otherwise."""
TREE_BYTES: Final = 1 << 30
"""Bytes that a downloaded tree may have, unless it is said otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended.

    Attributes:
        exit_code: Its exit code; None if a signal ended it.
        signal: The signal that ended it; None if it exited.
        stdout, stderr: What it wrote; of more than the limit the beginning and the end.
        skipped: Bytes that are missing in the middle of its standard output and of its standard error.
        timed_out: True if it was killed, with everything that it had started, because its time was over.
        memory: Most resident memory of one process among it and those that it waited for, in bytes, as the kernel
            counts it; None: unknown, as of one that was killed when its time was over.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes = b""
    skipped: tuple[int, int] = (0, 0)
    timed_out: bool = False
    memory: int | None = None

    @property
    def succeeded(self) -> bool:
        """True if its exit code is 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Its standard output as text."""
        return self.stdout.decode(errors="replace")

    @property
    def errors(self) -> str:
        """Its standard error as text."""
        return self.stderr.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What has changed in a sandbox of that which programs read without being told.

    Attributes:
        paths: Paths, at most 50.
        more: How many others.
        complete: False if there was too much to look at all of it.
    """

    paths: list[str]
    more: int = 0
    complete: bool = True


class Process:
    """A command that runs; `Sandbox.start` makes one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._end: Header | None = None

    @property
    def ended(self) -> bool:
        """True if its end has been seen."""
        return self._end is not None

    async def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        """What it writes, as it comes: `stdout` or `stderr`, and bytes; the iterator ends with the command.

        Raises:
            SandboxLost: The sandbox is gone.
            CommandNotStarted: It could not be started.
        """
        while self._end is None:
            header, payload = await self._connection.receive()
            if header["kind"] == "end":
                self._end = header
                _check_start(header)
            else:
                yield header["stream"], payload

    async def write(self, data: bytes) -> None:
        """Write to its standard input, as fast as it reads while somebody iterates over its output."""
        await self._connection.send_input(data)

    async def end_input(self) -> None:
        """Close its standard input."""
        await self._connection.send({"kind": "inputEnd"})

    async def kill(self) -> None:
        """Kill it, and everything that it has started."""
        await self._connection.send({"kind": "kill"})

    async def wait(self) -> Completed:
        """Wait for its end; what it writes is dropped.

        Raises:
            SandboxLost, CommandNotStarted: As for its output.
        """
        async for _ in self:
            pass
        return _completed(self._end or {}, {}, {})


class Sandbox:
    """A sandbox, in the hands of an environment, a tool or an agent.

    Methods may be called concurrently. Each raises SandboxLost if the sandbox is gone.

    Attributes:
        environment: Variables that commands of this handle have from now on, in addition to the sandbox's own.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.environment: dict[str, str] = {}
        self._pool = Pool(ticket, context_of(ticket.key))
        self._ports: list[Forward | Reverse] = []

    @property
    def name(self) -> str:
        """Its name."""
        return self._pool.ticket.name

    async def workdir(self) -> str:
        """Working directory of commands that name none."""
        async with self._pool.connection() as connection:
            return connection.workdir

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        merged: bool = False,
        output_bytes: int = OUTPUT_BYTES,
    ) -> Completed:
        """Run a command to its end.

        Args:
            command: A text for `/bin/sh -c`, or a program and its arguments.
            timeout: Time limit in seconds, after which it is killed with everything that it has started; None: none.
            user: Whom it runs as, `name`, `uid`, `name:group` or `uid:gid`; None: the sandbox's user.
            workdir: Its working directory; None: the sandbox's.
            environment: Variables in addition to the sandbox's own.
            stdin: Its standard input.
            merged: True to have its standard error in its standard output.
            output_bytes: Bytes that are kept of each output, half from its beginning and half from its end.

        Raises:
            CommandNotStarted: There is no such program, working directory or user.
        """
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        skipped: dict[str, int] = {}
        header = _exec_header(command, timeout, user, workdir, self._variables(environment), merged)
        async with self._pool.connection() as connection:
            await connection.send({**header, "limit": output_bytes})
            async with _sending(connection, stdin):
                while (frame := await connection.receive())[0]["kind"] == "output":
                    stream = frame[0]["stream"]
                    kept[stream] += frame[1]
                    skipped[stream] = skipped.get(stream, 0) + frame[0].get("skipped", 0)
        _check_start(frame[0])
        return _completed(frame[0], kept, skipped)

    @contextlib.asynccontextmanager
    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
        environment: Mapping[str, str] | None = None,
        merged: bool = False,
    ) -> AsyncIterator[Process]:
        """Start a command whose output is read as it comes; at the end of the block it is killed if it still runs.

        The arguments are those of `exec`.
        """
        async with self._pool.connection() as connection:
            variables = self._variables(environment)
            await connection.send(_exec_header(command, timeout, user, workdir, variables, merged))
            process = Process(connection)
            try:
                yield process
            finally:
                if not process.ended:
                    connection.close()

    async def read(self, path: str, *, offset: int = 0, size: int | None = None, user: str | None = None) -> bytes:
        """Read a file, or a part of it.

        Args:
            offset: Number of bytes before the part.
            size: Number of bytes; None: all, of which there may be `READ_BYTES`.

        Raises:
            OSError: It cannot be read, as for a file here; EFBIG if it has more bytes than may be read at once.
        """
        limit = READ_BYTES + 1 if size is None else size
        header = {"kind": "read", "path": path, "offset": offset, "size": limit, "user": user}
        data = bytearray()
        await self._operation(header, lambda payload: data.extend(payload))
        if size is None and len(data) > READ_BYTES:
            raise OSError(
                errno.EFBIG, f"it has more than {READ_BYTES >> 20} MiB; read it in parts, or download it", path
            )
        return bytes(data)

    async def write(
        self, path: str, data: bytes | str, *, mode: int | None = None, parents: bool = True, user: str | None = None
    ) -> None:
        """Write a file: as a whole, or not at all.

        Args:
            mode: Its mode; None: that of the file that was there, or 0644.
            parents: True to make directories that are missing.

        Raises:
            OSError: It cannot be written.
        """
        header = {"kind": "write", "path": path, "mode": mode, "parents": parents, "user": user}
        await self._operation(header, source=data.encode() if isinstance(data, str) else data)

    async def upload(
        self, source: Path | str, path: str, *, only: Sequence[str] | None = None, user: str | None = None
    ) -> None:
        """Put a file or a directory from here into the sandbox; what is in a directory there and not here stays.

        Args:
            path: The directory that a directory's contents come into, or the file's own path.
            only: Paths of what is put there, relative to the directory, one before what is in it; None: everything.

        Raises:
            OSError: It cannot be read here, or written there.
        """
        source = Path(source)
        if not source.is_dir():
            data, mode = await asyncio.to_thread(lambda: (source.read_bytes(), source.stat().st_mode & 0o777))
            await self.write(path, data, mode=mode, user=user)
            return
        archive = await asyncio.to_thread(_packed, source, only)
        await self._operation({"kind": "unpack", "path": path, "trusted": True, "user": user}, source=archive)

    async def unpack(self, archive: bytes, path: str, *, user: str | None = None) -> None:
        """Unpack a tar archive, which anybody may have made, into a directory of the sandbox.

        Raises:
            OSError: It cannot be written, or leads out of the directory.
        """
        await self._operation({"kind": "unpack", "path": path, "trusted": False, "user": user}, source=archive)

    async def pack(self, path: str, *, size: int = TREE_BYTES, user: str | None = None) -> bytes:
        """A file or a directory of the sandbox as a tar archive; its name there is `.`.

        Args:
            size: Number of bytes that it may have.

        Raises:
            OSError: It cannot be read, or has too many bytes (EFBIG).
        """
        archive = bytearray()

        def take(payload: bytes) -> None:
            if len(archive) + len(payload) > size:
                raise OSError(errno.EFBIG, f"it has more than {size} bytes", path)
            archive.extend(payload)

        await self._operation({"kind": "pack", "path": path, "user": user}, take)
        return bytes(archive)

    async def download(self, path: str, target: Path | str, *, size: int = TREE_BYTES, user: str | None = None) -> None:
        """Get a file or a directory out of the sandbox.

        Links that lead out of the directory, and what is neither a file, a directory nor a link, are left out.

        Args:
            target: Where it goes: the file's own path, or a directory, which is made, for a directory's contents.
            size: Number of bytes that it may have.

        Raises:
            OSError: It cannot be read there, has too many bytes (EFBIG), or cannot be written here.
        """
        archive = await self.pack(path, size=size, user=user)
        await asyncio.to_thread(_unpack, archive, Path(target))

    async def make_directory(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory with those above it; one that is there gets the mode.

        Raises:
            OSError: It cannot be made.
        """
        await self._operation({"kind": "make", "path": path, "mode": mode, "user": user})

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Remove a file, a link or a directory with all that is in it; what is not there is no error.

        Raises:
            OSError: It cannot be removed.
        """
        await self._operation({"kind": "remove", "path": path, "user": user})

    async def expose(self, port: int) -> str:
        """Make a port of the sandbox reachable from this process's machine.

        Returns:
            Host and port, `127.0.0.1:PORT`, until the handle is closed.
        """
        forward = Forward(self._pool, port)
        self._ports.append(forward)
        return await forward.open()

    async def forward(self, host: str, port: int, *, inside: int = 0) -> str:
        """Make one address of the world outside reachable from inside, whatever the sandbox's network is.

        Args:
            host, port: The address, as this process reaches it.
            inside: Port in the sandbox; 0: any that is free.

        Returns:
            Host and port in the sandbox, `127.0.0.1:PORT`, until the handle is closed.
        """
        reverse = Reverse(self._pool, host, port)
        self._ports.append(reverse)
        return await reverse.open(inside)

    async def mark(self) -> int:
        """A mark for `changed`: what changes from now on has changed since.

        Raises:
            OSError: There can be none.
        """
        data = bytearray()
        await self._operation({"kind": "mark", "path": "", "user": "0"}, data.extend)
        return int(data)

    async def changed(self, since: int) -> Changes:
        """What has changed since a mark of that which programs read without being told (`guest.changes`).

        Raises:
            OSError: It cannot be looked at.
        """
        data = bytearray()
        header = {"kind": "changed", "path": "", "since": since, "search": self.environment.get("PATH"), "user": "0"}
        await self._operation(header, data.extend)
        answer = json.loads(bytes(data))
        return Changes(paths=list(answer["paths"]), more=int(answer["more"]), complete=bool(answer["complete"]))

    async def clear(self) -> None:
        """Kill every process that anybody has started in the sandbox.

        Raises:
            SandboxError: Some are left.
        """
        answer = await self._operation({"kind": "clear"})
        if answer.get("left"):
            raise SandboxError(f"{answer['left']} processes of the sandbox {self.name} cannot be killed")

    def lose(self, error: SandboxLost) -> None:
        """End what is under way, and all that is to come, with `SandboxLost`.

        Args:
            error: Why.
        """
        self._pool.lose(error)

    async def ping(self, *, seconds: float) -> None:
        """Ask whether the sandbox is there, and renew its lease.

        Args:
            seconds: Time limit.

        Raises:
            SandboxLost: It does not answer.
        """
        try:
            async with asyncio.timeout(seconds), self._pool.connection() as connection:
                await connection.send({"kind": "ping"})
                await connection.receive()
        except TimeoutError as error:
            raise SandboxLost(f"the sandbox {self.name} did not answer within {seconds:g} s") from error

    async def close(self) -> None:
        """Close the handle; the sandbox itself belongs to whoever leased it."""
        self._pool.close()
        while self._ports:
            await self._ports.pop().close()

    def _variables(self, given: Mapping[str, str] | None) -> dict[str, str]:
        return {**self.environment, **(given or {})}

    async def _operation(
        self, header: Header, take: Callable[[bytes], Any] | None = None, source: bytes | None = None
    ) -> Header:
        """Run an operation to its end.

        Args:
            take: Called with what comes from it.
            source: What goes into it; None: nothing does.

        Raises:
            OSError: It failed.
        """
        async with self._pool.connection() as connection:
            await connection.send(header)
            async with _sending(connection, source):
                while (frame := await connection.receive())[0]["kind"] == "output":
                    if take is not None:
                        take(frame[1])
        if "error" in frame[0]:
            raise _error_of(frame[0])
        if frame[0].get("unkept"):
            raise SandboxError(f"{header['kind']} {header.get('path', '')} was killed within the sandbox")
        return frame[0]


@contextlib.asynccontextmanager
async def _sending(connection: Connection, data: bytes | None) -> AsyncIterator[None]:
    """Send an operation's input while the block receives what comes from it."""
    if data is not None and len(data) <= 1 << 16:
        # As a rule there is little or none, which needs no task.
        await connection.send_input(data)
        await connection.send({"kind": "inputEnd"})
        yield
        return
    if data is None:
        yield
        return

    async def send() -> None:
        await connection.send_input(data)
        await connection.send({"kind": "inputEnd"})

    task = asyncio.create_task(send())
    try:
        yield
        # An operation may end before it has read all.
        if not task.done():
            task.cancel()
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()


def _exec_header(
    command: str | Sequence[str],
    timeout: float | None,
    user: str | None,
    workdir: str | None,
    environment: Mapping[str, str],
    merged: bool,
) -> Header:
    return {
        "kind": "exec",
        "argv": ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
        "timeout": timeout,
        "user": user,
        "workdir": workdir,
        "environment": dict(environment),
        "merged": merged,
    }


def _check_start(end: Header) -> None:
    if "error" in end:
        where = f": {end['path']}" if end.get("path") else ""
        raise CommandNotStarted(f"the command could not be started: {end['error']}{where}", end.get("errno") or 0)


def _completed(end: Header, kept: Mapping[str, bytearray], skipped: Mapping[str, int]) -> Completed:
    code = os.waitstatus_to_exitcode(end["status"])
    return Completed(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=bytes(kept.get("stdout", b"")),
        stderr=bytes(kept.get("stderr", b"")),
        skipped=(skipped.get("stdout", 0), skipped.get("stderr", 0)),
        timed_out=bool(end.get("late")),
        memory=(int(end.get("memory", 0)) << 10) or None,
    )


def _error_of(end: Header) -> Exception:
    number = end.get("errno")
    if number:
        return OSError(number, end["error"], *([end["path"]] if end.get("path") else []))
    return SandboxError(str(end["error"]))


def _packed(source: Path, only: Sequence[str] | None) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as to:
        if only is None:
            to.add(source, arcname=".")
        for name in only or ():
            to.add(source / name, arcname=f"./{name}", recursive=False)
    return archive.getvalue()


def _unpack(archive: bytes, target: Path) -> None:
    """Unpack what came out of a sandbox, where anybody may have made it."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given:
        members = given.getmembers()
        if len(members) == 1 and members[0].isfile():
            source = given.extractfile(members[0])
            assert source is not None
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
            return
        target.mkdir(parents=True, exist_ok=True)
        for member in members:
            try:
                check_within(member, str(target))
            except OSError:
                continue
            # Its owner is whoever unpacks it, and nobody gets rights by it.
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            member.mode = member.mode & 0o777 | (0o700 if member.isdir() else 0o600)
            given.extract(member, target, **as_it_is())
