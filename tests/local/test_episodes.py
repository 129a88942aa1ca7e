"""Episodes of a run that is killed and resumed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from tests.environments import episodic
from tests.environments.episodic import events_in, unclosed
from tests.environments.remote.servers import ServerProcess
from tests.local import stubborn_mcp
from tests.local.support import (
    PATIENCE_SECONDS,
    Endpoint,
    Run,
    external_generation,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_trajectories,
    wait_until_none_is_left,
)
from tests.policy.openai_serving import tokenizer_with_ends

ROWS = [{"prompt": f"Find a way out of room {number}.\n"} for number in range(40)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["Rooms", *(pytest.param(name, marks=pytest.mark.long) for name in ("RestartedRooms", "PlainRooms"))]
)
def test_a_killed_run_closes_what_it_resumes(name: str, tmp_path: Path) -> None:
    shutil.copy(episodic.__file__, tmp_path / "episodic.py")
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = {
        "name": "rooms",
        "entrypoint": f"episodic:{name}",
        "config": {"directory": str(notes)},
        "isolation": "Process",
        "processes": 2,
        "access": {"writablePaths": [str(notes)]},
    }
    job = manifest(
        tmp_path / "job.yaml",
        dataset={"source": {"rows": ROWS}, "repeats": 2},
        environments=[environment],
        rollout={"concurrency": 8},
    )
    output = tmp_path / "out"
    with running(job, "--output", output, "--metrics-port", "0") as run:
        wait_for_trajectories(run, output, 20)
        below = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        psutil.wait_procs(below, timeout=60)
    before = events_in(notes)
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text

    records = trajectories(output)
    assert len({record.key for record in records}) == len(records) == 80
    seeds: dict[int, set[str]] = {}
    for record in records:
        assert record.turn_count == 3
        assert [message.content for message in record.messages if message.role == "environment"] == [
            "step 1",
            "step 2",
            "step 3",
        ]
        seeds.setdefault(record.task_index, set()).add(record.messages[1].content)
    assert all(len(rooms) == 1 for rooms in seeds.values())
    events = events_in(notes)
    if name == "PlainRooms":
        # The second run closes what it resumes without a reset, and resets again what had no complete turn.
        closed = [event.episode for event in events[len(before) :] if event.method == "close"]
        assert len(set(closed)) == len(closed)
        named = {f"{record.task_index}-{record.rollout_index}-0" for record in records}
        assert named == {event.episode for event in events if event.method == "close"}
    else:
        assert unclosed(events, dead=[event.process for event in before]) == []


@pytest.mark.processes
def test_a_run_goes_on_when_its_child_servers_are_killed(tmp_path: Path) -> None:
    """Episodes recover as their `recovery` says, and each trajectory ends once."""
    shutil.copy(episodic.__file__, tmp_path / "episodic.py")
    names = ("Rooms", "RestartedRooms", "PlainRooms")
    environments = []
    for name in names:
        (tmp_path / name).mkdir()
        environments.append(
            {
                "name": name,
                "entrypoint": f"episodic:{name}",
                "config": {"directory": str(tmp_path / name)},
                "isolation": "Remote",
                "access": {"writablePaths": [str(tmp_path / name)]},
            }
        )
    rows = [{"prompt": f"Find a way out of room {number}.\n", "task_name": names[number % 3]} for number in range(60)]
    dead: set[int] = set()
    output = tmp_path / "out"
    with external_generation(0.02) as generation:
        job = manifest(
            tmp_path / "job.yaml",
            dataset={"source": {"rows": rows}, "repeats": 2},
            environments=environments,
            generation=generation,
            rollout={"concurrency": 6},
        )
        with running(job, "--output", output, "--metrics-port", "0") as run:
            for stored in (5, 60):
                wait_for_trajectories(run, output, stored)
                servers = [one for one in psutil.Process(run.process.pid).children(recursive=True) if is_server(one)]
                assert servers
                for server in servers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        dead.update(one.pid for one in server.children(recursive=True))
                        server.kill()
            code = run.finish()
            assert code == 0, "\n".join(run.lines)
    records = trajectories(output)
    assert len({record.key for record in records}) == len(records) == 120
    for record in records:
        texts = [message.content for message in record.messages if message.role == "environment"]
        assert texts == ["step 1", "step 2", "step 3"]
    for name in ("Rooms", "RestartedRooms"):
        events = events_in(tmp_path / name)
        assert dead & {event.process for event in events}
        assert unclosed(events, dead=sorted(dead)) == []
    closed = {event.episode for event in events_in(tmp_path / "PlainRooms") if event.method == "close"}
    assert len(closed) == 40


def is_server(process: psutil.Process) -> bool:
    """True for the process that serves an environment: the child of its keeper, which has the same command."""
    with contextlib.suppress(psutil.Error):
        if process.cmdline()[-1:] != ["server"]:
            return False
        parent = process.parent()
        return parent is not None and parent.cmdline()[-1:] == ["server"]
    return False


@pytest.mark.processes
def test_a_server_that_outlives_its_worker_closes_what_the_worker_has_left(tmp_path: Path) -> None:
    """The resumed run takes up the episodes by their names; those that had ended expire."""
    server = ServerProcess(
        "tests.environments.episodic:RestartedRooms",
        *("--directory", str(tmp_path), "--idle-seconds", "8"),
        program=(sys.executable, "-m", "tests.environments.remote.expiring"),
    )
    rooms: dict[str, Any] = {"name": "rooms", "isolation": "Remote", "remote": {"url": server.url}}
    output = tmp_path / "out"
    try:
        server.ready()
        job = manifest(
            tmp_path / "job.yaml",
            dataset={"source": {"rows": ROWS}, "repeats": 2},
            environments=[rooms],
            rollout={"concurrency": 8},
        )
        with running(job, "--output", output, "--metrics-port", "0") as run:
            wait_for_trajectories(run, output, 20)
            workers = psutil.Process(run.process.pid).children(recursive=True)
            run.process.kill()
            run.finish()
            psutil.wait_procs(workers, timeout=60)
        assert unclosed(events_in(tmp_path)), "the run was not killed in the middle of its episodes"
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
        assert code == 0, text
        records = trajectories(output)
        assert len({record.key for record in records}) == len(records) == 80
        deadline = time.monotonic() + PATIENCE_SECONDS
        while open_now := unclosed(events_in(tmp_path)):
            assert time.monotonic() < deadline, open_now
            with contextlib.suppress(psutil.TimeoutExpired):
                psutil.Process(server.process.pid).wait(timeout=0.1)
    finally:
        server.close()


# Scores the second response: the first one leaves the episode open.
TWICE = """
from kuberoll_workers.environments import EnvironmentReturn


class Twice:
    def __init__(self, config):
        pass

    def step(self, logs, metadata):
        ends = [sum(message["role"] == "assistant" for message in log) == 2 for log in logs]
        observations = [{"role": "environment", "content": "."}] * len(ends)
        return EnvironmentReturn(observations, None, None, [1.0] * len(ends), ends)

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""


@pytest.mark.processes
def test_a_run_that_is_killed_as_a_whole_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not its children's servers, and servers that end neither with their input nor by SIGTERM."""
    for module in (episodic, stubborn_mcp):
        assert module.__file__ is not None
        shutil.copy(module.__file__, tmp_path)
    (tmp_path / "twice.py").write_text(TWICE)
    notes, model, scratch = tmp_path / "notes", tmp_path / "model", tmp_path / "scratch"
    for folder in (notes, model, scratch):
        folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    tokenizer_with_ends(model)
    server = {"command": sys.executable, "args": [str(tmp_path / "stubborn_mcp.py")]}
    tools = {"servers": {"shop": server}, "scorer": {"entrypoint": "twice:Twice"}}
    rooms: dict[str, Any] = {
        "entrypoint": "episodic:Rooms",
        "config": {"directory": str(notes)},
        "access": {"writablePaths": [str(notes)]},
    }
    environments: list[dict[str, Any]] = [
        {"name": "rooms", "isolation": "Remote", **rooms},
        *(
            {"name": f"{isolation.lower()}-tools", "type": "mcp", "config": tools, "isolation": isolation}
            for isolation in ("Inline", "Process", "Remote")
        ),
    ]
    for item in environments:
        item["stepTimeoutSeconds"] = 120
    rows = [{"prompt": "Go.\n", "task_name": item["name"]} for item in environments for _ in range(2)]
    endpoint = Endpoint()
    # All episodes are open then, and have taken a step.
    endpoint.holds = lambda request: int(request.request_id.split("-")[3]) == 2
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(endpoint.serving()):
        job = manifest(
            tmp_path / "job.yaml",
            dataset={"source": {"rows": rows}},
            environments=environments,
            generation={"backend": "External", "external": {"url": endpoint.url}, "model": {"source": str(model)}},
            rollout={"concurrency": len(rows)},
        )
        with running(job, "--output", tmp_path / "out", "--metrics-port", "0") as run:
            run_id = run.run_id()
            wait_until_waiting(run, endpoint, len(rows))
            below = psutil.Process(run.process.pid).children(recursive=True)
            stubborn = [one for one in below if one.cmdline()[-1:] == server["args"]]
            assert len(stubborn) == 6
            # Those of the worker itself are the watchdog's, the others their keepers'.
            assert [one.environ().get(RUN_ID_VARIABLE) for one in stubborn].count(run_id) == 2
            assert len([one for one in below if is_server(one)]) == 2
            run.process.kill()
            run.process.wait()
            # Its watchdog is one of them.
            _, left = psutil.wait_procs(below, timeout=PATIENCE_SECONDS)
            assert not left, [one.cmdline() for one in left]
            wait_until_none_is_left(run_id)
    assert list(scratch.iterdir()) == []


def wait_until_waiting(run: Run, endpoint: Endpoint, count: int) -> None:
    """Wait until so many requests are held up."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(endpoint.waiting) < count:
        run.assert_runs()
        assert " failed" not in run.printed()
        assert time.monotonic() < deadline, run.printed()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=0.05)
