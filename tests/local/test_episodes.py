"""Episodes of a run that is killed and resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.environments import episodic
from tests.environments.episodic import events_in, unclosed
from tests.local.support import manifest, run_to_end, running, trajectories, wait_for_trajectories

ROWS = [{"prompt": f"Find a way out of room {number}.\n"} for number in range(40)]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["Rooms", "RestartedRooms", "PlainRooms"])
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
