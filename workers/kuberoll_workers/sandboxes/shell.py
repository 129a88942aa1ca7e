"""A shell that goes on from one command to the next: its directory, variables and background jobs stay."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from kuberoll_workers.sandboxes.errors import CommandNotStarted, SandboxError
from kuberoll_workers.sandboxes.guest.frames import Header
from kuberoll_workers.sandboxes.guest.operations import Outputs
from kuberoll_workers.sandboxes.handle import Process, Sandbox

_PATIENCE: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult:
    """What a command in a shell has done.

    Attributes:
        output: What it wrote to its standard output and error, as text; of more than the limit beginning and end.
        exit_code: Its exit code; None if it has none.
        timed_out: True if it was killed because its time was over.
        ended: True if the shell has ended with it: the next command has a new one.
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    ended: bool = False


class Shell:
    """A shell in a sandbox."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        user: str | None = None,
        workdir: str | None = None,
        environment: Mapping[str, str] | None = None,
        output_characters: int = 30_000,
    ) -> None:
        """
        Args:
            output_characters: Characters that are kept of what one command writes.
        """
        self._sandbox = sandbox
        self._user = user
        self._workdir = workdir
        self._environment = dict(environment or {})
        self._limit = output_characters
        self._program: str | None = None
        self._stack: contextlib.AsyncExitStack | None = None
        self._process: Process | None = None
        self._chunks: AsyncIterator[tuple[str, bytes]] | None = None

    async def run(self, command: str, *, timeout: float) -> ShellResult:
        """Run a command.

        Args:
            timeout: Time limit in seconds. After it the command ends, and the shell with it, with all that it started.

        Raises:
            SandboxLost: The sandbox is gone.
            CommandNotStarted: The sandbox has no shell.
        """
        await self._started()
        assert self._process is not None
        mark = secrets.token_hex(16)
        # In the shell itself, so that what it changes stays; the mark is written whatever the command has done.
        text = f"{_evaluated(command)}\nprintf '\\n%s %s\\n' {mark} $?\n"
        output = _Kept(self._limit)
        try:
            async with asyncio.timeout(timeout):
                sending = asyncio.ensure_future(self._process.write(text.encode("utf-8", "surrogateescape")))
                try:
                    code = await self._read(mark.encode(), output)
                finally:
                    sending.cancel()
                    await asyncio.wait((sending,))
        except TimeoutError:
            await self.close()
            return ShellResult(output=output.text(), exit_code=None, timed_out=True, ended=True)
        except BaseException:
            await self.close()
            raise
        if code is None:
            ended = await self._ended()
            return ShellResult(output=output.text(), exit_code=ended, ended=True)
        return ShellResult(output=output.text(), exit_code=code)

    async def close(self) -> None:
        """End the shell, with all that it has started."""
        stack, self._stack, self._process, self._chunks = self._stack, None, None, None
        if stack is not None:
            with contextlib.suppress(SandboxError):
                await stack.aclose()

    async def _started(self) -> None:
        if self._process is not None:
            return
        if self._program is None:
            self._program = await self._find()
        self._stack = contextlib.AsyncExitStack()
        arguments = ("--noprofile", "--norc") if self._program.endswith("bash") else ()
        self._process = await self._stack.enter_async_context(
            self._sandbox.start(
                [self._program, *arguments],
                user=self._user,
                workdir=self._workdir,
                environment=self._environment,
                merged=True,
            )
        )
        self._chunks = aiter(self._process)

    async def _find(self) -> str:
        """The shell of the sandbox: bash if it has it."""
        for program in ("/bin/bash", "/usr/bin/bash", "/bin/sh"):
            try:
                found = await self._sandbox.exec([program, "-c", ":"], user=self._user, timeout=_PATIENCE)
            except CommandNotStarted:
                continue
            if found.succeeded:
                return program
        raise CommandNotStarted("the sandbox has no /bin/bash and no /bin/sh")

    async def _read(self, mark: bytes, output: _Kept) -> int | None:
        """Read a command's output until the mark; returns the exit code, None if the shell has ended."""
        assert self._chunks is not None
        pending = b""
        try:
            async for _, data in self._chunks:
                pending += data
                before, found, after = pending.partition(b"\n" + mark + b" ")
                if found and b"\n" in after:
                    pending = before
                    return int(after.split(b"\n", 1)[0])
                # The mark may be cut in two.
                passed = len(before) if found else max(0, len(pending) - len(mark) - 2)
                output.take(pending[:passed])
                pending = pending[passed:]
        finally:
            output.take(pending)
        return None

    async def _ended(self) -> int | None:
        assert self._process is not None
        process = self._process
        try:
            return (await process.wait()).exit_code
        finally:
            await self.close()


class _Kept:
    """Beginning and end of an output, as text."""

    def __init__(self, limit: int) -> None:
        self._parts: list[tuple[int, bytes]] = []

        def keep(header: Header, data: bytes) -> None:
            self._parts.append((header.get("skipped", 0), data))

        self._outputs = Outputs("stdout", limit, keep)
        self.take = self._outputs.take

    def text(self) -> str:
        self._outputs.end()
        text = b"".join(
            f"\n[{skipped} bytes are left out here]\n".encode() if skipped else data for skipped, data in self._parts
        )
        return text.decode(errors="replace")


def _evaluated(command: str) -> str:
    """The command as an argument of `eval`: an error of its syntax is its own, and it cannot read what comes next."""
    quoted = command.replace("'", "'\\''")
    return f"eval '{quoted}' </dev/null"
