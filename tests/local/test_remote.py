"""`kuberoll run` with environments on servers: one that it starts, and one that somebody else has started."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.environments import episodic
from tests.environments.episodic import events_in, unclosed
from tests.environments.remote.servers import ServerProcess
from tests.local.support import TINY, manifest, run_to_end, trajectories
from tests.policy.openai_serving import serving_openai

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


@contextmanager
def openai_policy(key: str) -> Iterator[str]:
    """Base URL of an OpenAI-compatible policy in a thread of this process, which needs a key."""

    @asynccontextmanager
    async def served() -> AsyncIterator[str]:
        settings = SimulatedEngine.model_validate({"responses": ["[[A=B]]"]})
        engine = Simulated(model="none", tokenizer=str(TINY), settings=settings, engine_args={"max_model_len": 2048})
        await engine.start()
        async with serving_openai(engine, key=key) as url:
            yield url

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(served()) as url:
        yield url


@pytest.mark.processes
def test_a_judge_on_a_server_of_its_own_asks_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_KEY", "key-of-the-policy")
    config = {"system": "", "prompt": "{first}\n{second}\n", "labels": {"[[A=B]]": 1.0, "[[A!=B]]": 0.0}}
    judge = {"name": "answers", "type": "judge", "isolation": "Remote", "stepTimeoutSeconds": 120, "config": config}
    rows = [{"prompt": f"task {number}", "metadata": {"ground_truth": "up"}} for number in range(4)]
    with openai_policy("key-of-the-policy") as url:
        generation = {
            "backend": "External",
            "external": {"url": url, "api": "OpenAI", "apiKeyVariable": "POLICY_KEY"},
            "model": {"source": str(TINY)},
        }
        job = manifest(
            tmp_path / "job.yaml", dataset={"source": {"rows": rows}}, environments=[judge], generation=generation
        )
        output = tmp_path / "out"
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
    assert code == 0, text
    records = trajectories(output)
    assert len(records) == 4
    for record in records:
        assert record.metadata is not None
        assert record.metadata["judge"]["verdict"] == "[[A=B]]"
        assert record.total_reward == 1.0
    stored = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert not [data for data in (*stored, text.encode()) if b"key-of-the-policy" in data]
