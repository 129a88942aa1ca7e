"""The CRD on a real API server: it is taken, it refuses what the model refuses, and it guards running jobs."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kuberoll_api.manifest.documents import read_documents
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.rolloutjob import RolloutJob, RolloutJobSpec
from kuberoll_api.model.workers import Workers
from kuberoll_api.schema import crd
from kuberoll_api.schema.rules import AT_ANY_TIME
from tests.api.contradictions import ACCEPTED, JOB, REFUSED, Contradiction, changed
from tests.api.test_crd import STATUS
from tests.cluster.api import Api, ApiError, path_of
from tests.cluster.control_plane import ApiServer

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted(ROOT.glob("examples/**/*.yaml"))
NAME = crd.definition()["metadata"]["name"]
DRY = {"dryRun": "All", "fieldValidation": "Strict"}
Object = dict[str, Any]


def conditions(item: Object | None) -> dict[str, str]:
    # Null, in the moment after it was made.
    found = (item or {}).get("status", {}).get("conditions") or ()
    return {condition["type"]: condition["status"] for condition in found}


@pytest.fixture(scope="module")
def installed(api_server: ApiServer) -> Object:
    """The CRD as the server has it, established and served."""

    async def install() -> Object:
        async with Api(api_server.url, api_server.token, api_server.authority) as api:
            await api.apply(crd.definition())
            item = await api.wait("CustomResourceDefinition", None, NAME, is_established)
            assert item is not None
            async with asyncio.timeout(240):
                while True:
                    if await is_served(api):
                        return item
                    await asyncio.sleep(0.05)

    return asyncio.run(install())


def is_established(item: Object | None) -> bool:
    return conditions(item).get("Established") == "True"


async def is_served(api: Api) -> bool:
    try:
        await api.list("RolloutJob")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


@pytest_asyncio.fixture
async def place(api: Api, installed: Object) -> AsyncIterator[str]:
    """A namespace of the test's own; what was made there is deleted."""
    name = f"crd-{uuid.uuid4().hex[:8]}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    for job in await api.list("RolloutJob", name):
        await api.delete("RolloutJob", name, job["metadata"]["name"])
    await api.delete("Namespace", None, name)


async def try_to_create(api: Api, job: Object, namespace: str = "default") -> Object:
    """What the server would have made of it."""
    return await api.request("POST", path_of("RolloutJob", namespace), job, parameters=DRY)


async def replace(api: Api, old: Object, change: dict[str, Any]) -> Object:
    """Puts a changed object in the place of the old one, dry."""
    metadata = old["metadata"]
    path = path_of("RolloutJob", metadata["namespace"], metadata["name"])
    return await api.request("PUT", path, changed(old, change), parameters=DRY)


async def make(api: Api, namespace: str, change: dict[str, Any]) -> Object:
    job = changed(JOB, change)
    job["metadata"]["namespace"] = namespace
    return await api.create(job)


async def test_it_is_established_and_structural(api: Api, installed: Object) -> None:
    assert conditions(installed) == {"NamesAccepted": "True", "Established": "True"}
    assert installed["status"]["acceptedNames"]["shortNames"] == ["rlj"]


async def test_applied_twice_it_is_not_written_again(api: Api, installed: Object) -> None:
    again = await api.apply(crd.definition())
    assert again["metadata"]["resourceVersion"] == installed["metadata"]["resourceVersion"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("manifest", MANIFESTS, ids=[str(path.relative_to(ROOT)) for path in MANIFESTS])
async def test_the_examples_are_accepted(api: Api, manifest: Path) -> None:
    for document in read_documents(manifest):
        if document.value["kind"] != RolloutJob.__name__:
            continue
        made = await try_to_create(api, document.value)
        assert RolloutJob.model_validate(made) == RolloutJob.model_validate(
            document.value | {"metadata": made["metadata"], "status": made.get("status")}
        )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
async def test_jobs_that_the_model_accepts_are_accepted_and_mean_the_same(api: Api, change: dict[str, Any]) -> None:
    job = changed(JOB, change)
    made = await try_to_create(api, job)
    assert RolloutJob.model_validate(made).spec == RolloutJob.model_validate(job).spec


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_jobs_that_contradict_themselves_are_refused(api: Api, case: Contradiction) -> None:
    with pytest.raises(ApiError) as refused:
        await try_to_create(api, changed(JOB, case.change))
    assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    assert case.says in refused.value.message


@pytest.mark.usefixtures("installed")
async def test_every_refusal_is_of_a_rule_and_every_rule_refuses(api: Api) -> None:
    messages = []
    for case in REFUSED.values():
        with pytest.raises(ApiError) as refused:
            await try_to_create(api, changed(JOB, case.change))
        messages.append(refused.value.message)
    rules = [rule for rule in all_rules(crd.schema()) if "oldSelf" not in rule["rule"]]
    assert rules
    assert [rule["message"] for rule in rules if not any(rule["message"] in text for text in messages)] == []


def all_rules(given: Object) -> Iterator[dict[str, str]]:
    yield from given.get("x-kubernetes-validations", ())
    for inner in (*given.get("properties", {}).values(), given.get("items"), given.get("additionalProperties")):
        yield from all_rules(inner) if isinstance(inner, dict) else ()


@pytest.mark.usefixtures("installed")
async def test_fields_that_may_be_absent_may_be_null(api: Api) -> None:
    empty = {
        "spec.managedBy": "null",
        "spec.generation.model.tokenizer": "null",
        "spec.generation.replicas": "null",
        "spec.generation.external": "null",
        "spec.generation.sampling.seed": "null",
        "spec.workers.shards": "null",
        "spec.workers.podTemplate": "null",
        "spec.environments.0.entrypoint": "null",
        "spec.rollout.groups.dropBudget": "null",
        "spec.output.uri": "null",
        "spec.output.tracking": "null",
    }
    job = nothing_for_null(changed(JOB, empty | {"spec.generation.engineArgs": {"quantization": "null"}}))
    made = await try_to_create(api, job)
    assert RolloutJob.model_validate(made).spec == RolloutJob.model_validate(job).spec
    assert made["spec"]["generation"]["engineArgs"] == {"quantization": None}


def nothing_for_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nothing_for_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nothing_for_null(item) for item in value]
    return None if value == "null" else value


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spec.workers.replicas": -1}, "spec.workers.replicas: Invalid value: -1"),
        ({"spec.workers.replicas": "4"}, 'spec.workers.replicas: Invalid value: "string"'),
        ({"spec.generation.sampling.topP": 0}, "spec.generation.sampling.topP: Invalid value: 0"),
        ({"spec.generation.backend": "native"}, 'spec.generation.backend: Unsupported value: "native"'),
        ({"spec.generation.sampling.seed": 2**63}, "spec.generation.sampling.seed"),
        ({"spec.workers.files": {"configMap": {"items": []}}}, "spec.workers.files.configMap.name: Required value"),
        (
            {"spec.workers.files": {"configMap": {"name": "a", "items": [{"key": "a", "path": "../a"}]}}},
            "spec.workers.files.configMap.items[0].path",
        ),
        (
            {"spec.workers.files": {"configMap": {"name": "a", "items": [{"key": "a/b", "path": "a"}]}}},
            "spec.workers.files.configMap.items[0].key",
        ),
        ({"spec.environments": []}, "spec.environments: Invalid value: 0"),
        ({"spec.dataset": None}, "spec.dataset: Required value"),
        ({"spec": None}, "spec: Required value"),
    ],
)
async def test_types_and_bounds_are_checked(api: Api, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as refused:
        await try_to_create(api, changed(JOB, change))
    assert refused.value.status in (400, 422)
    assert says in refused.value.message


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "change",
    [
        {"spec.rollout.maxTurn": 3},
        {"spec.workers.env": [{"nme": "a", "name": "b"}]},
        {"spec.workers.podTemplate.metdata": {}},
        {"spec.generation.nodeselector": {}},
    ],
)
async def test_unknown_fields_are_told_of(api: Api, change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="unknown field"):
        await try_to_create(api, changed(JOB, change))


FULL = (
    ACCEPTED["everything of a pod"]
    | {f"spec.generation.{field}": value for field, value in ACCEPTED["everything of a pod"]["spec.workers"].items()
       if field in {info.alias for info in PodOptions.model_fields.values()}}
    | {
        "spec.managedBy": "kuberoll.io/operator",
        "spec.generation.replicas": 2,
        "spec.generation.engineArgs": {"max_model_len": 1024, "dtype": "auto"},
        "spec.generation.access": [
            {"name": "judge", "podSelector": {"matchLabels": {"app": "judge"}}},
            {"name": "trainer", "podSelector": {}, "namespaceSelector": {}, "tokenSecret": {"name": "a"}},
        ],
        "spec.environments.0.config": {"size": {"a": 1}},
        "spec.services": [{"name": "grader", "model": {"source": "a"}, "engineArgs": {"runner": "pooling"}}],
        "spec.dataset": {"source": {"rows": [{"prompt": "a"}, {"prompt": "b"}]}, "limit": 2},
        "spec.output": {"uri": "s3://a/b", "tracking": {"wandb": {"project": "a"}}},
        "spec.workers.resources": {"limits": {"cpu": 1}},
    }
)  # fmt: skip

SETTLED: dict[str, dict[str, Any]] = {
    "generation.model": {"spec.generation.model.source": "other"},
    "generation.engineArgs": {"spec.generation.engineArgs.dtype": "float32"},
    "generation.engineArgs, removed": {"spec.generation.engineArgs": None},
    # Where keys are free, one could pass for another.
    "generation.engineArgs, one exchanged": {"spec.generation.engineArgs": {"max_model_len": 1024, "seed": "auto"}},
    "generation.env, other order": {
        "spec.generation.env": FULL["spec.generation.env"][::-1],
    },
    "generation.podTemplate": {"spec.generation.podTemplate.spec.containers": []},
    "generation.access, removed": {"spec.generation.access": None},
    "generation.access, one less": {"spec.generation.access": FULL["spec.generation.access"][:1]},
    "generation.access[].scopes": {"spec.generation.access.0.scopes": ["generate", "weights"]},
    "generation.access[].podSelector, one label exchanged": {
        "spec.generation.access.0.podSelector.matchLabels": {"role": "judge"}
    },
    "generation.access[].namespaceSelector, removed": {"spec.generation.access.1.namespaceSelector": None},
    "generation.access[].tokenSecret": {"spec.generation.access.1.tokenSecret.name": "b"},
    "environments, one less": {"spec.environments": [JOB["spec"]["environments"][0]]},
    "environments, other order": {
        "spec.environments": changed(JOB, FULL)["spec"]["environments"][::-1],
    },
    "environments[].config": {"spec.environments.0.config": {"size": {"b": 1}}},
    "services, removed": {"spec.services": None},
    "services, one more": {"spec.services": [*FULL["spec.services"], {"name": "rewards", "model": {"source": "b"}}]},
    "services[].model": {"spec.services.0.model.source": "other"},
    "services[].engineArgs": {"spec.services.0.engineArgs": {"runner": "generate"}},
    "services[].replicas": {"spec.services.0.replicas": 2},
    "dataset.limit, removed": {"spec.dataset.limit": None},
    "dataset.limit, added": {"spec.dataset.promptTemplate": {"user": "{prompt}"}},
    "dataset.source": {"spec.dataset.source": {"uri": "other"}},
    "dataset.source.rows": {"spec.dataset.source.rows": [{"prompt": "a"}, {"other": "b"}]},
    "rollout.maxTurns": {"spec.rollout.maxTurns": 3},
    "rollout, with its defaults": {"spec.rollout": {"concurrency": 1}},
    "output.uri": {"spec.output.uri": "s3://a/c"},
    "output.uri, removed": {"spec.output.uri": None},
    "workers.shards": {"spec.workers.shards": 9},
    "workers.shards, removed": {"spec.workers.shards": None},
    "workers, removed": {"spec.workers": None},
    "workers.env, other value": {"spec.workers.env.0.value": "1"},
    "workers.env, value for valueFrom": {"spec.workers.env.1": {"name": "B", "value": "1"}},
    "workers.env, other order": {"spec.workers.env": FULL["spec.workers"]["env"][::-1]},
    "workers.podTemplate, other kind of volume": {
        "spec.workers.podTemplate.spec.volumes.0": {"name": "a", "hostPath": {}}
    },
    "workers.files, other ConfigMap": {"spec.workers.files": {"configMap": {"name": "job-files-1"}}},
    "workers.files, other path": {"spec.workers.files.configMap.items": [{"key": "a.b.py", "path": "c.py"}]},
    "workers.podTemplate, deep inside": {"spec.workers.podTemplate.spec.containers": [{"name": "d", "image": "c"}]},
    "workers.podTemplate, one key exchanged": {"spec.workers.podTemplate.metadata": {"annotations": {"a": "b"}}},
    **{
        f"workers.{field.alias}, removed": {f"spec.workers.{field.alias}": None}
        for name, field in Workers.model_fields.items()
        if name != "replicas"
    },
    **{
        f"generation.{alias}, removed": {f"spec.generation.{alias}": None}
        for alias in ("env", "image", "nodeSelector", "podTemplate")
    },
    "generation.selfCheck": {"spec.generation.selfCheck": "Skip"},
    "generation.maxOngoingRequests": {"spec.generation.maxOngoingRequests": 1},
    "generation.routing": {"spec.generation.routing": "LeastLoaded"},
    "generation.backend": {"spec.generation.backend": "Native"},
}

# What is absent has this default: removing it changes nothing.
SETTLED.pop("workers.retriesPerShard, removed", None)
SETTLED["workers.retriesPerShard"] = {"spec.workers.retriesPerShard": 1}


@pytest_asyncio.fixture
async def running(api: Api, place: str) -> Object:
    return await make(api, place, FULL | {"spec.workers.retriesPerShard": 6})


@pytest_asyncio.fixture
async def suspended(api: Api, place: str) -> Object:
    return await make(api, place, FULL | {"spec.workers.retriesPerShard": 6, "spec.suspend": True})


@pytest.mark.parametrize("change", SETTLED.values(), ids=SETTLED)
async def test_a_running_job_is_settled(api: Api, running: Object, change: dict[str, Any]) -> None:
    assert changed(running, change) != running
    with pytest.raises(ApiError, match="cannot change while the job runs; set suspend: true first") as refused:
        await replace(api, running, change)
    (path,) = change
    section = path.removeprefix("spec.").split(".")[0]
    assert f"spec.{section}" in refused.value.message


async def test_the_order_of_who_has_access_may_change(api: Api, running: Object) -> None:
    """Nothing follows from it: see tests/operator/test_access.py."""
    await replace(api, running, {"spec.generation.access": running["spec"]["generation"]["access"][::-1]})


async def test_suspending_and_changing_at_once_is_refused(api: Api, running: Object) -> None:
    with pytest.raises(ApiError, match="cannot change while the job runs"):
        await replace(api, running, {"spec.suspend": True, "spec.rollout.maxTurns": 3})


@pytest.mark.parametrize("change", SETTLED.values(), ids=SETTLED)
async def test_a_suspended_job_can_change_and_be_resumed_with_it(
    api: Api, suspended: Object, change: dict[str, Any]
) -> None:
    await replace(api, suspended, change)
    await replace(api, suspended, change | {"spec.suspend": False})


@pytest.mark.parametrize(
    "change",
    [
        {"spec.suspend": True},
        {"spec.workers.replicas": 9},
        {"spec.workers.replicas": None},
        {"spec.generation.replicas": 3},
        {"spec.generation.replicas": None},
        {"spec.generation.replicas": None, "spec.generation.autoscaling": {"maxReplicas": 3}},
        {"spec.activeDeadlineSeconds": 60},
        {"spec.startupDeadlineSeconds": 60},
        {"spec.ttlSecondsAfterFinished": 0},
        {"spec.weights": {"uri": "/models/step-2", "version": "step-2"}},
        {"metadata.labels": {"a": "b"}},
    ],
    ids=str,
)
async def test_what_may_change_at_any_time(api: Api, running: Object, change: dict[str, Any]) -> None:
    await replace(api, running, change)


@pytest.mark.parametrize("backend", ["KubeRay", "Native"])
async def test_engines_scale_unless_kuberay_runs_them(api: Api, place: str, backend: str) -> None:
    """What `Auto` has become is in the status alone."""
    job = await make(api, place, {"spec.generation.autoscaling": {"maxReplicas": 2}})
    assert job["spec"]["generation"]["backend"] == "Auto"
    scaled = {"spec.generation.autoscaling.maxReplicas": 3}
    await replace(api, job, scaled)
    status = {"generation": {"backend": backend}}
    job = await api.patch("RolloutJob", place, "job", {"status": status}, subresource="status")
    for change in (
        scaled,
        {"spec.generation.autoscaling": None},
        {"spec.generation.autoscaling": None, "spec.generation.replicas": 2},
    ):
        if backend == "KubeRay":
            with pytest.raises(ApiError, match=r"spec\.generation.*with backend KubeRay.*suspend: true first"):
                await replace(api, job, change)
        else:
            await replace(api, job, change)
    await replace(api, job, {"spec.workers.replicas": 9})
    stopped = await api.patch("RolloutJob", place, "job", {"spec": {"suspend": True}})
    await replace(api, stopped, scaled | {"spec.suspend": False})


def test_the_table_has_every_settled_field() -> None:
    settled = {path.split(",")[0] for path in SETTLED}
    assert AT_ANY_TIME == {"generation": ("replicas", "autoscaling"), "workers": ("replicas",)}
    assert {f"workers.{field.alias}" for name, field in Workers.model_fields.items() if name != "replicas"} <= settled
    changing = {
        "suspend",
        "managedBy",
        "activeDeadlineSeconds",
        "startupDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "weights",
    }
    spec = {str(field.alias) for field in RolloutJobSpec.model_fields.values()}
    assert {path.split(".")[0].split("[")[0] for path in settled} == spec - changing


@pytest.mark.parametrize("value", ["other.io/controller", None])
async def test_managed_by_never_changes(api: Api, suspended: Object, value: str | None) -> None:
    with pytest.raises(ApiError, match=r"spec\.managedBy: Invalid value: cannot change; create a new job"):
        await replace(api, suspended, {"spec.managedBy": value})


async def test_managed_by_is_not_added_either(api: Api, place: str) -> None:
    job = await make(api, place, {})
    with pytest.raises(ApiError, match=r"spec\.managedBy: Invalid value: cannot change"):
        await replace(api, job, {"spec.managedBy": "kuberoll.io/operator"})


async def test_applied_twice_a_job_is_not_written_again(api: Api, place: str) -> None:
    for change in ({}, FULL):
        job = changed(JOB, change | {"metadata.namespace": place, "metadata.name": f"job-{len(change)}"})
        first = await api.apply(job)
        second = await api.apply(copy.deepcopy(job))
        assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        assert second["metadata"]["generation"] == 1


async def test_a_job_has_no_status_of_its_maker(api: Api, place: str) -> None:
    job = changed(JOB, {"metadata.namespace": place})
    assert "status" not in await api.create(job | {"status": STATUS})


async def test_the_status_is_written_beside_the_spec(api: Api, place: str) -> None:
    job = await make(api, place, {})
    written = await api.patch("RolloutJob", place, "job", {"status": STATUS, "spec": {}}, subresource="status")
    assert written["status"] == STATUS
    assert written["spec"] == job["spec"]
    assert written["metadata"]["generation"] == 1
    again = await api.patch("RolloutJob", place, "job", {"status": STATUS}, subresource="status")
    assert again["metadata"]["resourceVersion"] == written["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"phase": "Done"}, "status.phase: Unsupported value"),
        ({"progress": {"percentage": 101}}, "status.progress.percentage"),
        ({"conditions": [STATUS["conditions"][0]] * 2}, "status.conditions[1]: Duplicate value"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "status.conditions[0].reason: Required value"),
    ],
)
async def test_a_status_out_of_shape_is_refused(api: Api, place: str, status: Object, says: str) -> None:
    await make(api, place, {})
    with pytest.raises(ApiError) as refused:
        await api.patch("RolloutJob", place, "job", {"status": status}, subresource="status")
    assert says in refused.value.message


async def test_workers_scale(api: Api, place: str) -> None:
    await make(api, place, {})
    await api.patch("RolloutJob", place, "job", {"status": STATUS}, subresource="status")
    scaled = await api.patch("RolloutJob", place, "job", {"spec": {"replicas": 7}}, subresource="scale")
    assert scaled["spec"]["replicas"] == 7
    assert scaled["status"] == {"replicas": 3, "selector": STATUS["workers"]["selector"]}
    assert (await api.get("RolloutJob", place, "job"))["spec"]["workers"]["replicas"] == 7


async def test_every_field_can_be_explained(api: Api, installed: Object) -> None:
    document = await api.request("GET", "/openapi/v3/apis/kuberoll.io/v1alpha1")
    (served,) = (
        given for name, given in document["components"]["schemas"].items() if name.endswith("v1alpha1.RolloutJob")
    )
    for part in ("spec", "status"):
        assert described(served["properties"][part]) == described(crd.schema()["properties"][part])


def described(given: Object) -> Object:
    """The descriptions of all fields."""
    inner = given.get("items") or given
    fields = {name: described(field) for name, field in inner.get("properties", {}).items()}
    return {"description": given.get("description"), "fields": fields}


async def test_a_job_may_have_endless_passes(api: Api, place: str) -> None:
    """Null is a value of its own and stays one, also when the job is applied again: absent is one pass."""
    job = changed(JOB, {"metadata.namespace": place, "spec.suspend": True})
    job["spec"]["dataset"]["epochs"] = None
    made = await api.apply(job)
    assert made["spec"]["dataset"]["epochs"] is None
    again = await api.apply(job)
    assert again["spec"]["dataset"]["epochs"] is None
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_shards_of_endless_passes_need_workers(api: Api, place: str) -> None:
    job = changed(JOB, {"metadata.namespace": place, "spec.workers": {"replicas": 1, "shards": 2}})
    job["spec"]["dataset"]["epochs"] = None
    with pytest.raises(ApiError, match="every shard needs a worker"):
        await api.create(job)
