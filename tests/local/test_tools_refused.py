"""A chat template that leaves tools out is refused before an engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.local.preflight import JobRefused, check
from tests.local.support import TINY, manifest, run_to_end

SHOP = {"name": "shop", "entrypoint": "tests.environments.calling:Shop"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = (
    "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(directory: Path, *, environment: dict[str, Any], template: str | None = None, tools: Any = None) -> Path:
    row = {"messages": [{"role": "user", "content": "Two pears."}], "metadata": {"ground_truth": "x"}}
    (directory / "rows.jsonl").write_text(json.dumps({**row, **({"tools": tools} if tools else {})}) + "\n")
    model = {"source": str(TINY), **({} if template is None else {"chatTemplate": template})}
    return manifest(
        directory / "job.yaml",
        generation={"model": model, "engine": "Simulated"},
        environments=[environment],
        dataset={"source": {"uri": "rows.jsonl"}},
    )


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
def test_an_environment_that_declares_tools(isolation: str, tmp_path: Path) -> None:
    path = written(tmp_path, environment={**SHOP, "isolation": isolation})
    with pytest.raises(JobRefused, match=r"spec\.environments\[0\] \(shop\) declares tools: tools: the chat template"):
        check(load_job(path), base=tmp_path)


def test_a_template_that_renders_tools_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, environment=SHOP, template=WITH_TOOLS, tools=[TOOL])
    assert check(load_job(path), base=tmp_path).inputs.tools_at is not None


def test_a_row_that_declares_tools(tmp_path: Path) -> None:
    path = written(tmp_path, environment={"name": "text", "type": "string_match"}, tools=[TOOL])
    with pytest.raises(JobRefused, match=r"rows\.jsonl:1: tools: the chat template leaves them out"):
        check(load_job(path), base=tmp_path)


def test_nothing_is_started(tmp_path: Path) -> None:
    code, text = run_to_end(written(tmp_path, environment=SHOP), "--output", tmp_path / "out")
    assert code == 2
    assert "declares tools" in text
    assert not (tmp_path / "out").exists()
