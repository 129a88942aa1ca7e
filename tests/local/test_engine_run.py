"""The examples with the real engine: what is stored is what was sampled, and each row met its environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll_workers.data.messages import ExtendedMessage
from kuberoll_workers.data.record import TrajectoryRecord
from tests.local.support import EXAMPLES, TINY, run_to_end, trajectories

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    """The mixed example, smaller and greedy."""
    output = tmp_path_factory.mktemp("mixed") / "out"
    changes = [
        "spec.dataset.source.generator.count=4",
        "spec.dataset.repeats=2",
        "spec.generation.sampling.greedy=true",
    ]
    arguments = [argument for change in changes for argument in ("--set", change)]
    code, text = run_to_end(
        EXAMPLES / "mixed" / "rolloutjob.yaml", "--output", output, "--metrics-port", "0", *arguments, torch=True
    )
    assert code == 0, text
    return trajectories(output)


def test_every_row_is_answered_by_its_environment(mixed: list[TrajectoryRecord]) -> None:
    counts = {name: sum(record.task_name == name for record in mixed) for name in ("sliding_puzzle", "calculator")}
    assert counts == {"sliding_puzzle": 4 * 2, "calculator": 4 * 8}
    for record in mixed:
        prompt = record.messages[0].content
        assert ("board" in prompt.lower()) == (record.task_name == "sliding_puzzle")


def test_tokens_are_the_ones_that_were_sampled(mixed: list[TrajectoryRecord]) -> None:
    for record in mixed:
        for message in record.messages:
            if message.role == "assistant":
                assert message.logprobs is not None
                assert len(message.logprobs) == len(message.token_ids)
                assert max(message.logprobs, default=0.0) <= 0.0
            else:
                assert message.logprobs is None
        assert record.tokens.prompt + record.tokens.generated + record.tokens.environment == sum(
            len(message.token_ids) for message in record.messages
        )


def test_samples_of_a_greedy_group_are_alike(mixed: list[TrajectoryRecord]) -> None:
    groups: dict[int, set[tuple[int, ...]]] = {}
    for record in mixed:
        ids = tuple(token for message in record.messages for token in message.token_ids)
        groups.setdefault(record.task_index, set()).add(ids)
    assert {len(group) for group in groups.values()} == {1}


def test_stored_logprobs_are_the_engine_s_own(mixed: list[TrajectoryRecord]) -> None:
    longest = max(mixed, key=lambda record: record.turn_count)
    ids = [token for message in longest.messages for token in message.token_ids]
    command = [sys.executable, str(Path(__file__).with_name("rescore.py")), str(TINY)]
    done = subprocess.run(command, input=json.dumps(ids), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    scored = json.loads(done.stdout)
    position = compared = 0
    for message in longest.messages:
        for offset, logprob in enumerate(message.logprobs or ()):
            assert logprob == pytest.approx(scored[position + offset], abs=1e-3)
            compared += 1
        position += len(message.token_ids)
    assert compared == longest.tokens.generated > 0


GARDEN = """
from typing import Literal

from kuberoll_workers.environments import ToolEnvironment, tool


class Garden(ToolEnvironment):
    @tool
    def dig(self, at: str) -> int:
        return len(at)
"""


@pytest.mark.long
def test_calls_are_parsed_by_the_replicas(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    template = model / "chat_template.jinja"
    offered = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    template.write_text(offered + template.read_text())
    (tmp_path / "garden.py").write_text(GARDEN)
    call = r'<tool_call>\{"name": "(dig|eat)", "arguments": \{"at": "(pot|bed)"\}\}</tool_call>'
    job = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "garden"},
        "spec": {
            "generation": {
                "model": {"source": str(model)},
                "engineArgs": {"dtype": "float32", "max_model_len": 512},
                "toolCallParser": "hermes",
                "sampling": {"maxTokens": 100, "structuredOutputs": {"regex": call}},
            },
            "environments": [{"name": "garden", "entrypoint": "garden:Garden", "isolation": "Process"}],
            "dataset": {"source": {"rows": [{"prompt": "Dig."}]}, "repeats": 2},
            "rollout": {"maxTurns": 2, "observationTemplate": "ChatTemplate"},
            "output": {"uri": str(tmp_path / "out")},
        },
    }
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(job))
    code, text = run_to_end(manifest, "--output", tmp_path / "out", "--metrics-port", "0", torch=True)
    assert code == 0, text
    records = trajectories(tmp_path / "out")
    assert len(records) == 2
    for record in records:
        assert [tool["function"]["name"] for tool in record.tools or ()] == ["dig"]
        response, answer = record.messages[1:3]
        assert isinstance(response, ExtendedMessage)
        assert isinstance(answer, ExtendedMessage)
        (made,) = response.fields["tool_calls"]
        assert made["id"] == "call00101" == answer.fields["tool_call_id"]
        assert made["function"]["name"] in response.content
        assert answer.content in ("3", "Error: there is no tool 'eat'; the tools are dig")
