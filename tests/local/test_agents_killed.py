"""A run of agents that is killed in the middle of their episodes, and continued."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord, decode_line
from tests.local import gated_agents
from tests.local.support import (
    PATIENCE_SECONDS,
    Run,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_until_none_is_left,
)
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends
from tests.serving.test_openai_api import Scripted

HELD = ("2", "3")
"""Rows of each environment, of 6, whose agents are held at the gate; those before are complete then."""


class Gate:
    """Lets agents pass by the names of their rows.

    Attributes:
        waiting: Names of those held up.
        opened: Set to let all of them pass.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.opened = threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                if name.endswith(HELD):
                    gate.waiting.add(name)
                    gate.opened.wait()
                # The agent may have been killed.
                with contextlib.suppress(OSError):
                    self.send_response(204)
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self.opened.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@asynccontextmanager
async def policy(place: Path) -> AsyncIterator[str]:
    """A replica with sessions in this process, which outlives the run."""
    engine = Scripted(tokenizer=tokenizer_with_ends(place), window=1024)
    await engine.start()
    async with serving_openai(engine) as url:
        yield url
    await engine.shutdown()


def stored(output: Path) -> dict[TrajectoryKey, bytes]:
    """Lines of stored trajectories by their keys; a key with two lines fails."""
    lines = [line for shard in sorted(output.glob("shard-*.jsonl")) for line in shard.read_bytes().splitlines()]
    found = {decode_line(line, TrajectoryRecord, where="shard").key: line for line in lines}
    assert len(found) == len(lines)
    return found


def wait_for(run: Run, condition: Any) -> None:
    """Wait for a condition while the run goes on."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        run.assert_runs()
        assert time.monotonic() < deadline, run.printed()
        with contextlib.suppress(TimeoutExpired):
            run.process.wait(timeout=0.05)


@pytest.mark.long
def test_a_killed_run_of_agents_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was complete stays as it is; what was not starts over; nothing of the killed run is left."""
    model, notes, scratch = (tmp_path / name for name in ("model", "notes", "scratch"))
    for folder in (model, notes, scratch):
        folder.mkdir()
    # All temporary files of the runs, but what their own scratch directories have: those go with them.
    monkeypatch.setenv("TMPDIR", str(scratch))
    shutil.copy(gated_agents.__file__, tmp_path)
    gate = Gate()
    function: Any = {"entrypoint": "gated_agents:play"}
    program: Any = {"command": [sys.executable, str(tmp_path / "gated_agents.py")]}
    environments = [
        {
            "name": f"{isolation}-{kind}".lower(),
            "agent": agent,
            "isolation": isolation,
            "processes": 2,
            "config": {"gate": gate.url, "directory": str(notes)},
            "access": {"writablePaths": [str(notes)]} if isolation == "Process" else {},
        }
        for isolation in ("Inline", "Process")
        for kind, agent in (("function", function), ("program", program))
    ]
    names = [f"{item['name']}-{number}" for number in range(6) for item in environments]
    rows = [
        {"prompt": f"Go, {name}.", "task_name": name.rpartition("-")[0], "metadata": {"name": name}} for name in names
    ]
    output = tmp_path / "out"
    held = {name for name in names if name.endswith(HELD)}
    before = [name for name in names if name.endswith(("0", "1"))]
    with start_blocking_portal() as portal, gate.serving(), portal.wrap_async_context_manager(policy(model)) as url:
        job = manifest(
            tmp_path / "job.yaml",
            generation={"backend": "External", "external": {"url": url}, "model": {"source": str(model)}},
            environments=environments,
            dataset={"source": {"rows": rows}},
            # Those that are held leave no place for the others.
            rollout={"concurrency": len(held)},
        )
        with running(job, "--output", output, "--metrics-port", "0") as run:
            run_id = run.run_id()
            wait_for(run, lambda: gate.waiting == held and len(stored(output)) == len(before))
            below = psutil.Process(run.process.pid).children(recursive=True)
            agents = [psutil.Process(pid) for pid, name in episodes(notes) if name in held]
            places = [one.cwd() for one in agents if one.cmdline()[-1:] == program["command"][-1:]]
            assert len(places) == len(HELD) * 2
            run.process.kill()
            run.process.wait()
            _, left = psutil.wait_procs([*below, *agents], timeout=PATIENCE_SECONDS)
            assert not left, [one.cmdline() for one in left]
            wait_until_none_is_left(run_id)
        assert not any(Path(place).exists() for place in places)
        assert list(scratch.iterdir()) == []
        kept = stored(output)
        gate.opened.set()
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
        assert code == 0, text
    records = trajectories(output)
    assert len({record.key for record in records}) == len(records) == len(names)
    after = stored(output)
    assert {key: after[key] for key in kept} == kept
    assert {record.total_reward for record in records} == {1.0}
    began = Counter(name for _, name in episodes(notes))
    assert began == {name: 1 + (name in held) for name in names}
    assert list(scratch.iterdir()) == []


def episodes(notes: Path) -> list[tuple[int, str]]:
    """Processes of the episodes that began, and the names of their rows."""
    lines = (notes / "episodes").read_text().splitlines()
    return [(int(process), name) for process, name in (line.split("|") for line in lines)]
