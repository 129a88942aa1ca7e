"""The examples are what the first run of a new user meets: they have to fit the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments import create

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_POLICY = EXAMPLES / "models" / "tiny-policy"
MANIFESTS = sorted(EXAMPLES.glob("*/rolloutjob.yaml"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.parent.name)
def test_a_manifest_is_valid_and_its_environments_can_be_made(manifest: Path) -> None:
    job = RolloutJob.model_validate(YAML(typ="safe").load(manifest))
    assert (manifest.parent / job.spec.generation.model.source / "model.safetensors").is_file()
    source = job.spec.dataset.source
    assert source is not None
    for spec in job.spec.environments:
        environment = create(spec)
        if (generator := source.generator) is not None:
            assert len(environment.generate_dataset(generator.count, generator.seed)) == generator.count
        else:
            assert source.uri is not None
            for line in (manifest.parent / source.uri).read_text().splitlines():
                environment.check_row(json.loads(line)["metadata"])


def test_the_tiny_policy_is_tiny() -> None:
    assert sum(file.stat().st_size for file in TINY_POLICY.iterdir()) < 3_000_000


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.parent.name)
def test_the_tiny_policy_knows_the_words_of_its_environments(manifest: Path) -> None:
    """A prompt or tag that the tokenizer has no word for has changed since the policy was trained."""
    tokenizer = HuggingFaceTokenizer.load(str(TINY_POLICY))
    job = RolloutJob.model_validate(YAML(typ="safe").load(manifest))
    for spec in job.spec.environments:
        (row,) = create(spec).generate_dataset(1, 0)
        assert len(tokenizer.render_chat(row["messages"])) < 95
        assert all(len(tokenizer.encode(stop)) == 1 for stop in row["stop_strings"])
