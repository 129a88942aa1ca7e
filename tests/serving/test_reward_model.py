"""A reward model behind `vllm serve`: its scores are those of transformers for the same chats."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.builtin.reward_model import RewardModelEnvironment
from kuberoll_workers.serving.ray_settings import free_ports

pytestmark = pytest.mark.engine

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"
START_SECONDS = 300.0
KEY = "a-key-of-a-test"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_API_KEY": KEY,
}

# The prompt, and responses of one letter, of a sentence, of special tokens, and with thoughts.
PROMPT = [{"role": "user", "content": "Solve: 2 + 2"}]
RESPONSES = ["4", "The answer is 4, I think.", "<action>up</action>", "<think>two and two</think>4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with one class, random weights and the tiny policy's tokenizer."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("reward-model")
    config = transformers.LlamaConfig.from_pretrained(TINY)
    config.num_labels = 1
    config.dtype = "float32"
    torch.manual_seed(5)
    made = transformers.LlamaForSequenceClassification(config).float()
    torch.nn.init.normal_(made.score.weight, std=0.5)
    made.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(TINY / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--runner", "pooling"),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "rewards"),
    ]
    environment = {**os.environ, **SETTINGS}
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


def logits(model: Path, chats: Sequence[list[dict[str, str]]]) -> list[float]:
    """Scores of transformers' own forward pass."""
    import torch
    import transformers

    classifier = transformers.LlamaForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    template = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer = HuggingFaceTokenizer.load(str(model))
    found = []
    for chat in chats:
        text = template.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        ids = torch.tensor([list(tokenizer.encode(text))])
        with torch.no_grad():
            found.append(float(classifier(input_ids=ids).logits[0, 0]))
    return found


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
