"""Jobs of the agents in `examples/agents`, with the real SDKs, and what must hold for each of their trajectories."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kuberoll_workers.data.record import TrajectoryRecord
from tests.adapters.libraries.foreign import packages
from tests.local.support import EXAMPLES, TINY, run_to_end, trajectories

REQUIREMENTS = {
    "langchain-1.4.7": (
        "langchain==1.4.7",
        "langchain-core==1.7.2",
        "langchain-openai==1.7.3",
        "langchain-protocol==0.0.20",
        "langgraph==1.2.22",
        "langgraph-checkpoint==4.3.2",
        "langgraph-prebuilt==1.1.2",
        "langgraph-sdk==0.4.14",
        "langsmith==0.15.0",
        "ormsgpack==1.13.1",
        "requests-toolbelt==1.0.0",
        "uuid_utils==0.19.0",
        "zstandard==0.25.0",
    ),
    "pydantic-ai-2.68.0": (
        "genai-prices==0.2.3",
        "logfire-api==5.6.0",
        "pydantic-ai-slim==2.68.0",
        "pydantic-graph==2.68.0",
    ),
}
"""Packages of the frameworks that this environment lacks, by the name of their directory."""

# The tiny policy's own has neither tools nor calls, and its messages have no end.
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for tool in tools or [] %}{{ tool['function']['name'] + ';' }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def play(
    directory: Path, *, generation: Mapping[str, Any], environments: Sequence[Mapping[str, Any]], rows: Sequence[Any],
    repeats: int, arguments: Sequence[str] = (),
) -> list[TrajectoryRecord]:  # fmt: skip
    """Run the example's job with other settings; its trajectories.

    Args:
        generation: Fields in place of the example's.
        environments: Names of the example's environments, with fields in place of its own; `like` names the one that
            an environment of another name is like.
        rows: Of the dataset, for each of the environments.
    """
    job = YAML(typ="safe").load(EXAMPLES / "agents" / "calculator.yaml")
    for module in (EXAMPLES / "agents").glob("*.py"):
        shutil.copy(module, directory)
    examples = {item["name"]: item for item in job["spec"]["environments"]}
    spec = job["spec"]
    spec["generation"] |= {"model": {"source": str(TINY), "chatTemplate": CHAT_TEMPLATE}, **generation}
    spec["environments"] = [
        {**examples[item.get("like", item["name"])], "processes": 1}
        | {name: value for name, value in item.items() if name != "like"}
        for item in environments
    ]
    spec["dataset"] = {
        "source": {"rows": [{**row, "task_name": item["name"]} for item in environments for row in rows]},
        "repeats": repeats,
    }
    (directory / "job.json").write_text(json.dumps(job))
    paths = [str(packages(name, requirements)) for name, requirements in REQUIREMENTS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        code, text = run_to_end(
            directory / "job.json", "--output", directory / "out", "--metrics-port", "0", *arguments, torch=True
        )
    assert code == 0, text
    return trajectories(directory / "out")
