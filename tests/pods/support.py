"""Pods as processes on this machine, each with an address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kuberoll_api.contract import PROGRESS_PORT
from tests.without_torch import without_torch

PATIENCE_SECONDS = 240.0

_addresses = itertools.count(random.randrange(1 << 20))


def address() -> str:
    """An address of this machine that no other pod has, of this test session or another."""
    number = next(_addresses)
    return f"127.{16 + number // 65025 % 224}.{1 + number // 255 % 255}.{1 + number % 254}"


class Pod:
    """A pod's process.

    Attributes:
        ip: Where it answers.
    """

    def __init__(self, process: asyncio.subprocess.Process, *, ip: str, message: Path, log: Path) -> None:
        self.process = process
        self.ip = ip
        self._message = message
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def message(self) -> dict[str, Any]:
        """Its termination message."""
        return dict(json.loads(self._message.read_bytes()))

    def text(self) -> str:
        """Its termination message, where that is a sentence."""
        return self._message.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> int:
        """Wait for its end; the exit code."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()

    async def get(self, path: str, *, port: int = PROGRESS_PORT) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        return await asyncio.to_thread(self._get, f"http://{self.ip}:{port}{path}")

    def _get(self, url: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has happened while the pod runs."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await self._moment()

    async def until_answers(self, path: str, fits: Callable[[int, str], bool], *, port: int = PROGRESS_PORT) -> str:
        """Wait for an answer that fits; its body."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                status, body = await self.get(path, port=port)
                if fits(status, body):
                    return body
                await self._moment()

    async def _moment(self) -> None:
        assert self.process.returncode is None, self.log
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await self.process.wait()


def prepared(place: Path, ip: str, config: dict[str, Any]) -> tuple[Path, Path, Path]:
    """Files of a pod: its configuration, its termination message to be, its log."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{ip}.json"
    path.write_text(json.dumps(config))
    return path, place / f"{ip}.message", place / f"{ip}.log"


@asynccontextmanager
async def pod(
    module: str,
    config: dict[str, Any],
    place: Path,
    *,
    shard: int | None = None,
    arguments: Sequence[str] = (),
    **variables: str,
) -> AsyncIterator[Pod]:
    """Run a pod's module; it is ended at the end."""
    ip = variables.pop("POD_IP", None) or address()
    path, message, log = prepared(place, ip, config)
    environment = {**without_torch(), "POD_IP": ip, "KUBEROLL_TERMINATION_LOG": str(message), **variables}
    if shard is not None:
        environment.setdefault("JOB_COMPLETION_INDEX", str(shard))
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--config", str(path), *arguments),
            stdout=words,
            stderr=words,
            env=environment,
        )
    try:
        yield Pod(process, ip=ip, message=message, log=log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
