"""The end of a run: what is written beside its shards, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import AnyRecord, encode_line
from kuberoll_workers.data.tracebacks import Frame
from kuberoll_workers.output.journal import write_atomically
from kuberoll_workers.output.run_directory import AGGREGATES, MANIFEST, new_manifest
from kuberoll_workers.output.storage import Storage, open_storage
from tests.output.s3 import S3Server, s3, s3_server
from tests.output.support import dropped, failure, record
from tests.pods.support import Pod, pod

__all__ = ["s3", "s3_server"]

MODULE = "kuberoll_workers.pods.finish"


def job(**rollout: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "test"},
        "spec": {
            "generation": {"model": {"source": "m"}, "engine": "Simulated"},
            "environments": [{"name": "env", "type": "sliding_puzzle"}],
            "dataset": {"source": {"uri": "not-looked-at.jsonl"}, "repeats": 2},
            "rollout": rollout,
        },
    }


def config(output: str, document: Mapping[str, Any]) -> dict[str, Any]:
    return {"job": document, "endpoint": "http://unused", "shard_count": 2, "output": output, "base": "/unused"}


def write_manifest(storage: Storage, document: Mapping[str, Any], planned: int) -> None:
    inputs = {"rows": planned // 2, "trajectories": planned, "digest": "d"}
    manifest = new_manifest(RolloutJob.model_validate(document), shards=2, inputs=inputs)
    storage.write(MANIFEST, orjson.dumps(manifest))


def lines(items: Sequence[AnyRecord]) -> bytes:
    return b"".join(encode_line(item) for item in items)


def files(output: str) -> set[str]:
    return {path.rpartition("/")[2] for path in open_storage(output).files()}


async def finished(place: Path, told: dict[str, Any], code: int = 0) -> Pod:
    async with pod(MODULE, told, place) as started:
        assert await started.end() == code, started.log
        return started


async def test_a_directory(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    document = job(groups={"oversample": 1})
    write_manifest(open_storage(str(output)), document, planned=6)
    failed_once = failure(0, 1, attempt=0)
    write_atomically(output / "shard-00000.jsonl", lines([record(0), record(0, 1, attempt=1), record(2)]))
    write_atomically(output / "shard-00001.jsonl", lines([record(1, total_reward=0.0), record(1, 1)]))
    write_atomically(output / "failures.jsonl", lines([failed_once, failure(2, 1)]))
    write_atomically(output / "dropped.jsonl", lines([dropped(1, 2)]))
    ended = await finished(tmp_path, config(str(output), document))
    message = ended.message()
    assert message == {
        "trajectories": 5,
        "failed": 1,
        "dropped": 1,
        "planned": 6,
        "missing": 0,
        "mean_reward": pytest.approx(0.8),
        "environments": {
            "env": {
                "trajectories": 5,
                "failed": 1,
                "mean_reward": pytest.approx(0.8),
                "pass_at_1": message["environments"]["env"]["pass_at_1"],
            }
        },
        "environments_left_out": 0,
        "failure": "1 of them: gone (infrastructure)",
        "cause": "",
    }
    assert 0 < message["environments"]["env"]["pass_at_1"] < 100
    assert {AGGREGATES, "report.html", "task_metrics.jsonl"} <= files(str(output))
    assert json.loads((output / AGGREGATES).read_bytes())["trajectories"] == 5
    assert all(isinstance(json.loads(line), dict) for line in ended.log.splitlines())


async def test_the_log_says_what_biases_the_trajectories_that_are_kept(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    write_manifest(open_storage(str(output)), job(), planned=24)
    cut = [failure(task, 1, kind="operator", reason="TrajectoryDeadline", turn_count=6) for task in range(12)]
    write_atomically(output / "shard-00000.jsonl", lines([record(task) for task in range(12)]))
    write_atomically(output / "failures.jsonl", lines(cut))
    ended = await finished(tmp_path, config(str(output), job()))
    assert "environment env: 12 of 24 trajectories were removed, and longer ones more often" in ended.log


async def test_the_most_frequent_cause_names_the_line_of_code(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    write_manifest(open_storage(str(output)), job(), planned=4)
    code = {
        "kind": "environment",
        "stage": "environment",
        "frames": [Frame("/code/envs/guess.py", 18, "grade", "x" * 900)],
        "row": "a.jsonl:7",
    }
    errors = [failure(1, number, cause=f"step raised KeyError: 'answer {number}'", **code) for number in range(2)]
    write_atomically(output / "shard-00000.jsonl", lines([record(0)]))
    write_atomically(output / "failures.jsonl", lines([failure(0, 1), *errors]))
    message = (await finished(tmp_path, config(str(output), job()))).message()
    assert message["failure"] == (
        "2 of them: step raised KeyError: 'answer 0' (environment; envs/guess.py:18 in grade; row a.jsonl:7)"
    )


async def test_an_object_store_is_tidied_up(tmp_path: Path, s3: tuple[S3Server, str]) -> None:
    output = f"{s3[1]}/run"
    storage = open_storage(output)
    write_manifest(storage, job(), planned=4)
    storage.write("shard-00000.jsonl", lines([record(0), record(0, 1)]))
    storage.write("shard-00001.jsonl", lines([record(1)]))
    storage.write("failures/worker-00000-00000001.jsonl", lines([failure(0, attempt=0)]))
    storage.write("failures/worker-00001-00000001.jsonl", lines([failure(1, 1)]))
    message = (await finished(tmp_path, config(output, job()))).message()
    assert (message["trajectories"], message["failed"], message["missing"], message["cause"]) == (3, 1, 0, "")
    assert {"failures.jsonl", AGGREGATES, "report.html"} <= files(output)
    assert len(list(open_storage(output).lines("failures"))) == 2
    # Done again, it comes to the same.
    assert (await finished(tmp_path, config(output, job()))).message() == message


async def test_a_run_with_trajectories_missing_is_no_success_but_has_its_numbers(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    write_manifest(open_storage(str(output)), job(), planned=4)
    write_atomically(output / "shard-00000.jsonl", lines([record(0), record(0, 1)]))
    message = (await finished(tmp_path, config(str(output), job()), code=78)).message()
    assert message["cause"] == "2 of 4 trajectories are missing: 2 finished, 0 failed, 0 dropped"
    assert (message["trajectories"], message["missing"]) == (2, 2)
    assert AGGREGATES in files(str(output))


async def test_groups_that_were_filtered_out_are_replaced_where_a_number_is_wanted(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    document = job(groups={"dropEqualRewards": True, "wanted": 2})
    write_manifest(open_storage(str(output)), document, planned=100)
    filtered = [dropped(2, index, reason="filtered", stop_reason="terminated") for index in (0, 1)]
    write_atomically(output / "shard-00000.jsonl", lines([record(0), record(0, 1)]))
    write_atomically(output / "dropped.jsonl", lines(filtered))
    message = (await finished(tmp_path, config(str(output), document), code=78)).message()
    assert (message["planned"], message["missing"], message["dropped"]) == (4, 2, 2)
    assert "rollout.groups.wanted asks for 2 groups" in message["cause"]
    write_atomically(output / "shard-00001.jsonl", lines([record(1), record(1, 1)]))
    assert (await finished(tmp_path, config(str(output), document))).message()["missing"] == 0


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "give the output directory of a run"),
        (b'{"task_index": 1}\n', f"has no {MANIFEST}"),
    ],
)
async def test_what_is_no_run_is_refused(tmp_path: Path, contents: bytes | None, said: str) -> None:
    output = tmp_path / "output"
    output.mkdir()
    if contents is not None:
        write_atomically(output / "shard-00000.jsonl", contents)
    ended = await finished(tmp_path, config(str(output), job()), code=78)
    assert said in ended.message()["cause"]
    assert "traceback" not in ended.log


async def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    write_manifest(open_storage(str(output)), job(), planned=2)
    write_atomically(output / "shard-00000.jsonl", b'{"task_index": 1}\n')
    ended = await finished(tmp_path, config(str(output), job()), code=78)
    assert "2 of 2 trajectories are missing" in ended.message()["cause"]
    assert ended.log.count("shard-00000.jsonl:1: not a TrajectoryRecord") == 1
