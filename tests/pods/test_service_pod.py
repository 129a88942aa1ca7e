"""Pods of services: vLLM's own server behind a key, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.contract import EXIT_REFUSED, SERVICE_PORT
from tests.classifier import ENGINE_ARGS, VARIABLES, logits, make_classifier
from tests.pods.support import pod

MODULE = "kuberoll_workers.pods.service"
KEY = "a-key-of-a-test"
CHAT = [{"role": "user", "content": "Solve: 2 + 2"}, {"role": "assistant", "content": "4"}]


def config(model: str) -> dict[str, Any]:
    return {
        "job": {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "graded"},
            "spec": {
                "generation": {"model": {"source": "org/model"}},
                "services": [{"name": "grader", "model": {"source": model}, "engineArgs": dict(ENGINE_ARGS)}],
                "environments": [{"name": "helpful", "type": "reward_model", "config": {"service": "grader"}}],
                "dataset": {"source": {"uri": "rows.jsonl"}},
            },
        },
        "base": "/tmp",
        "endpoint": "http://policy:8000",
        "shard_count": 1,
        "output": "/tmp/out",
    }


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        ("other", KEY, "there is no service 'other'"),
        ("grader", "", "the variable VLLM_API_KEY is not set"),
        ("grader", KEY, "model.source: there is no /no/such/model in this pod: mount a volume there"),
    ],
)
async def test_what_cannot_be_served_is_refused(name: str, key: str, says: str, tmp_path: Path) -> None:
    arguments = ("--service", name)
    async with pod(MODULE, config("/no/such/model"), tmp_path, arguments=arguments, VLLM_API_KEY=key) as service:
        assert await service.end() == EXIT_REFUSED
        assert says in service.text()


def asked(url: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


@pytest.mark.engine
@pytest.mark.long
async def test_a_model_is_served_behind_its_key(tmp_path: Path) -> None:
    model = make_classifier(tmp_path / "model")
    # The library that other pods must do without.
    variables: dict[str, Any] = {**VARIABLES, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "VLLM_API_KEY": KEY}
    async with pod(MODULE, config(str(model)), tmp_path, arguments=("--service", "grader"), **variables) as service:
        try:
            await service.until_answers("/health", lambda status, _: status == 200, port=SERVICE_PORT)
            url = f"http://{service.ip}:{SERVICE_PORT}"
            assert asked(f"{url}/v1/models")[0] == 401
            status, models = asked(f"{url}/v1/models", key=KEY)
            assert (status, [item["id"] for item in models["data"]]) == (200, [str(model)])
            body = {"model": str(model), "messages": CHAT, "add_generation_prompt": False, "use_activation": False}
            # As docs/how-to/served-models.md says: vLLM asks for the key below /v1 alone.
            status, scores = asked(f"{url}/classify", body)
            assert status == 200
            assert scores["data"][0]["probs"] == pytest.approx(logits(model, [CHAT]), abs=1e-4)
        finally:
            if service.process.returncode is None:
                service.signal(signal.SIGTERM)
            await service.end()
