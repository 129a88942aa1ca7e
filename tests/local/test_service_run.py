"""A run with a service: vLLM's own server beside the policy, which environments ask by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import TrajectoryRecord
from tests.classifier import ENGINE_ARGS, VARIABLES, logits, make_classifier
from tests.local.support import TINY, run_to_end, trajectories

pytestmark = pytest.mark.engine

RESPONSES = ["4", "The answer is 4, I think.", "<action>up</action>"]

# What environments with isolation Process get; a module beside the manifest.
LOOKING = """
import os
import urllib.error
import urllib.request

from kuberoll_workers.environments import EnvironmentReturn, service_endpoint


def status(headers):
    url = os.environ["KUBEROLL_SERVICE_THE_GRADER_URL"] + "/models"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


class Looking:
    def __init__(self, config):
        self.config = config

    def step(self, logs, metadata):
        found = {"variables": sorted(name for name in os.environ if name.startswith("KUBEROLL"))}
        if self.config.get("asks"):
            token = service_endpoint("the-grader").token
            found |= {"with": status({"authorization": f"Bearer {token}"}), "without": status({})}
        size = len(logs)
        empty = [{"role": "environment", "content": ""}] * size
        return EnvironmentReturn(empty, [found] * size, None, [0.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("reward-model"))


def job(directory: Path, model: Path, **engine_args: Any) -> Path:
    looking = {"entrypoint": "looking:Looking", "isolation": "Process", "stepTimeoutSeconds": 120}
    scoring = {"type": "reward_model", "config": {"service": "the-grader"}, "stepTimeoutSeconds": 300}
    environments = [
        {"name": "inline", **scoring},
        {"name": "process", **scoring, "isolation": "Process"},
        {"name": "asking", **looking, "config": {"asks": True}, "access": {"services": ["the-grader"]}},
        {"name": "other", **looking},
    ]
    (directory / "looking.py").write_text(LOOKING)
    document = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "graded"},
        "spec": {
            "generation": {
                "model": {"source": str(TINY)}, "engine": "Simulated", "simulated": {"responses": RESPONSES},
            },
            "services": [
                {
                    "name": "the-grader",
                    "model": {"source": str(model)},
                    "engineArgs": {**ENGINE_ARGS, **engine_args},
                    "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
                }
            ],
            "environments": environments,
            "dataset": {
                "source": {
                    "rows": [
                        {"prompt": f"task {number}", "task_name": item["name"]}
                        for item in environments
                        for number in range(2)
                    ]
                },
                "repeats": 3,
            },
            "rollout": {"maxTurns": 1},
        },
    }  # fmt: skip
    (directory / "job.json").write_text(json.dumps(document))
    return directory / "job.json"


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    directory = tmp_path_factory.mktemp("graded")
    manifest = job(directory, model)
    code, text = run_to_end(manifest, "--output", directory / "out", "--metrics-port", "0", torch=True)
    assert code == 0, text
    assert "service the-grader" in text
    return trajectories(directory / "out")


@pytest.mark.parametrize("name", ["inline", "process"])
def test_scores_are_those_of_transformers(stored: list[TrajectoryRecord], model: Path, name: str) -> None:
    mine = [record for record in stored if record.task_name == name]
    assert len(mine) == 6
    # The prompt and the response; an empty observation ends the trajectory.
    chats = [[{"role": item.role, "content": item.content} for item in record.messages[:2]] for record in mine]
    assert [record.total_reward for record in mine] == pytest.approx(logits(model, chats), abs=1e-4)
    kept = [(record.metadata or {})["reward_model"] for record in mine]
    assert kept == [{"score": record.total_reward, "model": str(model)} for record in mine]
    assert len({round(record.total_reward, 3) for record in mine}) > 1


def test_only_who_asks_gets_the_key(stored: list[TrajectoryRecord]) -> None:
    (asking,) = {json.dumps(record.metadata, sort_keys=True) for record in stored if record.task_name == "asking"}
    assert json.loads(asking) == {
        "variables": ["KUBEROLL_SERVICE_THE_GRADER_TOKEN", "KUBEROLL_SERVICE_THE_GRADER_URL"],
        "with": 200,
        "without": 401,
    }
    assert all(record.metadata == {"variables": []} for record in stored if record.task_name == "other")


def test_a_service_that_does_not_start_fails_the_run(model: Path, tmp_path: Path) -> None:
    manifest = job(tmp_path, model, no_such_argument=1)
    code, text = run_to_end(manifest, "--output", tmp_path / "out", "--metrics-port", "0", torch=True)
    assert code == 1
    assert "the service the-grader ended unexpectedly (exit code 2); see " in text
    assert "no-such-argument" in text
