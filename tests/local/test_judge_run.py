"""A run whose own policy judges its responses, with the real engine; and who gets the token for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_workers.data.record import TrajectoryRecord
from tests.local.support import TINY, run_to_end, trajectories

pytestmark = pytest.mark.engine

# What an environment with isolation Process or Remote can do with what it is given; a module beside the manifest.
LOOKING = """
import json
import os
import urllib.error
import urllib.request

from kuberoll_workers.environments import EnvironmentReturn


def status(method, path, body=None):
    url = os.environ["KUBEROLL_POLICY_URL"].removesuffix("/v1") + path
    headers = {"authorization": "Bearer " + os.environ["KUBEROLL_POLICY_TOKEN"], "content-type": "application/json"}
    request = urllib.request.Request(url, method=method, headers=headers, data=body and json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


class Looking:
    def __init__(self, config):
        self.config = config

    def step(self, logs, metadata):
        found = {"variables": sorted(name for name in os.environ if name.startswith("KUBEROLL"))}
        if self.config.get("asks"):
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            found |= {
                "chat": status("POST", "/v1/chat/completions", chat),
                "weights": status("POST", "/v1/weights", {"uri": "/tmp/none", "version": "9"}),
            }
        size = len(logs)
        empty = [{"role": "environment", "content": ""}] * size
        return EnvironmentReturn(empty, [found] * size, None, [0.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""

CHOICES = ["[[A=B]]", "[[A!=B]]"]


def judge(name: str, **changes: Any) -> dict[str, Any]:
    config = {
        "system": "",
        "prompt": "{first}\n{second}\n",
        "labels": dict(zip(CHOICES, (1.0, 0.0), strict=True)),
        "swap": True,
        "maxTokens": 16,
        # The engine samples no other token than those of a verdict.
        "request": {"structured_outputs": {"choice": CHOICES}},
    }
    return {"name": name, "type": "judge", "config": config, "stepTimeoutSeconds": 300, **changes}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    directory = tmp_path_factory.mktemp("judged")
    (directory / "looking.py").write_text(LOOKING)
    looking = {"entrypoint": "looking:Looking", "isolation": "Process", "stepTimeoutSeconds": 120}
    remote = {"isolation": "Remote"}
    environments = [
        judge("inline"),
        judge("process", isolation="Process"),
        judge("remote", isolation="Remote"),
        {"name": "asking", **looking, "config": {"asks": True}, "access": {"policy": True}},
        {"name": "other", **looking},
        {"name": "asking-remote", **looking, **remote, "config": {"asks": True}, "access": {"policy": True}},
        {"name": "other-remote", **looking, **remote},
    ]
    rows = [
        {"prompt": f"task {number}", "task_name": item["name"], "metadata": {"ground_truth": "up"}}
        for item in environments
        for number in range(2)
    ]
    job = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "judged"},
        "spec": {
            "generation": {
                "model": {"source": str(TINY)},
                "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
                "sampling": {"maxTokens": 6, "temperature": 1.0, "seed": 1},
            },
            "environments": environments,
            "dataset": {"source": {"rows": rows}, "repeats": 2},
            "rollout": {"maxTurns": 1},
        },
    }
    (directory / "job.json").write_text(json.dumps(job))
    code, text = run_to_end(directory / "job.json", "--output", directory / "out", "--metrics-port", "0", torch=True)
    assert code == 0, text
    return trajectories(directory / "out")


def states(stored: list[TrajectoryRecord], name: str) -> list[dict[str, Any]]:
    found = [record.metadata or {} for record in stored if record.task_name == name]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("name", ["inline", "process", "remote"])
def test_the_policy_judges_its_own_responses(stored: list[TrajectoryRecord], name: str) -> None:
    judged = 0
    for record in stored:
        if record.task_name != name:
            continue
        assert record.metadata is not None
        kept = record.metadata["judge"]
        if kept["verdict"] == "empty":
            continue
        judged += 1
        verdicts = [call["verdict"] for call in kept["calls"]]
        # Structured outputs leave nothing else to write.
        assert [call["text"] for call in kept["calls"]] == verdicts
        assert len(verdicts) == 2
        assert set(verdicts) <= set(CHOICES)
        agreed = verdicts[0] == verdicts[1]
        assert kept["verdict"] == (verdicts[0] if agreed else "disagreement")
        assert record.total_reward == float(agreed and verdicts[0] == CHOICES[0])
    assert judged


@pytest.mark.parametrize("isolation", ["", "-remote"])
def test_only_who_asks_gets_a_token_and_it_can_only_generate(stored: list[TrajectoryRecord], isolation: str) -> None:
    for state in states(stored, f"asking{isolation}"):
        assert state == {
            "variables": ["KUBEROLL_POLICY_TOKEN", "KUBEROLL_POLICY_URL"], "chat": 200, "weights": 403,
        }  # fmt: skip
    for state in states(stored, f"other{isolation}"):
        assert state == {"variables": []}
