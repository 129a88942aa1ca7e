"""Example manifests of the adapters fit the code."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from ruamel.yaml import YAML

from kuberoll_api.environment_types import LibraryEnvironment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.environments import create

MANIFESTS = sorted((Path(__file__).parents[3] / "examples" / "environments").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_environments_of_an_example_can_be_made(manifest: Path) -> None:
    job = RolloutJob.model_validate(YAML(typ="safe").load(manifest))
    for spec in job.spec.environments:
        assert spec.type is not None
        assert spec.type.replace("_", "-") == manifest.stem
        environment = create(spec)
        source = job.spec.dataset.source
        if source is not None and source.generator is not None:
            assert len(environment.generate_dataset(2, 0)) == 2


def test_each_adapter_has_an_example() -> None:
    assert {path.stem for path in MANIFESTS} == {name.replace("_", "-") for name in get_args(LibraryEnvironment)}
