"""A manifest of one machine on a real API server: `kuberoll apply` ships what lies beside it, and the run is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ruamel.yaml import YAML

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.output.run_directory import differences, new_manifest, read_manifest
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.worker.environments import isolated_environment_factory
from tests.cluster.api import Api, ApiError, Object, is_true
from tests.cluster.control_plane import ApiServer
from tests.cluster.jobs import ANSWERS, CLAIM, TINY, contents, light_engine, read_output
from tests.cluster.test_lifecycle import Cluster, cluster, complete, installed, message, reason
from tests.cluster.test_reading import Person, person
from tests.test_docs import blocks

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(300, func_only=True)

JOB = "my-job"
ON_A_CLUSTER_WITHOUT_GPUS = {
    "spec.generation.engine": "Simulated",
    "spec.generation.model.source": str(TINY),
    "spec.generation.backend": "Native",
    "spec.generation.simulated": {"responses": [*ANSWERS, "3"]},
    "spec.generation.podTemplate": light_engine(),
    "spec.generation.engineArgs": {"max_model_len": 512},
    "spec.generation.sampling.maxTokens": 8,
    # Its processes may read the job's files, and little else.
    "spec.environments[1].isolation": "Process",
}
OVERRIDES = [f"{path}={json.dumps(value)}" for path, value in ON_A_CLUSTER_WITHOUT_GPUS.items()]
CLAIMS: Object = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "create", "patch"]}


def documented_rules() -> list[Object]:
    """The rights that docs/how-to/laptop-and-cluster.md says the command needs."""
    text = blocks("docs/how-to/laptop-and-cluster.md", "yaml")[-1]
    found: list[Object] = json.loads(json.dumps(YAML(typ="safe").load(text)["rules"]))
    return found


def write_manifest(directory: Path) -> Path:
    """The README's manifest, with the environment of docs/reference/environments.md, and rows for both."""
    (text,) = blocks("README.md", "yaml")
    (code,) = blocks("docs/reference/environments.md", "python")
    file = directory / "my-job.yaml"
    file.write_text(text)
    (directory / "guessing.py").write_text(f"import rewards\n{code}")
    (directory / "rewards.py").write_text("RIGHT = 1.0\n")
    (directory / "unrelated.py").write_text("raise AssertionError\n")
    rows = [
        {"task_name": "math", "prompt": "1+2=", "metadata": {"ground_truth": "3"}},
        {"task_name": "guess", "prompt": "Guess a digit.\n", "metadata": {"number": 3, "left": 3}},
    ]
    (directory / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest_asyncio.fixture
async def author(api: Api, control_plane: ApiServer, cluster: Cluster, tmp_path: Path) -> Person:
    """Somebody with the manifest, and with the documented rights and those for a claim; no others."""
    directory = tmp_path / "author"
    directory.mkdir()
    write_manifest(directory)
    return await person(api, control_plane, cluster.namespace, directory, [*documented_rules(), CLAIMS])


async def applied(author: Person, *arguments: str) -> str:
    """What the command prints."""
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    code, output, error = await author.run("apply", "my-job.yaml", *settings, *arguments)
    assert code == 0, error
    return output.decode()


async def config_maps(cluster: Cluster) -> list[Object]:
    found = await cluster.api.list("ConfigMap", cluster.namespace, labels="app.kubernetes.io/component=files")
    return list(found)


def laptop_differences(directory: Path, output: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Differences between the run in an output and the one that `kuberoll run` would make of the manifest."""
    patch.syspath_prepend(directory)
    job = load_job(directory / "my-job.yaml", OVERRIDES)
    inputs = scan(job, base=directory, environment=isolated_environment_factory(job, protected=()))
    stored = read_manifest(open_storage(str(output)))
    assert stored is not None
    wanted = new_manifest(job, shards=stored.shards, inputs=inputs.as_json())
    assert set(wanted.code) == set(stored.code) == {"math", "guess"}
    return differences(stored, wanted)


async def test_the_readme_s_manifest_from_a_laptop_to_complete(
    cluster: Cluster, author: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.operator(default_output=f"pvc://{CLAIM}/runs")
    words = await applied(author)
    [files] = await config_maps(cluster)
    name = files["metadata"]["name"]
    assert words.splitlines()[:2] == [
        f"rolloutjob/{JOB} created",
        f"configmap/{name} created: guessing.py, prompts.jsonl, rewards.py "
        f"({sum(len(text) for text in files['data'].values()) / 1024:.1f} KiB)",
    ]
    assert files["immutable"] is True
    done = await cluster.job(complete, JOB)
    assert is_true(done, "Complete"), f"{json.dumps(done['status'], indent=1)}\n{cluster.said()}"
    assert done["status"]["output"] == {"uri": f"pvc://{CLAIM}/runs/{cluster.namespace}/{JOB}"}
    output = cluster.kubelet.claim(cluster.namespace, CLAIM) / "runs" / cluster.namespace / JOB
    records = read_output(output)
    assert len(records) == 16
    assert {record.task_name for record in records} == {"math", "guess"}
    # The finish pod has the module too: its metrics are the environment's own.
    numbers = json.loads((output / "aggregate_metrics.json").read_text())["environments"]["guess"]
    assert numbers["environment_metrics"]["won"] == sum(
        record.total_reward > 0 for record in records if record.task_name == "guess"
    )
    assert laptop_differences(author.directory, output, monkeypatch) == []
    await _continued_on_a_laptop(author, output)

    assert [line.split()[1] for line in (await applied(author)).splitlines()[:2]] == ["unchanged", "unchanged:"]
    await cluster.api.delete("RolloutJob", cluster.namespace, JOB)
    await cluster.gone("ConfigMap", name)
    assert len(read_output(output)) == 16


async def _continued_on_a_laptop(author: Person, output: Path) -> None:
    """A run that a cluster began is continued by `kuberoll run` with the same manifest."""
    whole = contents(read_output(output))
    shard = output / "shard-00000.jsonl"
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(lines[0])
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    code, _, error = await author.run(
        "run", "my-job.yaml", *settings, "--resume", "--output", str(output), "--metrics-port", "0"
    )
    assert code == 0, error
    assert len(lines) > 1
    assert contents(read_output(output)) == whole


async def test_code_that_changed_is_another_config_map_and_not_for_a_running_job(
    cluster: Cluster, author: Person
) -> None:
    await applied(author)
    [before] = await config_maps(cluster)
    guessing = author.directory / "guessing.py"
    guessing.write_text(f"{guessing.read_text()}# changed\n")
    code, _, error = await author.run("apply", "my-job.yaml", *(w for o in OVERRIDES for w in ("--set", o)))
    assert code == 1
    assert "spec.workers.files" in error
    assert "set suspend: true first" in error
    assert await config_maps(cluster) == [before], "nothing is stored if the job is refused"
    with pytest.raises(ApiError, match="immutable"):
        await cluster.api.patch(
            "ConfigMap", cluster.namespace, before["metadata"]["name"], {"data": {"guessing.py": "stolen = True"}}
        )


async def test_a_dry_run_stores_nothing(cluster: Cluster, author: Person) -> None:
    words = await applied(author, "--dry-run")
    assert f"rolloutjob/{JOB} created (dry run)" in words
    assert await config_maps(cluster) == []
    assert await cluster.api.list("RolloutJob", cluster.namespace) == []


async def test_other_objects_of_the_file_are_applied_before_the_job(cluster: Cluster, author: Person) -> None:
    file = author.directory / "my-job.yaml"
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "results"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    file.write_text(f"{json.dumps(claim)}\n---\n{file.read_text()}")
    lines = (await applied(author, "--set", "spec.output.uri=pvc://results/run")).splitlines()
    assert lines[:2] == ["persistentvolumeclaim/results created", f"rolloutjob/{JOB} created"]
    found = await cluster.api.get("RolloutJob", cluster.namespace, JOB)
    assert found["spec"]["output"]["uri"] == "pvc://results/run"


async def test_fields_of_others_are_only_taken_over_when_asked(cluster: Cluster, author: Person) -> None:
    await applied(author)
    await cluster.api.patch("RolloutJob", cluster.namespace, JOB, {"spec": {"workers": {"replicas": 7}}})
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    code, _, error = await author.run("apply", "my-job.yaml", *settings)
    assert code == 1
    assert "--force-conflicts" in error
    assert "spec.workers.replicas" in error
    await applied(author, "--force-conflicts")
    assert (await cluster.api.get("RolloutJob", cluster.namespace, JOB))["spec"]["workers"]["replicas"] == 2


async def test_kubectl_apply_alone_says_what_is_missing(cluster: Cluster, author: Person) -> None:
    """The same manifest without its files, and on a cluster without a default output."""
    cluster.operator()
    job = load_job(author.directory / "my-job.yaml", OVERRIDES)
    given = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    given["metadata"]["namespace"] = cluster.namespace
    await cluster.create(given)
    failed = await cluster.job(complete, JOB)
    assert "spec.output.uri: missing" in message(failed, "Failed")
    assert "jobs.defaultOutput" in message(failed, "Failed")
    await cluster.api.delete("RolloutJob", cluster.namespace, JOB)
    await cluster.gone("RolloutJob", JOB)
    given["spec"]["output"] = {"uri": f"pvc://{CLAIM}/{JOB}"}
    await cluster.create(given)
    failed = await cluster.job(complete, JOB)
    assert "spec.environments[1].entrypoint" in message(failed, "Failed")
    assert "kuberoll apply" in message(failed, "Failed")


async def test_files_that_are_not_there_are_named_at_once(cluster: Cluster, author: Person) -> None:
    """The same manifest by `kubectl apply`, with a ConfigMap of another name; then that is created."""
    cluster.operator()
    job = load_job(author.directory / "my-job.yaml", OVERRIDES)
    given = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    given["metadata"]["namespace"] = cluster.namespace
    given["spec"]["output"] = {"uri": f"pvc://{CLAIM}/{JOB}"}
    given["spec"]["workers"] = {**given["spec"].get("workers", {}), "files": {"configMap": {"name": "typo"}}}
    await cluster.create(given)
    waiting = await cluster.job(reason("WorkersChecked", "PodConfigError"), JOB)
    assert "ConfigMap typo does not exist (spec.workers.files)" in message(waiting, "WorkersChecked")
    files = {path.name: path.read_text() for path in author.directory.iterdir() if path.suffix in {".py", ".jsonl"}}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "typo"}, "data": files}
    config_map["metadata"]["namespace"] = cluster.namespace  # type: ignore[index]
    await cluster.create(config_map)
    await cluster.job(reason("WorkersChecked", "Checked"), JOB)
