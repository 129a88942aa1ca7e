"""Certificates that a job demands: `kuberoll apply` ships them, and worker pods refuse rows without good ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kuberoll_api.manifest.loading import load_job
from kuberoll_operator.commands.apply import apply
from kuberoll_workers.commands.certify import certify
from kuberoll_workers.dataset.certificates import Certificate, graders_of, place_of, row_digest, rows_of
from kuberoll_workers.output.run_files import RunFiles
from tests.local.support import TINY, Endpoint, endpoint
from tests.pods.support import pod

__all__ = ["endpoint"]

pytestmark = pytest.mark.slow

MODULE = "kuberoll_workers.pods.worker"
CERTIFICATES = "rows.jsonl.certificates.jsonl"
TEMPLATE = "{% for tool in tools or [] %}{{ tool }}{% endfor %}{% for one in messages %}{{ one.content }}{% endfor %}"
OWN = """
from kuberoll_workers.environments import EnvironmentReturn

class Own:
    def __init__(self, config):
        pass

    def step(self, logs, metadata):
        rewards = [float(log[-1]["content"].strip() == state["truth"]) for log, state in zip(logs, metadata)]
        count = len(rewards)
        observations = [{"role": "environment", "content": ""}] * count
        return EnvironmentReturn(observations, metadata, None, rewards, [True] * count)

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def solution(self, episode):
        return [episode.metadata["solution"]]
"""


def row(number: int, *, solution: str = "") -> dict[str, Any]:
    truth = f"word{number}"
    metadata = {"truth": truth, "solution": solution or truth}
    return {"task_name": "own", "prompt": f"Word number {number}?", "metadata": metadata}


def write(directory: Path, rows: Sequence[dict[str, Any]], *, demand: dict[str, Any] | None = None) -> Path:
    """A job, its rows and its environment, as somebody has them beside each other."""
    directory.mkdir(exist_ok=True)
    write_rows(directory, rows)
    (directory / "words.py").write_text(OWN)
    spec = {
        "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
        "environments": [{"name": "own", "entrypoint": "words:Own"}],
        "dataset": {"source": {"uri": "rows.jsonl"}, "certify": demand or {"mode": "Require"}},
        "output": {"uri": "s3://runs/words"},
    }
    job = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "words"}, "spec": spec}
    with (directory / "job.yaml").open("w") as out:
        YAML().dump(job, out)
    return directory / "job.yaml"


def write_rows(directory: Path, rows: Sequence[dict[str, Any]]) -> None:
    (directory / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def shipped(manifest: Path, mount: Path) -> dict[str, Any]:
    """Apply a job, and mount what it ships, as a pod does; the job that the cluster has."""
    result = CliRunner().invoke(apply, [str(manifest), "--print"])
    assert result.exit_code == 0, result.output
    files, job = YAML(typ="safe").load_all(result.stdout)
    mount.mkdir()
    for item in job["spec"]["workers"]["files"]["configMap"]["items"]:
        path = mount / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files["data"][item["key"]])
    return dict(job)


async def played(
    job: dict[str, Any], mount: Path, endpoint: Endpoint, *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Run a worker's pod to its end: its exit code, termination message and log."""
    config = {
        "job": job,
        "endpoint": endpoint.url,
        "port": 8000,
        "shard_count": 1,
        "output": str(mount.parent / "output"),
        "turns": None,
        "base": str(mount),
        "modules": str(mount),
    }
    shard = None if arguments else 0
    async with pod(MODULE, config, mount.parent / "pods", shard=shard, arguments=arguments) as started:
        return await started.end(), started.message(), started.log


async def certified(manifest: Path) -> int:
    """Certify rows as the command does; its exit code."""
    return (await asyncio.to_thread(CliRunner().invoke, certify, [str(manifest), "--repetitions", "5"])).exit_code


async def test_certificates_travel_and_are_good_in_the_pod(tmp_path: Path, endpoint: Endpoint) -> None:
    manifest = write(tmp_path / "own", [row(1), row(2)])
    assert await certified(manifest) == 0
    job = shipped(manifest, tmp_path / "mount")
    assert (tmp_path / "mount" / CERTIFICATES).is_file()
    code, message, log = await played(job, tmp_path / "mount", endpoint)
    assert (code, message["done"]) == (0, True), log
    assert "of 2 rows 2 are certified" in log
    assert len(list(RunFiles(str(tmp_path / "output")).trajectories())) == 2


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("missing", "rows.jsonl:1: it has no certificate"),
        ("row", "rows.jsonl:2: the row has changed since"),
        ("code", "rows.jsonl:1: the grader's code has changed since"),
        ("failing", "rows.jsonl:2: never passes: the solution gets 0 of 1"),
        ("fewer", "rows.jsonl:1: each answer was graded only 5 times"),
    ],
)
async def test_rows_without_a_good_certificate_are_refused(
    case: str, said: str, tmp_path: Path, endpoint: Endpoint
) -> None:
    demand = {"mode": "Require", **({"repetitions": 6} if case == "fewer" else {})}
    wrong = "another" if case == "failing" else ""
    manifest = write(tmp_path / "own", [row(1), row(2, solution=wrong)], demand=demand)
    if case != "missing":
        assert await certified(manifest) == (1 if case == "failing" else 0)
    if case == "row":
        write_rows(tmp_path / "own", [row(1), row(2) | {"prompt": "Another question?"}])
    if case == "code":
        (tmp_path / "own/words.py").write_text(OWN.replace(".strip()", ".strip().lower()"))
    job = shipped(manifest, tmp_path / "mount")
    for arguments in ([], ["--check"]):
        code, message, log = await played(job, tmp_path / "mount", endpoint, *arguments)
        assert code == 78, log
        assert said in message["cause"]
        assert "Traceback" not in log
    # What is not refused is played all the same where that is only a warning.
    job["spec"]["dataset"]["certify"]["mode"] = "Warn"
    code, message, log = await played(job, tmp_path / "mount", endpoint)
    assert (code, message["trajectories"]) == (0, 2), log
    assert said in log


async def test_a_task_whose_tests_have_changed_since_is_refused(tmp_path: Path, endpoint: Endpoint) -> None:
    manifest = write(tmp_path / "own", [])
    texts = {"instruction.md": "Say hello.", "tests/test.sh": "echo 0 > /logs/verifier/reward.txt", "files/a.txt": "a"}
    for name, text in texts.items():
        file = tmp_path / "own/tasks/hello" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    job = YAML(typ="safe").load(manifest.read_text())
    job["spec"]["environments"] = [{"name": "own", "agent": {"tools": {}}, "sandbox": {"network": {"mode": "None"}}}]
    job["spec"]["generation"] |= {"toolCallParser": "hermes"}
    job["spec"]["generation"]["model"]["chatTemplate"] = TEMPLATE
    job["spec"]["dataset"]["source"] = {"uri": "tasks"}
    with manifest.open("w") as out:
        YAML().dump(job, out)
    found = load_job(manifest, ())
    [one] = rows_of(found, base=tmp_path / "own", environment=lambda name: pytest.fail(name))
    grader = graders_of(found, {})["own"]
    certificate = Certificate(
        row=row_digest(one, tmp_path / "own"),
        where=place_of(one, tmp_path / "own"),
        environment="own",
        code=grader.code,
        config=grader.config,
        verdict="certified",
        repetitions=5,
        date="2026-01-01T00:00:00+00:00",
    )
    (tmp_path / "own/tasks.certificates.jsonl").write_bytes(msgspec.json.encode(certificate))
    for mount, changed in (("mount", None), ("stale", "tests/test.sh"), ("staler", "files/a.txt")):
        if changed is not None:
            (tmp_path / "own/tasks/hello" / changed).write_text("changed")
        job = shipped(manifest, tmp_path / mount)
        code, message, log = await played(job, tmp_path / mount, endpoint, "--check")
        assert code == (0 if changed is None else 78), log
        assert ("hello/instruction.md:1: the row has changed since" in message["cause"]) == (changed is not None)
