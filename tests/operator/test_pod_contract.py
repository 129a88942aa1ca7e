"""What is rendered as job.json is what the pods parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from kuberoll_api import contract
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.render.pods import TEMPORARY_DIRECTORY
from kuberoll_workers.pods.files import read_config
from tests.operator.test_render import CASES, children


@pytest.mark.parametrize("case", CASES)
def test_the_pods_read_what_the_operator_renders(case: str, tmp_path: Path) -> None:
    rendered = children(case)
    [config] = [child for child in rendered if child["kind"] == "ConfigMap"]
    path = tmp_path / "job.json"
    path.write_text(config["data"]["job.json"])
    found = read_config(path)
    job = RolloutJob.model_validate(found.job)
    # Whatever was left out is for the operator alone.
    assert job.metadata.name == config["metadata"]["labels"][names.JOB_LABEL]
    [workers] = [
        child for child in rendered if child["metadata"]["name"].endswith("-workers") and child["kind"] == "Job"
    ]
    assert found.shard_count == workers["spec"]["completions"]
    assert found.port == contract.GENERATION_PORT
    pod = workers["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume or volume["name"] == "output"}
    places = [place for place in (found.turns, None if "://" in found.output else found.output) if place]
    for place in [*places, TEMPORARY_DIRECTORY]:
        assert any(place.startswith(mount) and name in writable for mount, name in mounts.items())
    source, files = job.spec.dataset.source, mounts.get("/opt/kuberoll-files")
    assert (found.base in mounts) == (source.config_map is not None or source.pvc is not None or files is not None)
    assert found.modules == (None if files is None else "/opt/kuberoll-files")
