"""A reward model behind `vllm serve`: its scores are those of transformers for the same chats."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.services import ModelService
from kuberoll_workers.environments.builtin.reward_model import RewardModelEnvironment
from kuberoll_workers.serving.ray_settings import free_ports
from kuberoll_workers.serving.vllm_server import KEY_VARIABLE, serve_arguments
from tests.classifier import ENGINE_ARGS, VARIABLES, logits, make_classifier

# A run asks one for the same scores in tests/local/test_service_run.py.
pytestmark = [pytest.mark.engine, pytest.mark.long]

START_SECONDS = 300.0
KEY = "a-key-of-a-test"
# The prompt, and responses of one letter, of a sentence, of special tokens, and with thoughts.
PROMPT = [{"role": "user", "content": "Solve: 2 + 2"}]
RESPONSES = ["4", "The answer is 4, I think.", "<action>up</action>", "<think>two and two</think>4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("log") / "server.log"
    engine_args = {**ENGINE_ARGS, "served_model_name": "rewards"}
    service = ModelService.model_validate(
        {"name": "rewards", "model": {"source": str(model)}, "engineArgs": engine_args}
    )
    arguments = serve_arguments(service, host="127.0.0.1", port=port)
    command = [sys.executable, "-m", "kuberoll_workers.serving.vllm_server", *arguments]
    environment = {**os.environ, **VARIABLES, KEY_VARIABLE: KEY}
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=0.25)
            assert server.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


async def rewards(url: str, responses: Sequence[str], **config: Any) -> tuple[list[float], list[Any]]:
    environment = RewardModelEnvironment({"url": url, "apiKeyVariable": "REWARD_KEY", **config})
    logs = [[*PROMPT, {"role": "assistant", "content": response}] for response in responses]
    result = await environment.step(logs, [None] * len(logs))
    assert result.terminateds == [True] * len(logs)
    assert result.metadata is not None
    return list(result.rewards), list(result.metadata)


async def test_scores_are_those_of_transformers(url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", KEY)
    shown = [response.rpartition("</think>")[2] for response in RESPONSES]
    expected = logits(model, [[*PROMPT, {"role": "assistant", "content": text}] for text in shown])
    # Different texts are worth something different, else nothing would be compared.
    assert len({round(score, 3) for score in expected[:3]}) == 3
    found, states = await rewards(url, RESPONSES)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[3] == pytest.approx(found[0], abs=1e-5)
    assert [state["reward_model"] for state in states] == [{"score": score, "model": "rewards"} for score in found]

    sigmoid, _ = await rewards(url + "/v1", RESPONSES, activation=True)
    assert sigmoid == pytest.approx([1 / (1 + math.exp(-score)) for score in expected], abs=1e-4)
    with_thoughts, _ = await rewards(url, RESPONSES[3:], thoughts=True)
    whole = logits(model, [[*PROMPT, {"role": "assistant", "content": RESPONSES[3]}]])
    assert with_thoughts == pytest.approx(whole, abs=1e-4)
    assert json.dumps(states)


async def test_a_chat_that_is_too_long_is_a_failure(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", KEY)
    with pytest.raises(Exception, match=r"classify refused the request with HTTP status 400"):
        await rewards(url, ["4 " * 600])
    found, _ = await rewards(url, ["4 " * 600], request={"truncate_prompt_tokens": 500, "truncation_side": "left"})
    assert len(found) == 1
