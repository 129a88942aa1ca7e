"""Child processes that report in JSON lines on their standard output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

LINE_LIMIT = 1 << 20


class Child:
    """A Python module as a child process: reports are read from its standard output, standard error goes to its log.

    It runs in its own session, so that Ctrl-C at the terminal reaches only the parent. Its standard input is a pipe
    that closes when the parent ends.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str], reports: bool = True
    ) -> Self:
        """Start `python -m module` with additional environment variables.

        Args:
            reports: False for a program that reports nothing: its standard output goes to its log, too.
        """
        variables = {**os.environ, **environment}
        # Engines import thousands of modules. If none of them is ever compiled, each start takes a minute longer.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("ab") as words:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reports else words,
                stderr=words,
                env=variables,
                start_new_session=True,
                limit=LINE_LIMIT,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def reports(self) -> AsyncIterator[dict[str, Any]]:
        """Read the child's reports until it closes its output; other lines are skipped."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                report = msgspec.json.decode(line)
                if isinstance(report, dict):
                    yield report

    async def send_line(self, line: bytes) -> None:
        """Write a line to its standard input; does nothing if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def wait(self) -> int:
        """Wait until it ends; return the exit code."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it is still running."""
        # Not `send_signal`: it takes the exit code of a process that has just ended. From Python 3.12 on asyncio then
        # warns that it knows none, and says 255.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close_input(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, patience: float) -> None:
        """Send SIGTERM, and SIGKILL if it has not ended after `patience` seconds."""
        if self.returncode is None:
            self.signal(signal.SIGTERM)
            self.close_input()
            try:
                async with asyncio.timeout(patience):
                    await self.wait()
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self.wait()


def see_log(log: Path, lines: int = 5) -> str:
    """The end of an error message: a log's path, and its last lines if it can be read."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    return "\n".join([f"see {log}", *text.rstrip().splitlines()[-lines:]])
