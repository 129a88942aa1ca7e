"""`kuberoll run` with environments on servers: one that it starts, and one that somebody else has started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.environments import episodic
from tests.environments.episodic import events_in, unclosed
from tests.environments.remote.servers import ServerProcess
from tests.local.support import manifest, run_to_end, trajectories

ROWS = [{"task_name": name, "prompt": "Find a way.\n"} for name in ("own", "other") for _ in range(6)]


@pytest.mark.processes
def test_a_run_with_servers_of_its_own_and_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(episodic.__file__, tmp_path / "episodic.py")
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    token = tmp_path / "token"
    secret = "token-of-the-rooms"
    token.write_text(f"{secret}\n")
    server = ServerProcess(
        "tests.environments.episodic:RestartedRooms",
        *("--config", json.dumps({"directory": str(other)}), "--writable", str(other), "--token-file", str(token)),
    )
    try:
        server.ready()
        job = manifest(
            tmp_path / "job.yaml",
            dataset={"source": {"rows": ROWS}},
            environments=[
                {
                    "name": "own",
                    "entrypoint": "episodic:Rooms",
                    "config": {"directory": str(own)},
                    "isolation": "Remote",
                    "access": {"writablePaths": [str(own)]},
                },
                {
                    "name": "other",
                    "isolation": "Remote",
                    "remote": {"url": server.url, "apiKeyVariable": "ROOMS_TOKEN"},
                },
            ],
        )
        output = tmp_path / "out"
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
        assert code != 0
        assert "answered 401: the Authorization header must be" in text
        assert not output.exists()
        monkeypatch.setenv("ROOMS_TOKEN", f"{secret}-of-others")
        code, refused = run_to_end(job, "--output", output, "--metrics-port", "0")
        assert code != 0
        monkeypatch.setenv("ROOMS_TOKEN", secret)
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
        assert code == 0, text
    finally:
        printed = server.close()
    stored = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert not [
        data for data in (*stored, text.encode(), refused.encode(), printed.encode()) if secret.encode() in data
    ]
    records = trajectories(output)
    assert [record.turn_count for record in records] == [3] * 12
    assert unclosed(events_in(own)) == []
    assert unclosed(events_in(other)) == []
    # The server is not this run's to shut down.
    assert [event.method for event in events_in(own)].count("shutdown") == 1
    assert "shutdown" not in {event.method for event in events_in(other)}
    # Names of episodes tell runs on one server apart.
    assert all("." in event.episode for event in events_in(other) if event.episode)
    assert set(json.loads((output / "manifest.json").read_text())["code"]) == {"own", "other"}
