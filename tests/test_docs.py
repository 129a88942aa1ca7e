"""What the documentation shows works as it is shown."""

from __future__ import annotations

import asyncio
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.documents import parse_documents
from kuberoll_api.rolloutjob import Environment, RolloutJob
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.runner import EnvironmentRunner

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_readme_s_manifest_is_valid() -> None:
    (text,) = blocks("README.md", "yaml")
    (document,) = parse_documents(text)
    assert RolloutJob.model_validate(document.value).metadata.name == "my-job"


async def test_the_environment_of_the_docs_can_be_played() -> None:
    (code,) = blocks("docs/environments.md", "python")
    module = types.ModuleType("guessing")
    exec(code, module.__dict__)
    (manifest,) = blocks("docs/environments.md", "yaml")
    (given,) = parse_documents(manifest)[0].value["environments"]
    spec = Environment.model_validate(given)
    environment = module.__dict__[str(spec.entrypoint).partition(":")[2]](spec.config)
    rows = environment.generate_dataset(4, 6)
    runner = EnvironmentRunner(
        make_executor(lambda: environment, isolation="Inline", processes=1, timeout=5), max_batch=8
    )

    async def guess(row: dict[str, Any], text: str) -> tuple[float, bool, int]:
        log = [*row["messages"], {"role": "assistant", "content": text}]
        outcome = await runner.step(log, row["metadata"])
        assert outcome.metadata is not None
        return outcome.reward, outcome.terminated, outcome.metadata["left"]

    try:
        assert await asyncio.gather(*(guess(row, "7\n") for row in rows)) == [
            (0.0, False, 4), (1.0, True, 4), (0.0, False, 4), (0.0, False, 4),
        ]  # fmt: skip
    finally:
        await runner.close()
    assert environment.global_post_process_and_metrics({"total_reward": [1.0, 0.0]})[1] == {"won": 1}


def test_the_documented_trajectory_has_the_record_s_fields() -> None:
    (text,) = blocks("docs/trajectories.md", "json")
    example = json.loads(text.replace("…, ", "").replace(", …", "").replace("[…]", "[]"))
    assert set(example) == set(TrajectoryRecord.__dataclass_fields__)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target
