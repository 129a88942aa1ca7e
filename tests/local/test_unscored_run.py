"""A run whose judge is out, with the program itself: what it says, and the command that scores what is stored."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from tests.environments.judge_server import Judge, equality, serving
from tests.local.support import COMMAND, manifest

ROWS = [{"prompt": f"Say {word}.", "metadata": {"ground_truth": word}} for word in ("up", "down")]


def refuse(_: str) -> web.Response:
    return web.Response(status=503, text="overloaded")


async def kuberoll(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process, while this one's event loop serves the judge."""
    return await asyncio.to_thread(
        subprocess.run, [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def shards(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("shard-*.jsonl"))}


@pytest.mark.slow
async def test_what_a_run_left_unscored_is_scored_in_it(tmp_path: Path) -> None:
    judge = Judge(answer=lambda prompt: refuse(prompt) if "down" in prompt else equality(prompt))
    async with serving(judge) as url:
        spec: dict[str, Any] = {
            "environments": [{"name": "answers", "type": "judge", "config": {"url": url, "attempts": 1}}],
            "dataset": {"source": {"rows": ROWS}, "repeats": 4},
            "generation": {
                "model": {"source": "../tiny"},
                "engine": "Simulated",
                "simulated": {"responses": ["up", "down", "left", "right"]},
            },
            "rollout": {"retries": {"environmentAttempts": 2, "backoffSeconds": 0.01}},
        }
        (tmp_path / "tiny").symlink_to(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")
        (tmp_path / "job").mkdir()
        job = str(manifest(tmp_path / "job" / "job.yaml", **spec))
        ran = await kuberoll("run", job, "--output", "run", cwd=tmp_path)
        assert ran.returncode == 1, ran.stdout + ran.stderr
        run = tmp_path / "run"
        left = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
        keys = {(line["task_index"], line["rollout_index"]) for line in left}
        said = f"{len(keys)} of them only lack a score: kuberoll rescore run --failed --manifest JOB.yaml, or --resume"
        assert said in ran.stdout + ran.stderr
        assert json.loads((run / "aggregate_metrics.json").read_bytes())["unscored"] == len(keys)
        task, rollout = min(keys)
        why = await kuberoll("why", "run", f"{task}/{rollout}", cwd=tmp_path)
        assert "has no score yet after 1 turn" in why.stdout
        assert "nothing is generated again" in why.stdout

        # With the judge still out nothing changes.
        before, failures = shards(run), (run / "failures.jsonl").read_bytes()
        again = await kuberoll("rescore", "run", "--failed", "--manifest", job, cwd=tmp_path)
        assert again.returncode == 1
        assert f"answers: {len(keys)} left unscored" in again.stdout
        assert "overloaded" in again.stdout
        assert (shards(run), (run / "failures.jsonl").read_bytes()) == (before, failures)

        judge.answer = equality
        refused = await kuberoll("rescore", "run", "--failed", "--manifest", job, "--output", "other", cwd=tmp_path)
        assert refused.returncode == 2
        scored = await kuberoll("rescore", "run", "--failed", "--manifest", job, cwd=tmp_path)
        assert scored.returncode == 0, scored.stdout + scored.stderr
        assert f"answers: {len(keys)} scored, mean reward" in scored.stdout
        nothing = await kuberoll("rescore", "run", "--failed", "--manifest", job, cwd=tmp_path)
        assert (nothing.returncode, nothing.stdout) == (0, "nothing is unscored\n")
    # What was stored before is there, byte for byte, and each trajectory once.
    after = shards(run)
    assert all(after[name].startswith(lines) for name, lines in before.items())
    storage = DirectoryStorage(run)
    found = [record for shard in storage.shards() for record in records.trajectories(storage, shard)]
    assert sorted(tuple(record.key) for record in found) == [(task, number) for task in range(2) for number in range(4)]
    texts = {tuple(record.key): record.messages[1] for record in found}
    for line in left:
        kept = texts[line["task_index"], line["rollout_index"]]
        assert (kept.content, list(kept.token_ids)) == (
            line["messages"][1]["content"],
            line["messages"][1]["token_ids"],
        )
    aggregates = json.loads((run / "aggregate_metrics.json").read_bytes())
    assert (aggregates["trajectories"], aggregates["failed"], aggregates["unscored"]) == (8, 0, 0)


@pytest.mark.slow
async def test_what_the_policy_has_to_go_on_with_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "out-2").touch()
    spec: dict[str, Any] = {
        "environments": [
            {
                "name": "rooms",
                "entrypoint": "tests.rollouts.outages:Rooms",
                "config": {"directory": str(tmp_path)},
                "access": {"readablePaths": [str(tmp_path)]},
            }
        ],
        "dataset": {"source": {"rows": [{"prompt": "Go.", "metadata": {}}]}, "repeats": 2},
        "rollout": {"maxTurns": 4, "retries": {"environmentAttempts": 1, "backoffSeconds": 0.01}},
    }
    root = Path(__file__).parents[2]
    job = str(manifest(tmp_path / "job.yaml", **spec))
    output = str(tmp_path / "run")
    ran = await kuberoll("run", job, "--output", output, cwd=root)
    assert "2 of them only lack a score" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    (tmp_path / "out-2").unlink()
    failures = (tmp_path / "run" / "failures.jsonl").read_bytes()
    scored = await kuberoll("rescore", output, "--failed", "--manifest", job, cwd=root)
    assert scored.returncode == 1
    assert scored.stdout == "rooms: 2 have to go on with the policy: resume the run\n", scored.stderr
    assert (tmp_path / "run" / "failures.jsonl").read_bytes() == failures
    resumed = await kuberoll("run", job, "--output", output, "--resume", cwd=root)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
