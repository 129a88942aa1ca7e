"""A run of agents, with the real engine: in each isolation, and what they can do with the token that they are given."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from tests.local.support import TINY, manifest, run_to_end, trajectories

pytestmark = pytest.mark.engine

# Modules and programs beside the manifest.
AGENTS = """
import os
import openai

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


async def guess(episode: AgentEpisode) -> AgentResult:
    messages = list(episode.messages)
    statuses = []
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.token, timeout=120) as client:
        for word in ("warmer", "colder"):
            answer = await client.chat.completions.create(model=episode.model, messages=messages, max_tokens=6)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": word}]
        root = episode.base_url.partition("/sessions/")[0]
        for method, path in (("POST", "/sessions"), ("POST", "/v1/weights"), ("POST", "/v1/chat/completions")):
            statuses.append((await client._client.request(
                method, root + path, json={}, headers={"authorization": "Bearer " + episode.token}
            )).status_code)
    tokens = sorted(name for name in os.environ if name.startswith("KUBEROLL") and "TOKEN" in name)
    return AgentResult(reward={"length": len(text)}, metadata={"statuses": statuses, "tokens": tokens}, answer=text)
"""

# With a variable, and other than the model's own.
TEMPLATE = """\
{{ '<|begin|>' }}
{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + mark }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

PROGRAM = """
import json, os, sys
import openai

episode = json.load(sys.stdin)
with openai.OpenAI(timeout=120) as client:
    answer = client.chat.completions.create(
        model=episode["model"], messages=episode["messages"], max_tokens=6
    )
print(json.dumps({"reward": 0.5, "metadata": {"variables": sorted(os.environ)}}))
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryRecord]:
    directory = tmp_path_factory.mktemp("agents")
    (directory / "guessing.py").write_text(AGENTS)
    environments = [
        {"name": name, "agent": {"entrypoint": "guessing:guess"}, "isolation": name, "processes": 2}
        for name in ("Inline", "Process", "Remote")
    ]
    program: Any = {"command": [sys.executable, "-c", PROGRAM]}
    environments.append({"name": "program", "agent": program, "isolation": "Process", "processes": 2})
    rows = [{"prompt": f"task {number}", "task_name": item["name"]} for item in environments for number in range(2)]
    job = manifest(
        directory / "job.json",
        generation={
            "model": {"source": str(TINY), "chatTemplate": TEMPLATE, "chatTemplateKwargs": {"mark": "!"}},
            "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
            "sampling": {"maxTokens": 6, "temperature": 1.0, "seed": 1},
        },
        environments=environments,
        dataset={"source": {"rows": rows}, "repeats": 2},
    )
    code, text = run_to_end(job, "--output", directory / "out", "--metrics-port", "0", torch=True)
    assert code == 0, text
    return trajectories(directory / "out")


@pytest.mark.parametrize("name", ["Inline", "Process", "Remote"])
def test_agents_play_in_every_isolation(stored: list[TrajectoryRecord], name: str) -> None:
    found = [record for record in stored if record.task_name == name]
    assert len(found) == 4
    for record in found:
        assert record.continuity is not None
        assert sum(record.continuity.values()) == 2
        assert record.total_reward == record.reward_parts["length"][-1] == len(record.answer or "")
        assert record.metadata is not None
        # Its token opens neither other sessions, nor the policy outside of them, nor the weights.
        assert record.metadata["statuses"] == [401, 401, 401]
        for message in record.messages:
            sampled = message.role == "assistant"
            assert (message.logprobs is not None) == sampled
            if sampled:
                assert len(message.token_ids) <= 6
    if name != "Inline":
        assert all(record.metadata and record.metadata["tokens"] == [] for record in found)


def test_a_program_plays(stored: list[TrajectoryRecord]) -> None:
    found = [record for record in stored if record.task_name == "program"]
    assert [record.total_reward for record in found] == [0.5] * 4
    for record in found:
        assert record.turn_count == 1
        assert record.metadata is not None
        assert {"OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "KUBEROLL_RESULT"} <= set(record.metadata["variables"])


def test_their_chats_are_rendered_by_the_job_s_template(stored: list[TrajectoryRecord]) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(TINY)).with_template(TEMPLATE).with_variables({"mark": "!"})
    for record in stored:
        prompt = record.messages[0]
        assert prompt.content.startswith("task ")
        rendered = tokenizer.render_chat([{"role": "user", "content": prompt.content}])
        assert list(prompt.token_ids) == rendered.tolist()
