"""Backend KubeRay on a real API server with KubeRay's CRD; KubeRay itself is played by a test."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.apply import Applier
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import FieldConflict
from kuberoll_operator.kube.resources import RAY_SERVICES
from kuberoll_operator.model import Observed
from kuberoll_operator.plan import plan
from tests.cluster.api import Api, ApiError, Object, condition, is_true
from tests.cluster.control_plane import ApiServer
from tests.cluster.operator_process import OperatorProcess, install
from tests.operator import published_crds
from tests.operator.support import SETTINGS, checked_manifest, manifest

pytestmark = pytest.mark.timeout(180)
PATIENCE = 60.0
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FINALIZER = "ray.io/rayservice-finalizer"
KUBERAY = {"fieldManager": "kuberay-operator"}


@pytest_asyncio.fixture
async def served(api: Api) -> AsyncIterator[None]:
    """RayServices are served; not after the test, as jobs of others choose their backend by it."""
    crd = published_crds.crd("rayservices")
    name = crd["metadata"]["name"]
    await api.request("POST", CRDS, {**crd, "status": None})
    await _until(lambda: api.request("GET", f"{CRDS}/{name}"), lambda item: is_true(item, "Established"))
    try:
        yield
    finally:
        await api.request("DELETE", f"{CRDS}/{name}")
        await _gone(api, f"{CRDS}/{name}")


@pytest_asyncio.fixture
async def room(api: Api, api_server: ApiServer, served: None) -> AsyncIterator[str]:
    """A namespace in which no controller makes anything."""
    await install(api)
    name = f"kuberay-{datetime.now(UTC):%H%M%S%f}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        # No garbage collector runs here, and what has a finalizer holds the CRD.
        for item in (await api.request("GET", _path(name)))["items"]:
            await _release(api, item)
        await api.delete("Namespace", None, name)


def _path(namespace: str, name: str | None = None, subresource: str | None = None) -> str:
    return RAY_SERVICES.path(namespace, name, subresource)


async def _until(ask: Callable[[], object], so: Callable[[Object], bool], seconds: float = PATIENCE) -> Object:
    """What is asked for, as soon as it is so."""
    found: Object = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(ApiError):
                    found = await ask()  # type: ignore[misc]
                    if so(found):
                        return found
                await asyncio.sleep(0.05)
    raise AssertionError(f"not in {seconds} s: {json.dumps(found)[:4000]}")


async def _gone(api: Api, path: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await api.request("GET", path)
            except ApiError as error:
                if error.status == 404:
                    return
                raise
            await asyncio.sleep(0.05)


async def _release(api: Api, item: Object) -> None:
    """Deletes a RayService, whatever holds it."""
    metadata = item["metadata"]
    path = _path(metadata["namespace"], metadata["name"])
    with contextlib.suppress(ApiError):
        await api.request("DELETE", path)
        await api.request(
            "PATCH",
            path,
            {"metadata": {"finalizers": None}},
            content_type="application/merge-patch+json",
        )


class FakeKubeRay:
    """What KubeRay 1.7 does to RayServices: an Update of the whole object with its defaults, then statuses.

    Attributes:
        applications: Statuses of Serve's applications that it tells.
        ready: Reason of its condition Ready.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self.applications: Object = {}
        self.ready = "Initializing"

    async def run(self) -> None:
        while True:
            for item in (await self._api.request("GET", _path(self._namespace)))["items"]:
                # Somebody was faster; the next look is at what there is then.
                with contextlib.suppress(ApiError):
                    await self.look(item)
            await asyncio.sleep(0.05)

    async def look(self, item: Object) -> None:
        """One reconcile."""
        metadata = item["metadata"]
        path = _path(self._namespace, metadata["name"])
        if metadata.get("deletionTimestamp"):
            await self._api.request("PUT", path, _edited(item, finalizers=[]), parameters=KUBERAY)
            return
        if FINALIZER not in metadata.get("finalizers", []):
            await self._api.request("PUT", path, _edited(item, finalizers=[FINALIZER]), parameters=KUBERAY)
            return
        told = condition(item, "Ready")
        if told is not None and told["reason"] == "InitializingTimeout":
            return
        status = self.status(item)
        if (item.get("status") or {}) != status:
            wanted = {**item, "status": status}
            await self._api.request(
                "PUT", _path(self._namespace, metadata["name"], "status"), wanted, parameters=KUBERAY
            )

    def status(self, item: Object) -> Object:
        generation = item["metadata"]["generation"]
        ready = {
            "type": "Ready",
            "status": str(self.ready == "NonZeroServeEndpoints"),
            "reason": self.ready,
            "message": "as KubeRay says it",
            "lastTransitionTime": "2026-03-01T12:00:00Z",
            "observedGeneration": generation,
        }
        part = "activeServiceStatus" if ready["status"] == "True" else "pendingServiceStatus"
        return {
            "observedGeneration": generation,
            "conditions": [ready],
            part: {"applicationStatuses": self.applications, "rayClusterName": f"{item['metadata']['name']}-abcde"},
        }


def _edited(item: Object, *, finalizers: list[str]) -> Object:
    """The whole object with KubeRay's defaults in it."""
    found = copy.deepcopy(item)
    found["metadata"]["finalizers"] = finalizers
    cluster = found["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["template"].setdefault("metadata", {})
    for group in cluster["workerGroupSpecs"]:
        for name, value in {"numOfHosts": 1, "priority": 0, "scaleStrategy": {}}.items():
            group.setdefault(name, value)
    return found


HEALTHY: Object = {"kuberoll": {"status": "RUNNING", "serveDeploymentStatuses": {"Generation": {"status": "HEALTHY"}}}}


async def test_applying_over_kuberays_update(api: Api, api_server: ApiServer, room: str) -> None:
    given = checked_manifest(generation={"backend": "KubeRay"}, weights={"uri": "/models/1", "version": "1"})
    given["metadata"]["namespace"] = room
    raw = {**await api.create(given), "status": given["status"]}

    def wanted(job: Object, live: Object | None = None) -> Object:
        children = {} if live is None else {("RayService", "puzzle-gen"): live}
        found = plan(
            compute_facts(RolloutJob.model_validate(job), job, Observed(children=children), SETTINGS, datetime.now(UTC))
        )
        return next(item for item in found.apply if item["kind"] == "RayService")

    async with Client(await load_access(api_server.kubeconfig)) as client:
        applier = Applier(client)
        first = await applier.apply(wanted(raw), None)
        assert first is not None
        # Unknown fields would have been refused: nothing of what was sent is missing.
        assert first["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
        fake = FakeKubeRay(api, room)
        await fake.look(first)
        live = await api.request("GET", _path(room, "puzzle-gen"))
        assert live["metadata"]["generation"] == 2
        with pytest.raises(FieldConflict) as conflict:
            await client.apply({**wanted(raw), "spec": {**wanted(raw)["spec"], "serveConfigV2": "x"}}, names.MANAGER)
        assert "kuberay-operator" in str(conflict.value)
        # What KubeRay added is no reason to write, neither for this process nor for its successor.
        for one in (applier, Applier(client)):
            assert await one.apply(wanted(raw, live), live) is None
        changed = copy.deepcopy(raw)
        changed["spec"]["weights"] = {"uri": "/models/2", "version": "2"}
        second = await applier.apply(wanted(changed, live), live)
        assert second is not None
        assert second["metadata"]["finalizers"] == [FINALIZER]
        assert second["metadata"]["generation"] == 3
        before, after = (item["spec"]["rayClusterConfig"] for item in (first, second))
        assert {key: value for key, value in after.items() if key != "workerGroupSpecs"} == {
            key: value for key, value in before.items() if key != "workerGroupSpecs"
        }
        for group, old in zip(after["workerGroupSpecs"], before["workerGroupSpecs"], strict=True):
            # KubeRay hashes these after its defaults: no second cluster.
            assert {**group, **old} == group | old == {**old, **{key: group[key] for key in group}}


async def _pass_check(api: Api, namespace: str) -> None:
    """Ends the check of what workers need, which no pod runs here, well: engines come after it."""
    await api.wait("Job", namespace, "puzzle-check", lambda item: item is not None, seconds=PATIENCE)
    time = "2026-03-01T12:00:00Z"
    conditions = [
        {"type": kind, "status": "True", "lastProbeTime": time, "lastTransitionTime": time}
        for kind in ("SuccessCriteriaMet", "Complete")
    ]
    status = {"startTime": time, "completionTime": time, "succeeded": 1, "conditions": conditions}
    await api.patch("Job", namespace, "puzzle-check", {"status": status}, subresource="status")


@pytest_asyncio.fixture
async def kuberay(api: Api, room: str) -> AsyncIterator[FakeKubeRay]:
    fake = FakeKubeRay(api, room)
    task = asyncio.create_task(fake.run())
    try:
        yield fake
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def operator(api: Api, api_server: ApiServer, room: str, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    token = await install(api)
    found = OperatorProcess(
        tmp_path, api_server.url, token, namespace=room, authority=api_server.authority, settings={"token_key": "k"}
    )
    found.start()
    try:
        yield found
    finally:
        found.process.stop()


async def test_a_job_with_kuberay_from_the_first_look_to_its_engines(
    api: Api, room: str, kuberay: FakeKubeRay, operator: OperatorProcess
) -> None:
    raw = manifest(generation={"backend": "Auto"})
    raw["metadata"]["namespace"] = room
    await api.create(raw)
    path = "/apis/kuberoll.io/v1alpha1/namespaces/" + room + "/rolloutjobs/puzzle"

    async def job(so: Callable[[Object], bool]) -> Object:
        try:
            return await _until(lambda: api.request("GET", path), so)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{operator.process.tail(6000)}") from None

    def generation(item: Object) -> Object:
        return condition(item, "GenerationReady") or {}

    await _pass_check(api, room)
    found = await job(lambda item: "generation" in item.get("status", {}))
    assert found["status"]["generation"]["backend"] == "KubeRay"
    # Serve's own words.
    failed = {"status": "DEPLOY_FAILED", "message": "ValueError: bad dtype"}
    kuberay.applications = {"kuberoll": {**failed, "serveDeploymentStatuses": {"Generation": failed}}}
    found = await job(lambda item: generation(item).get("reason") == "EngineFailed")
    assert "ValueError: bad dtype" in generation(found)["message"]
    # KubeRay gives up, for good.
    service = await api.request("GET", _path(room, "puzzle-gen"))
    kuberay.ready = "InitializingTimeout"
    await _until(
        lambda: api.request("GET", _path(room, "puzzle-gen")),
        lambda item: (
            (condition(item, "Ready") or {}).get("reason") == "InitializingTimeout"
            or item["metadata"]["uid"] != service["metadata"]["uid"]
        ),
    )
    kuberay.ready, kuberay.applications = "Initializing", {}
    renewed = await _until(
        lambda: api.request("GET", _path(room, "puzzle-gen")),
        lambda item: item["metadata"]["uid"] != service["metadata"]["uid"],
    )
    kuberay.ready, kuberay.applications = "NonZeroServeEndpoints", HEALTHY
    found = await job(lambda item: item["status"].get("phase") == "Running")
    assert found["status"]["generation"]["readyReplicas"] == 2
    workers = await api.get("Job", room, "puzzle-workers")
    assert not workers["spec"].get("suspend")
    # Other weights, in the same cluster.
    change = {"spec": {"weights": {"uri": "/models/2", "version": "2"}}}
    await api.patch("RolloutJob", room, "puzzle", change)
    service = await _until(
        lambda: api.request("GET", _path(room, "puzzle-gen")), lambda item: "/models/2" in item["spec"]["serveConfigV2"]
    )
    assert service["metadata"]["uid"] == renewed["metadata"]["uid"]
    found = await job(lambda item: condition(item, "WeightsServed") is not None)
    assert (condition(found, "WeightsServed") or {})["status"] == "False"
    assert is_true(found, "GenerationReady")
    # Suspended: once its workers are gone, so are its engines.
    await api.patch("RolloutJob", room, "puzzle", {"spec": {"suspend": True}})
    await _gone(api, _path(room, "puzzle-gen"))
    found = await job(lambda item: is_true(item, "Suspended") and item["status"]["phase"] == "Suspended")
    assert found["status"]["generation"]["backend"] == "KubeRay"
