"""A run whose environments ask its own policy, with the real engine: agents and judges in each isolation.

And who gets a token for that, and what the token opens.
"""

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
    directory = tmp_path_factory.mktemp("asking")
    (directory / "looking.py").write_text(LOOKING)
    (directory / "guessing.py").write_text(AGENTS)
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
    environments += [
        {"name": name, "agent": {"entrypoint": "guessing:guess"}, "isolation": name, "processes": 2}
        for name in ("Inline", "Process", "Remote")
    ]
    program: Any = {"command": [sys.executable, "-c", PROGRAM]}
    environments.append({"name": "program", "agent": program, "isolation": "Process", "processes": 2})
    rows = [
        {"prompt": f"task {number}", "task_name": item["name"], "metadata": {"ground_truth": "up"}}
        for item in environments
        for number in range(2)
    ]
    job = manifest(
        directory / "job.json",
        generation={
            "model": {"source": str(TINY), "chatTemplate": TEMPLATE, "chatTemplateKwargs": {"mark": "!"}},
            "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
            # The model has more ids than its tokenizer: the unlikely ones are not sampled.
            "sampling": {"maxTokens": 6, "temperature": 1.0, "topP": 0.9, "seed": 1},
        },
        environments=environments,
        dataset={"source": {"rows": rows}, "repeats": 2},
    )
    code, text = run_to_end(job, "--output", directory / "out", "--metrics-port", "0", torch=True)
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
