"""Real `kuberoll run` processes, what they leave behind, and an endpoint for workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import GenerationRequest
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.without_torch import without_torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "models" / "tiny-policy"
COMMAND = [sys.executable, "-c", "from kuberoll_api.cli import main; main()"]
PATIENCE_SECONDS = 240.0


def manifest(path: Path, **spec: Any) -> Path:
    """A job of puzzles against the simulated engine; JSON is YAML."""
    document = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "test"},
        "spec": {
            "generation": {
                "model": {"source": str(TINY)},
                "engine": "Simulated",
                "simulated": {"responses": [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]},
            },
            "environments": [{"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 6}}],
            "dataset": {"source": {"generator": {"count": 8}}, "repeats": 4},
            **spec,
        },
    }
    path.write_text(json.dumps(document))
    return path


WAYS = [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]


class Endpoint:
    """The simulated engine behind the wire format, in this process; requests may be held up or refused.

    Attributes:
        requests: Ids of those answered.
        answers: Ids of the prompt and of the response of each.
        waiting: Sessions of those held up.
        released: Those held up are answered once it is set.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        """
        Args:
            seconds: That a response takes.
        """
        self.url = ""
        self.requests: list[str] = []
        self.answers: list[tuple[list[int], list[int]]] = []
        self.waiting: set[str] = set()
        self.released = asyncio.Event()
        self.holds: Callable[[GenerationRequest], bool] = lambda request: False
        self.refuses: Callable[[GenerationRequest], bool] = lambda request: False
        self._engine = Simulated(
            model="none",
            tokenizer=str(TINY),
            settings=SimulatedEngine.model_validate({"responses": WAYS, "firstTokenSeconds": seconds}),
            engine_args={"max_model_len": 512},
        )

    @asynccontextmanager
    async def serving(self, port: int = 0, *, host: str = "127.0.0.1") -> AsyncIterator[Endpoint]:
        await self._engine.start()
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/info", self._info)
        app.router.add_post("/v1/generate", self._generate)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        assert site._server is not None
        self.url = f"http://{host}:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(self._engine.info()))

    async def _generate(self, request: web.Request) -> web.Response:
        asked = wire.decode_request(await request.read(), wire.MSGPACK)
        if self.refuses(asked):
            return web.json_response({"error": {"type": "x", "message": "the engine is gone"}}, status=503)
        if self.holds(asked):
            self.waiting.add(asked.session_id)
            try:
                await self.released.wait()
            finally:
                self.waiting.discard(asked.session_id)
        self.requests.append(asked.request_id)
        result = await self._engine.generate(asked)
        self.answers.append((asked.token_ids.tolist(), result.token_ids.tolist()))
        return web.Response(body=wire.encode_result(result, wire.MSGPACK), content_type=wire.MSGPACK)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    """An endpoint of a test's own; who wants it imports it."""
    async with Endpoint().serving() as served:
        yield served


@contextmanager
def external_generation(seconds: float = 0.0, endpoint: Endpoint | None = None) -> Iterator[dict[str, Any]]:
    """`spec.generation` of a job whose engine somebody else keeps: an `Endpoint` in a thread of this process.

    For runs in which neither Ray nor its start and end are what is tested.
    """
    endpoint = endpoint or Endpoint(seconds)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(endpoint.serving()):
        yield {"backend": "External", "external": {"url": endpoint.url}, "model": {"source": str(TINY)}}


class Run:
    """A `kuberoll run` under way; its output is read as it comes."""

    def __init__(self, arguments: list[str], *, torch: bool, command: str = "run") -> None:
        """
        Args:
            command: `run` or `serve`.
            torch: Whether there is PyTorch, which vLLM needs.
        """
        self.process = subprocess.Popen(
            [*COMMAND, command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=dict(os.environ) if torch else without_torch(),
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (line := self._queue.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            self.lines.append(line)
            if (found := re.search(pattern, line)) is not None:
                return found
        raise AssertionError(f"the run ended without {pattern!r}:\n" + "\n".join(self.lines))

    def assert_runs(self) -> None:
        """Fail, with all that it has printed, where it has ended."""
        assert self.process.poll() is None, f"ended with {self.finish()}:\n" + "\n".join(self.lines)

    def printed(self) -> str:
        """Its output so far."""
        with contextlib.suppress(queue.Empty):
            while (line := self._queue.get_nowait()) is not None:
                self.lines.append(line)
        return "\n".join(self.lines)

    def finish(self) -> int:
        """Wait for its end; the exit code."""
        while (line := self._queue.get(timeout=PATIENCE_SECONDS)) is not None:
            self.lines.append(line)
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def run_id(self) -> str:
        """The id that all processes of the run carry; waits for the first that does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.assert_runs()
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if (run_id := child.environ().get(RUN_ID_VARIABLE)) is not None:
                        return run_id
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.05)
        raise AssertionError("no process of the run carries its id")


@contextmanager
def running(*arguments: str | Path, torch: bool = False, command: str = "run") -> Iterator[Run]:
    """Start a run; whatever is left of it at the end is killed, and its watchdog ends the rest."""
    run = Run([str(argument) for argument in arguments], torch=torch, command=command)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
        run.process.wait(timeout=PATIENCE_SECONDS)


def run_to_end(*arguments: str | Path, torch: bool = False) -> tuple[int, str]:
    """Exit code and output."""
    with running(*arguments, torch=torch) as run:
        code = run.finish()
        return code, "\n".join(run.lines)


def trajectories(output: Path) -> list[TrajectoryRecord]:
    """All stored trajectories, each line checked."""
    storage = DirectoryStorage(output)
    return [record for shard in storage.shards() for record in records.trajectories(storage, shard)]


def wait_for_trajectories(run: Run, output: Path, more_than: int) -> None:
    """Wait until more than so many trajectories are stored while the run goes on."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(shard.read_bytes().count(b"\n") for shard in output.glob("shard-*.jsonl")) <= more_than:
        run.assert_runs()
        assert time.monotonic() < deadline, run.printed()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=0.05)


def wait_for_metric(run: Run, url: str, name: str) -> None:
    """Wait until the run's metrics endpoint knows a metric."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while name not in urllib.request.urlopen(url, timeout=240).read().decode():
        run.assert_runs()
        assert time.monotonic() < deadline, run.printed()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=0.05)


def wait_until_none_is_left(run_id: str) -> None:
    """Wait until no process of a run lives; it must be soon."""
    from kuberoll_workers.local.watchdog import processes_of

    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := list(processes_of(run_id))) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=1)
    assert not left, [process.cmdline() for process in left]
