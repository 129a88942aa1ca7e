"""A worker's run of its shards: what is stored, where, and how a run that was interrupted goes on."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments import UnusableEnvironment
from kuberoll_workers.output.records import dropped as read_dropped
from kuberoll_workers.output.records import failures as read_failures
from kuberoll_workers.output.records import shard_name
from kuberoll_workers.output.records import trajectories as read_trajectories
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.scheduling import TrajectoriesMissing
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import environments_policy, isolated_environment_factory
from kuberoll_workers.worker.run import run_worker
from kuberoll_workers.worker.settings import count_abandoned
from tests.local.support import TINY, Endpoint, endpoint
from tests.rollouts.fakes import until

__all__ = ["endpoint"]


def job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "test"},
        "spec": {
            "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
            "environments": [
                {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "shuffleMoves": 6, "maxMoves": 6}}
            ],
            "dataset": {"source": {"generator": {"count": 6}}, "repeats": 3},
            **spec,
        },
    }


def job_turns(document: dict[str, Any]) -> bool:
    return bool(document["spec"].get("rollout", {}).get("journalTurns", True))


async def run(
    endpoint: Endpoint,
    output: Path,
    document: dict[str, Any],
    *,
    shards: int = 2,
    metrics: RolloutMetrics | None = None,
    blocks: tuple[str, ...] | None = None,
) -> Progress:
    progress = Progress()
    RolloutJob.model_validate(document)
    config = WorkerConfig(
        job=RolloutJob.model_validate(document),
        base="/",
        tokenizer=str(TINY),
        endpoint=endpoint.url,
        max_model_len=512,
        output=str(output),
        turns=str(output) if job_turns(document) else None,
        shards=list(range(shards)),
        shard_count=shards,
        planned=18,
        blocks=None if blocks is None else list(blocks),
    )
    await run_worker(config, metrics=metrics or RolloutMetrics("test"), drain=Drain(), progress=progress)
    return progress


def stored(output: Path, shards: int = 2) -> dict[Any, TrajectoryRecord]:
    records = [
        record for shard in range(shards) for record in read_trajectories(DirectoryStorage(output), shard_name(shard))
    ]
    found = {record.key: record for record in records}
    assert len(found) == len(records)
    return found


def contents(records: dict[Any, TrajectoryRecord]) -> dict[Any, Any]:
    return {
        key: ([(m.role, list(m.token_ids), m.turn) for m in record.messages], record.rewards, record.stop_reason)
        for key, record in records.items()
    }


def turns_of(endpoint: Endpoint) -> list[int]:
    return [int(request.split("-")[3]) for request in endpoint.requests]


@pytest.fixture
def outputs(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "interrupted"


@pytest.mark.parametrize("scheduling", ["Concurrent", "Lockstep"])
async def test_interrupted_trajectories_go_on_after_their_last_turn(
    endpoint: Endpoint, outputs: tuple[Path, Path], scheduling: str
) -> None:
    whole, interrupted = outputs
    document = job(rollout={"scheduling": scheduling, "concurrency": 18})
    await run(endpoint, whole, document)
    expected = contents(stored(whole))
    requests = len(endpoint.requests)

    endpoint.requests.clear()
    endpoint.holds = lambda request: request.request_id.split("-")[3] == "3"
    running = asyncio.create_task(run(endpoint, interrupted, document))
    long = sum(len(messages) > 1 + 2 * 2 for messages, *_ in expected.values())
    assert long > 3
    await until(lambda: len(endpoint.waiting) == long)
    running.cancel()
    await asyncio.wait((running,))
    # What nobody wants any more is aborted, not left to itself.
    await until(lambda: not endpoint.waiting)
    assert max(turns_of(endpoint)) == 2
    before = len(endpoint.requests)

    endpoint.holds = lambda request: False
    await run(endpoint, interrupted, document)
    assert contents(stored(interrupted)) == expected
    # Nothing was generated twice.
    assert len(endpoint.requests) == requests
    assert min(turns_of(endpoint)[before:]) == 3
    assert not (interrupted / "turns").exists()


async def test_metrics_say_how_far_it_has_come(endpoint: Endpoint, outputs: tuple[Path, Path]) -> None:
    _, interrupted = outputs
    document = job(rollout={"concurrency": 18})
    endpoint.holds = lambda request: request.request_id.split("-")[0] == "1"
    metrics = [RolloutMetrics("test") for _ in range(2)]

    def come(number: int) -> list[float | None]:
        metrics[number].flush()
        return [
            metrics[number].registry.get_sample_value(f"kuberoll_trajectories_{name}", {"rolloutjob": "test"})
            for name in ("planned", "stored", "abandoned")
        ]

    running = asyncio.create_task(run(endpoint, interrupted, document, metrics=metrics[0]))
    # All but the three of task 1.
    await until(lambda: come(0) == [18, 15, 0])
    running.cancel()
    await asyncio.wait((running,))

    endpoint.holds = lambda request: False
    await run(endpoint, interrupted, document, metrics=metrics[1])
    assert come(1) == [18, 18, 0]
    labels = {"rolloutjob": "test", "environment": "puzzle"}
    assert metrics[1].registry.get_sample_value("kuberoll_environment_timeout_seconds", labels) == 30


@pytest.mark.parametrize(
    ("groups", "expected"),
    [({}, 5), ({"wanted": 3}, 2), ({"wanted": 3, "atomic": True}, 0), ({"dropEqualRewards": True}, 5)],
)
def test_what_is_replaced_is_not_abandoned(groups: dict[str, Any], expected: int) -> None:
    document = RolloutJob.model_validate(job(rollout={"groups": groups}))
    assert count_abandoned(document, failed=2, filtered=3) == expected


async def test_without_the_turn_log_they_start_over(endpoint: Endpoint, outputs: tuple[Path, Path]) -> None:
    _, interrupted = outputs
    document = job(rollout={"journalTurns": False, "concurrency": 18})
    endpoint.holds = lambda request: request.request_id.split("-")[3] == "2"
    running = asyncio.create_task(run(endpoint, interrupted, document))
    await until(lambda: len(endpoint.waiting) > 10)
    running.cancel()
    await asyncio.wait((running,))
    assert not (interrupted / "turns").exists()
    endpoint.holds = lambda request: False
    done = len(stored(interrupted))
    endpoint.requests.clear()
    await run(endpoint, interrupted, document)
    assert turns_of(endpoint).count(1) == 18 - done


async def test_what_the_machines_failed_goes_on_and_has_a_new_attempt(
    endpoint: Endpoint, outputs: tuple[Path, Path]
) -> None:
    _, output = outputs
    document = job(rollout={"retries": {"generationAttempts": 1}, "concurrency": 18})
    endpoint.refuses = lambda request: request.request_id.split("-")[3] == "3"
    await run(endpoint, output, document)
    failures = list(read_failures(DirectoryStorage(output)))
    assert {(failure.kind, failure.turn_count) for failure in failures} == {("infrastructure", 2)}
    endpoint.refuses = lambda request: False
    endpoint.requests.clear()
    await run(endpoint, output, document)
    assert min(turns_of(endpoint)) == 3
    records = stored(output)
    assert len(records) == 18
    assert {records[failure.key].attempt for failure in failures} == {1}


async def test_a_deadline_ends_a_turn_and_its_request(endpoint: Endpoint, outputs: tuple[Path, Path]) -> None:
    _, output = outputs
    document = job(rollout={"timeouts": {"turnSeconds": 3}})
    endpoint.holds = lambda request: request.session_id == "0-0-0"
    progress = await run(endpoint, output, document)
    (failure,) = read_failures(DirectoryStorage(output))
    assert failure.cause == "the turn took longer than rollout.timeouts.turnSeconds (3 s)"
    assert (progress.trajectories, progress.failed) == (17, 1)
    await until(lambda: not endpoint.waiting)


async def test_oversampled_groups(endpoint: Endpoint, outputs: tuple[Path, Path]) -> None:
    _, output = outputs
    document = job(rollout={"groups": {"oversample": 2}, "concurrency": 30})
    endpoint.holds = lambda request: request.session_id.split("-")[1] == "1"
    progress = await run(endpoint, output, document)
    records = stored(output)
    assert len(records) == 18
    assert all(key.rollout_index != 1 for key in records)
    dropped = list(read_dropped(DirectoryStorage(output)))
    assert len(dropped) == progress.dropped == 12
    assert {record.reason for record in dropped} == {"oversampled"}
    assert not (output / "turns").exists()
    # A run that is complete has nothing to do.
    endpoint.requests.clear()
    again = await run(endpoint, output, document)
    assert (again.resumed, again.trajectories, endpoint.requests) == (18, 0, [])


async def test_groups_of_equal_rewards_are_replaced_until_enough_are_kept(
    endpoint: Endpoint, outputs: tuple[Path, Path]
) -> None:
    whole, output = outputs
    groups = {"dropEqualRewards": True, "wanted": 5}
    document = job(
        rollout={"groups": groups, "concurrency": 12},
        dataset={"source": {"generator": {"count": 60}}, "repeats": 4},
    )
    await run(endpoint, whole, document)
    expected = contents(stored(whole))
    tasks = {key.task_index for key in expected}
    assert len(tasks) == 5
    assert all(len({sum(expected[key][1]) for key in expected if key.task_index == task}) > 1 for task in tasks)
    assert {record.reason for record in read_dropped(DirectoryStorage(whole))} == {"filtered"}

    # Stopped half-way and continued, it comes to the same groups.
    endpoint.requests.clear()
    stop_after = 60
    endpoint.holds = lambda request: len(endpoint.requests) > stop_after
    running = asyncio.create_task(run(endpoint, output, document))
    await until(lambda: len(endpoint.waiting) == 12)
    running.cancel()
    await asyncio.wait((running,))
    assert len(stored(output)) < 20
    endpoint.holds = lambda request: False
    await run(endpoint, output, document)
    assert contents(stored(output)) == expected
    assert not (output / "turns").exists()


async def test_atomic_groups_are_stored_whole(endpoint: Endpoint, outputs: tuple[Path, Path]) -> None:
    _, output = outputs
    document = job(rollout={"groups": {"atomic": True}, "retries": {"generationAttempts": 1}})
    endpoint.refuses = lambda request: request.session_id == "2-1-0"
    await run(endpoint, output, document)
    assert {key.task_index for key in stored(output)} == {0, 1, 3, 4, 5}
    failures = {record.key: record for record in read_failures(DirectoryStorage(output))}
    assert {(key.task_index, key.rollout_index, record.stage) for key, record in failures.items()} == {
        (2, 0, "group"),
        (2, 1, "generation"),
        (2, 2, "group"),
    }
    endpoint.refuses = lambda request: False
    endpoint.requests.clear()
    await run(endpoint, output, document)
    assert len(stored(output)) == 18


@pytest.mark.parametrize("format", ["JSONL", "Parquet"])
async def test_a_line_that_cannot_be_read_is_set_aside_and_played_again(
    endpoint: Endpoint, outputs: tuple[Path, Path], format: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, output = outputs
    await run(endpoint, output, job())
    expected = contents(stored(output))
    # As older versions wrote a reward that float32 cannot hold.
    path = output / "shard-00001.jsonl"
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    unreadable = re.sub(rb'"total_reward":[0-9.]+', b'"total_reward":null', second)
    path.write_bytes(b"".join([first, unreadable, *others]))
    assert len(stored(output)) == 17

    progress = await run(endpoint, output, job(output={"format": format}))
    assert (progress.resumed, progress.trajectories) == (17, 1)
    assert contents(stored(output)) == expected
    assert caplog.text.count(f"{path}:2: not a TrajectoryRecord: Expected `float`, got `null`") == 1
    # Nothing is thrown away.
    kept = path if format == "JSONL" else output / "unreadable-00001.jsonl"
    assert unreadable in kept.read_bytes().splitlines(keepends=True)
    assert path.exists() == (format == "JSONL")
    assert (await run(endpoint, output, job(output={"format": format}))).trajectories == 0


async def test_a_worker_that_lost_a_trajectory_does_not_say_that_it_is_done(
    endpoint: Endpoint, outputs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, output = outputs
    monkeypatch.setattr(ResultStore, "_done", lambda *_, **__: None)
    with pytest.raises(TrajectoriesMissing, match="18 trajectories ended, but only 0 of them are stored"):
        await run(endpoint, output, job())


async def test_rows_that_were_changed_after_the_check_are_not_run(
    endpoint: Endpoint, outputs: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"

    def write(*names: str) -> None:
        state = {"board": [[1, 2], [3, 0]], "moves": 0}
        rows.write_text("".join(json.dumps({"prompt": name, "metadata": state}) + "\n" for name in names))

    document = job(dataset={"source": {"uri": str(rows)}, "repeats": 1})
    write("a", "b")
    made = RolloutJob.model_validate(document)
    blocks = scan(made, base=tmp_path, environment=isolated_environment_factory(made, protected=())).blocks
    write("a", "c")
    with pytest.raises(DatasetError, match=r"rows 1 to 2 .*rows\.jsonl:1 to .*rows\.jsonl:2. differ"):
        await run(endpoint, outputs[0], document, blocks=blocks)
    assert endpoint.requests == []
    assert stored(outputs[0]) == {}


def _config(endpoint: str | None, document: dict[str, Any]) -> WorkerConfig:
    return WorkerConfig(
        job=RolloutJob.model_validate(document),
        base="/",
        tokenizer=str(TINY),
        endpoint=endpoint,
        max_model_len=512,
        output="/out",
        turns=None,
        shards=[0],
        shard_count=1,
        token="generate-only",
    )


def test_environments_that_use_the_policy_get_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"name": "judge", "type": "judge"}
    rows = {"source": {"rows": [{"prompt": "x", "metadata": {"answer": "y"}}]}}
    asking = job(environments=[judge], dataset=rows)
    assert environments_policy(_config("http://policy:8000", job())) is None
    policy = environments_policy(_config("http://policy:8000", asking))
    assert policy is not None
    assert (policy.url, policy.token) == ("http://policy:8000", "generate-only")
    with pytest.raises(
        UnusableEnvironment, match="environment 'judge': it uses the policy's endpoint, but this worker"
    ):
        environments_policy(_config(None, asking))

    external = {"backend": "External", "external": {"url": "http://far/v1", "apiKeyVariable": "FAR_KEY"}}
    elsewhere = job(environments=[judge], dataset=rows, generation={"model": {"source": str(TINY)}, **external})
    monkeypatch.setenv("FAR_KEY", "far-key")
    policy = environments_policy(_config("http://far/v1", elsewhere))
    assert policy is not None
    # The job's own key for that server, not a token of KubeRoll.
    assert (policy.url, policy.token) == ("http://far/v1", "far-key")
