"""What is rendered as job.json is what the pods parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from kuberoll_api import contract
from kuberoll_api.manifest.loading import load_job
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.mounts import config_map_uses
from kuberoll_operator.render.pods import TEMPORARY_DIRECTORY
from kuberoll_workers.environments.process_access import variables
from kuberoll_workers.pods.environment import read_config as read_environment
from kuberoll_workers.pods.environment import serving_of
from kuberoll_workers.pods.files import read_config
from kuberoll_workers.pods.worker import with_mounted_dataset
from tests.operator.test_render import CASES, GOLDEN, children


@pytest.mark.parametrize("case", CASES)
def test_the_pods_read_what_the_operator_renders(case: str, tmp_path: Path) -> None:
    rendered = children(case)
    [config] = [child for child in rendered if child["metadata"]["name"].endswith("-config")]
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
    mounted = source is not None and (source.config_map is not None or source.pvc is not None)
    assert (found.base in mounts) == (mounted or files is not None)
    parts = [source for _, source in with_mounted_dataset(job).spec.dataset.located_sources()]
    for mount in mounts:
        assert not mount.startswith("/etc/kuberoll-dataset/") or any(
            str(part.uri).startswith(f"{mount}/") for part in parts
        )
    assert found.modules == (None if files is None else "/opt/kuberoll-files")


def test_the_servers_of_environments_read_what_the_operator_renders(tmp_path: Path) -> None:
    rendered = children("remote")
    found = {}
    for child in rendered:
        if child["kind"] == "ConfigMap" and "environment.json" in child["data"]:
            path = tmp_path / child["metadata"]["name"]
            path.write_text(child["data"]["environment.json"])
            found[path.name] = serving_of(read_environment(path), token="t", host="127.0.0.1")
    assert list(found) == ["remote-env-0", "remote-env-2"]
    guess, puzzle = found.values()
    assert (guess.spec.entrypoint, guess.spec.config, guess.processes) == ("guessing:Guess", {"limit": 5}, 4)
    assert guess.access.variables == ["JUDGE_API_KEY"]
    assert guess.access.readable == ["/opt/corpus"]
    assert (puzzle.spec.type, puzzle.spec.entrypoint) == ("sliding_puzzle", None)


def test_the_processes_of_a_judge_in_pods_of_its_own_inherit_its_access(tmp_path: Path) -> None:
    found = []
    for child in children("remote-judge"):
        if child["kind"] == "ConfigMap" and "environment.json" in child["data"]:
            path = tmp_path / child["metadata"]["name"]
            path.write_text(child["data"]["environment.json"])
            found.append(serving_of(read_environment(path), token="t", host="127.0.0.1").access)
    judge, debate, puzzle = found
    pod = {"KUBEROLL_POLICY_URL": "http://a/v1", "KUBEROLL_POLICY_TOKEN": "t", "LEVEL": "3", "OTHER": "4"}
    seen = [set(pod) & variables(pod, access, scratch="/tmp").keys() for access in (judge, debate, puzzle)]
    assert seen == [{"KUBEROLL_POLICY_URL", "KUBEROLL_POLICY_TOKEN"}, set(pod) - {"OTHER"}, set()]


def test_claimed_sandboxes_read_what_the_operator_renders(tmp_path: Path) -> None:
    [first, second] = [child for child in children("sandboxes") if child["kind"] == "SandboxClaim"]
    texts = [
        claim["spec"]["additionalPodMetadata"]["annotations"][contract.ENVIRONMENT_ANNOTATION]
        for claim in (first, second)
    ]
    assert texts[0] == texts[1]
    path = tmp_path / "environment.json"
    path.write_text(texts[0])
    shell = serving_of(read_environment(path), token=None, host="127.0.0.1")
    assert (shell.spec.entrypoint, shell.spec.config, shell.processes) == ("shelling:Shell", {"limit": 5}, 4)
    assert (shell.token, len(shell.token_digest or "")) == (None, 64)


def test_config_maps_of_all_sources_are_looked_for() -> None:
    job = load_job(GOLDEN / "mixture" / "input.yaml")
    assert [(use.field, use.name, use.keys) for use in config_map_uses(job)] == [
        ("spec.dataset.sources[1].source.configMap", "prompts", ["rows.jsonl"])
    ]
