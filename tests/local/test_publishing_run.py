"""A trainer that publishes weights for a run under way, with the real engine."""

from __future__ import annotations

import json
import signal
import stat
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kuberoll.trainer import Deltas, EndpointError, Publisher, PublishFailed, run_endpoint
from kuberoll_workers.data.weights.manifest import CHANGES_FILE, directory_name
from tests.local.support import TINY, manifest, running, trajectories, wait_for_trajectories
from tests.serving.stepped_model import greedy_ids

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPT = list(range(5, 25))
TOKENS = 24


def stepped(model: Any, seed: int) -> None:
    """A large step of some weights."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=draw) < 0.05
            noise = torch.randn(parameter.shape, generator=draw) * parameter.float().std()
            parameter += (chosen * noise).to(parameter.dtype)


def greedy(model: Any) -> list[int]:
    """What the model says, computed by transformers in single precision."""
    exact = LlamaForCausalLM(model.config).float()
    exact.load_state_dict(model.state_dict())
    return greedy_ids(exact, PROMPT, TOKENS)


def asked(run: Path) -> tuple[list[int], list[Any]]:
    """What the run's policy says, and the versions of its tokens."""
    policy = json.loads((run / "policy.json").read_text())
    token = json.loads(Path(policy["tokens"]).read_text())["generate"]
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.0},
    }
    request = urllib.request.Request(
        f"{policy['url']}/v1/generate",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        found = json.loads(answer.read())
    return found["token_ids"], found["policy_versions"]


def test_a_run_serves_what_a_trainer_publishes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = manifest(
        tmp_path / "job.yaml",
        generation={
            "model": {"source": str(TINY)},
            "engineArgs": {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27},
            "sampling": {"maxTokens": 16},
        },
        dataset={"source": {"generator": {"count": 100_000}}},
        rollout={"concurrency": 4},
    )
    model = LlamaForCausalLM.from_pretrained(TINY)
    said = [greedy(model)]
    with running(job, "--output", output, "--metrics-port", "0", torch=True) as run:
        run.until("^policy: ")
        wait_for_trajectories(run, output, 3)
        assert stat.S_IMODE((output / "policy.json").stat().st_mode) == 0o600
        assert asked(output) == (said[0], [["0", 0, TOKENS]])
        endpoint = run_endpoint(output)
        files = Publisher(endpoint=endpoint, location=tmp_path / "weights")
        deltas = Publisher(endpoint=endpoint, location=tmp_path / "weights", transport=Deltas())
        for version, publisher in enumerate((files, deltas, deltas, deltas), start=1):
            stepped(model, version)
            done = publisher.publish(model, version=version)
            run.assert_runs()
            assert (Path(done.uri) / CHANGES_FILE).exists() == (version > 2)
            said.append(greedy(model))
            assert asked(output) == (said[version], [[str(version), 0, TOKENS]])
            before = sum(1 for _ in trajectories(output))
            wait_for_trajectories(run, output, before + 8)
        # Weights of another model change nothing.
        with pytest.raises(PublishFailed, match="The old version 4 is served everywhere"):
            Publisher(endpoint=endpoint, location=tmp_path / "weights", patience=0.1).publish(
                {name: value[:1] for name, value in model.state_dict().items()}, version=5
            )
        assert asked(output)[0] == said[4]
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.printed()
    assert len(set(map(tuple, said))) == 5
    assert not (output / "policy.json").exists()
    with pytest.raises(EndpointError, match="is not there"):
        run_endpoint(output)
    versions: set[str] = set()
    for record in trajectories(output):
        spans = [span for message in record.messages for span in message.policy_versions or ()]
        numbers = [int(version) for version, *_ in spans]
        # Within a trajectory they only grow.
        assert numbers == sorted(numbers)
        versions.update(version for version, *_ in spans)
    assert versions == {"0", "1", "2", "3", "4"}
    assert sorted(path.name for path in (tmp_path / "weights").glob("version-*")) == [
        directory_name(version) for version in (2, 3, 4, 5)
    ]
