"""An upgrade of the CRD while jobs run that have fields which the new one lacks, on a real API server."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest_asyncio

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import format_path
from kuberoll_api.removed import REMOVED, without_removed
from kuberoll_api.schema import crd
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.removed_fields import lost_fields
from kuberoll_operator.render.generation import MUTABLE as MUTABLE_ENGINES
from kuberoll_operator.render.objects import has_other_shape, keep_shape
from kuberoll_operator.render.workers import MUTABLE as MUTABLE_WORKERS
from kuberoll_operator.settings import Settings
from tests.api.contradictions import JOB, changed
from tests.cluster.api import Api
from tests.cluster.control_plane import ApiServer
from tests.cluster.test_crd import is_served

Object = dict[str, Any]

GPU: Final = {"key": "nvidia.com/gpu", "operator": "Exists"}
OLD: Final = {
    "spec.generation.backend": "Native",
    "spec.generation.tolerations": [GPU],
    "spec.generation.volumes": [{"name": "models", "emptyDir": {}}],
    "spec.generation.volumeMounts": [{"name": "models", "mountPath": "/models"}],
    "spec.workers.runtimeClassName": "gvisor",
    "spec.workers.serviceAccountName": "writer",
    "spec.workers.replicas": 2,
    "spec.output.uri": "s3://bucket/run",
    "spec.dataset.seedPerRepeat": True,
}
"""What the job had under the old CRD."""

NOW: Final = {
    "spec.generation.podTemplate": {
        "spec": {
            "containers": [{"name": "generation", "volumeMounts": [{"name": "models", "mountPath": "/models"}]}],
            "tolerations": [GPU],
            "volumes": [{"name": "models", "emptyDir": {}}],
        }
    },
    "spec.workers.podTemplate": {"spec": {"runtimeClassName": "gvisor", "serviceAccountName": "writer"}},
}
"""The same today."""

LOST: Final = {
    "spec.dataset.seedPerRepeat",
    "spec.generation.tolerations",
    "spec.generation.volumeMounts",
    "spec.generation.volumes",
    "spec.workers.runtimeClassName",
    "spec.workers.serviceAccountName",
}


def old_definition() -> Object:
    """The CRD with all removed fields, without their types."""
    made = copy.deepcopy(crd.definition())
    root = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for pattern in REMOVED:
        inside: Any = root
        *parents, last = pattern.split(".")
        for part in parents:
            inside = inside["properties"][part.removesuffix("[]")]
            inside = inside["items"] if part.endswith("[]") else inside
        inside["properties"][last] = {"description": "Removed.", "x-kubernetes-preserve-unknown-fields": True}
    return made


@pytest_asyncio.fixture
async def place(api: Api, api_server: ApiServer) -> AsyncIterator[str]:
    """A namespace of the test's own; at the end the CRD is the new one."""
    name = f"upgrade-{uuid.uuid4().hex[:8]}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        await api.apply(crd.definition())
        for job in await api.list("RolloutJob", name):
            await api.delete("RolloutJob", name, job["metadata"]["name"])
        await api.delete("Namespace", None, name)


async def until(holds: Any) -> None:
    """Wait until the server, which takes a new CRD when it takes it, answers so."""
    async with asyncio.timeout(120):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def lost(job: Object) -> set[str]:
    return {format_path(path) for path in lost_fields(job, RolloutJob.model_validate(without_removed(job)[0]))}


def pods(job: Object) -> dict[str, Object]:
    """The rendered children of a job that have a pod template and live through a run, by name."""
    given, _ = without_removed({key: value for key, value in job.items() if key != "status"})
    settings = Settings(token_key="tests")  # type: ignore[arg-type]
    found = children_of(RolloutJob.model_validate(given), job["metadata"]["namespace"], settings)
    return {
        child["metadata"]["name"]: child
        for _, child in found
        if child["metadata"]["name"] in ("job-workers", "job-generation") and "template" in child.get("spec", {})
    }


async def test_a_job_in_mid_run_survives_and_what_it_lost_is_told(api: Api, place: str) -> None:
    await api.apply(old_definition())

    async def old_is_served() -> bool:
        return await is_served(api) and "tolerations" in (await try_old(api, place))["spec"]["generation"]

    await until(old_is_served)
    made = await api.create(changed(JOB, OLD | {"metadata.namespace": place}))
    assert made["spec"]["workers"]["serviceAccountName"] == "writer"
    # What the old operator made: the same pods as today's podTemplate would.
    before = pods(changed(made, NOW))
    assert set(before) == {"job-workers", "job-generation"}
    running = {name: await api.apply(without_owners(child)) for name, child in before.items()}

    # A new operator with the old CRD finds the fields, and goes on without them.
    kept, removed = without_removed(made)
    RolloutJob.model_validate(kept)
    assert {format_path(path) for path in removed} == LOST == lost(made)

    await api.apply(crd.definition())

    async def is_pruned() -> bool:
        job = await api.get("RolloutJob", place, "job")
        return "tolerations" not in job["spec"]["generation"]

    await until(is_pruned)
    job = await api.get("RolloutJob", place, "job")
    assert without_removed(job)[1] == []
    assert lost(job) == LOST
    assert job["metadata"]["generation"] == made["metadata"]["generation"]

    # The pods would be others, and stay as they are: nothing is restarted or replaced.
    for name, wanted in pods(job).items():
        assert wanted["spec"]["template"] != before[name]["spec"]["template"]
        assert has_other_shape(wanted, running[name])
        mutable = MUTABLE_WORKERS if name == "job-workers" else MUTABLE_ENGINES
        again = await api.apply(without_owners(dict(keep_shape(wanted, running[name], mutable))))
        assert again["spec"]["template"] == running[name]["spec"]["template"]
        assert again["spec"] == running[name]["spec"]

    # The job is written to as before, and what it lost is still known when it is resumed.
    await api.patch("RolloutJob", place, "job", {"status": {"phase": "Running"}}, subresource="status")
    for suspend in (True, False):
        job = await api.patch("RolloutJob", place, "job", {"spec": {"suspend": suspend}})
        assert lost(job) == LOST
    await api.patch("RolloutJob", place, "job", {"spec": {"suspend": True}})
    # What is said today is not lost.
    told = changed({"spec": {}}, NOW)
    job = await api.patch("RolloutJob", place, "job", told)
    assert lost(job) == {"spec.dataset.seedPerRepeat"}
    for name, wanted in pods(job).items():
        assert not has_other_shape(wanted, running[name])


async def try_old(api: Api, namespace: str) -> Object:
    """The job as the server would store it."""
    job = changed(JOB, OLD | {"metadata.namespace": namespace, "metadata.name": "tried"})
    return await api.request("POST", f"/apis/kuberoll.io/v1alpha1/namespaces/{namespace}/rolloutjobs?dryRun=All", job)


def without_owners(child: Object) -> Object:
    """A child that no garbage collector looks after."""
    metadata = {key: value for key, value in child["metadata"].items() if key != "ownerReferences"}
    return {**child, "metadata": metadata}
