"""Servers of environments as processes that tests kill, stop and start again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from kuberoll_workers.serving.ray_settings import free_ports

KUBEROLL = [sys.executable, "-c", "from kuberoll_api.cli import main; main()"]
SERVE = (*KUBEROLL, "env", "serve")


class ServerProcess:
    """`kuberoll env serve`, or another program, at one port; it may be killed and started again."""

    def __init__(
        self, target: str, *options: str, program: Sequence[str] = SERVE, variables: dict[str, str] | None = None
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*program, target, "--port", str(self.port), *options]
        self._variables = {**os.environ, **(variables or {})}
        self.process: subprocess.Popen[str] = self._started()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the server alone."""
        self.process.send_signal(number)

    def restart(self) -> None:
        """Kill it and start it again at the same port, without waiting until it answers."""
        self.kill()
        self.process.communicate()
        self.process = self._started()

    def ready(self) -> None:
        """Wait until it answers."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.url in line, line + self.process.communicate()[0]

    def close(self) -> str:
        """End it, and return what it has printed."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.communicate()[0]

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._variables,
            cwd=Path(__file__).parents[3],
        )


def rooms(name: str, directory: Path, *options: str) -> ServerProcess:
    """A server of an environment of `tests.environments.episodic`."""
    config = json.dumps({"directory": str(directory)})
    return ServerProcess(
        f"tests.environments.episodic:{name}", "--config", config, "--writable", str(directory), *options
    )


async def post(
    url: str, path: str, body: Any, *, token: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and body of an answer: JSON, or the text of an error."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    shown = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(headers={**shown, **(headers or {})}) as session,
        session.post(f"{url}{path}", data=data) as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def get(url: str, path: str, *, token: str | None = None) -> tuple[int, Any]:
    shown = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=shown) as session, session.get(f"{url}{path}") as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def gather(*waits: Any) -> Sequence[Any]:
    return await asyncio.gather(*waits)
