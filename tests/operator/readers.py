"""Real readers as processes of this machine, over connections that can be cut and bent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kuberoll_operator.console.execution import StreamLost
from kuberoll_operator.console.reader import Reader

Bend = Callable[[bytes], bytes]


class ProcessStream:
    """The standard streams of a reader's process, as a container's come through an API server."""

    def __init__(self, process: asyncio.subprocess.Process, *, cut_after: int | None, bend: Bend) -> None:
        self._process, self._bend = process, bend
        self._left = cut_after

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        try:
            await self._process.stdin.drain()
        except OSError as error:
            raise StreamLost(str(error)) from error

    async def receive(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        if self._left is not None and self._left <= 0:
            raise StreamLost("the test cut the connection")
        async with asyncio.timeout(seconds):
            data = await self._process.stdout.read(self._left or 1 << 16)
        if not data:
            assert self._process.stderr is not None
            stderr = (await self._process.stderr.read()).decode()
            raise StreamLost("ended", exit_code=await self._process.wait(), stderr=stderr)
        if self._left is not None:
            self._left -= len(data)
        return self._bend(data)


class Readers:
    """Readers of one output, a new process for each connection.

    Attributes:
        cut_after: Bytes after which connections are cut, one entry each; then no more are.
        bend: Changes what is received.
        connections: How many there were.
    """

    def __init__(self, output: Path | str, directory: Path) -> None:
        self._config = directory / "job.json"
        told = {"job": {}, "base": "/unused", "endpoint": "http://unused", "shard_count": 1, "output": str(output)}
        self._config.write_text(json.dumps(told))
        self.cut_after: list[int] = []
        self.bend: Bend = lambda data: data
        self.connections = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Reader]:
        """One conversation."""
        self.connections += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kuberoll_workers.pods.reader", "--config", str(self._config), "--serve"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            cut = self.cut_after.pop(0) if self.cut_after else None
            reader = Reader(ProcessStream(process, cut_after=cut, bend=self.bend))
            await reader.greet()
            yield reader
        finally:
            if process.returncode is None:
                process.kill()
            # Its pipes are read to their end, or its end would not be noticed.
            await process.communicate()
