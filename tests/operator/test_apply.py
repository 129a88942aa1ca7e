"""Server-side apply: against a real API server where there is one, and what decides whether a write is needed."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.cache import Cache
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.apply import CONFLICT_SECONDS, Applier, covers, hash_text
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Conflict, FieldConflict, Forbidden, Invalid, NotFound
from kuberoll_operator.kube.events import Recorder
from kuberoll_operator.kube.resources import CHILDREN, EVENTS, ROLLOUT_JOBS, SECRETS, resource_of_object
from kuberoll_operator.model import Object, Observed
from kuberoll_operator.plan import plan
from kuberoll_operator.render.objects import seal
from kuberoll_operator.transitions import Event
from tests.cluster.api import Api
from tests.cluster.conftest import api, api_server  # noqa: F401
from tests.cluster.control_plane import ApiServer, kubeconfig
from tests.cluster.operator_process import install
from tests.operator.support import SETTINGS, checked_manifest, manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_a_value_covers_itself(value: Any) -> None:
    assert covers(copy.deepcopy(value), value)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_more_is_covered_and_less_is_not(wanted: dict[str, Any], more: dict[str, Any]) -> None:
    assert covers({**more, **wanted}, wanted)
    for key in wanted:
        assert not covers({name: value for name, value in wanted.items() if name != key}, wanted)


def test_a_hashed_text_covers_the_text_that_it_was_made_of() -> None:
    assert covers({"data": {"job.json": hash_text("{}")}}, {"data": {"job.json": "{}"}})
    assert not covers({"data": {"job.json": hash_text("{ }")}}, {"data": {"job.json": "{}"}})


@pytest_asyncio.fixture
async def client(api_server: ApiServer, api: Api) -> AsyncIterator[Client]:  # noqa: F811
    await install(api)
    async with Client(await load_access(api_server.kubeconfig)) as client:
        yield client


@pytest_asyncio.fixture
async def job(client: Client, api: Api) -> AsyncIterator[Object]:  # noqa: F811
    """A job in a namespace that nothing else uses; no controller runs."""
    name = f"apply-{datetime.now(UTC):%H%M%S%f}"
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    wanted = manifest()
    wanted["metadata"]["namespace"] = name
    yield await client.create(wanted)
    await api.delete("Namespace", None, name)


def children_of(raw: Object) -> list[Object]:
    """Everything of the first reconcile, and of the one after the check of what workers need."""
    checked = {**raw, "status": checked_manifest()["status"]}
    found = {
        (item["kind"], item["metadata"]["name"]): item
        for now in (raw, checked)
        for item in plan(
            compute_facts(RolloutJob.model_validate(now), now, Observed(), SETTINGS, datetime.now(UTC))
        ).apply
    }
    assert {kind for kind, _ in found} >= {"ConfigMap", "Deployment", "Job", "Service", "NetworkPolicy"}
    return [item for (kind, _), item in found.items() if kind != "Secret"]


def secret_of(raw: Object) -> Object:
    """That of the tokens."""
    found = plan(compute_facts(RolloutJob.model_validate(raw), raw, Observed(), SETTINGS, datetime.now(UTC))).apply
    [secret] = [item for item in found if item["kind"] == "Secret"]
    return dict(secret)


def cached(raw: Object, items: list[Object]) -> dict[tuple[str, str], Object]:
    """The children as the cache has them."""
    from kuberoll_operator.model import Key

    cache = Cache(lambda _: None)
    for item in items:
        cache.add_written(resource_of_object(item), item)
    return dict(cache.children(Key(raw["metadata"]["namespace"], raw["metadata"]["name"])))


async def test_applying_twice_writes_nothing_and_neither_does_a_restarted_operator(client: Client, job: Object) -> None:
    wanted = children_of(job)
    applier = Applier(client)
    first = [await applier.apply(item, None) for item in wanted]
    written = [item for item in first if item is not None]
    assert len(written) == len(wanted)
    # Forced through, nothing changes.
    again = [await client.apply(item, names.MANAGER) for item in wanted]
    assert [item["metadata"]["resourceVersion"] for item in again] == [
        item["metadata"]["resourceVersion"] for item in written
    ]
    live = cached(job, written)
    for restarted in (applier, Applier(client)):
        for item in wanted:
            place = (item["kind"], item["metadata"]["name"])
            # Quantities that the API server spells differently are asked for once more after a restart, at most.
            found = await restarted.apply(item, live[place])
            assert found is None or restarted is not applier
            if found is not None:
                assert found["metadata"]["resourceVersion"] == live[place]["metadata"]["resourceVersion"]
                assert await restarted.apply(item, live[place]) is None


async def test_tokens_are_created_by_one_who_may_do_nothing_else_with_secrets(
    api_server: ApiServer,  # noqa: F811
    api: Api,  # noqa: F811
    job: Object,
    tmp_path: Path,
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(kubeconfig(api_server.url, await install(api), api_server.authority)))
    wanted = secret_of(job)
    name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    async with Client(await load_access(file)) as own:
        applier = Applier(own)
        for restarted in (applier, applier, Applier(own)):
            assert await restarted.apply(wanted, None) is None
        with pytest.raises(Forbidden):
            await own.get(SECRETS, namespace, name)
        with pytest.raises(Forbidden):
            [item async for item in own.items(SECRETS, namespace)]
        with pytest.raises(Forbidden):
            await own.apply(wanted, names.MANAGER)
    found = await api.get("Secret", namespace, name)
    assert found is not None
    assert found["immutable"] is True
    assert {key: base64.b64decode(value).decode() for key, value in found["data"].items()} == wanted["stringData"]


async def test_a_secret_of_a_deleted_job_of_the_same_name_is_waited_for(
    client: Client,
    api: Api,  # noqa: F811
    job: Object,
) -> None:
    """Users know the name in advance, so it is not a digest; the operator cannot read whose it is."""
    access = [{"name": "trainer", "podSelector": {}}]
    given = {**job, "spec": {**job["spec"], "generation": {**job["spec"]["generation"], "access": access}}}
    found = plan(compute_facts(RolloutJob.model_validate(given), given, Observed(), SETTINGS, datetime.now(UTC))).apply
    [wanted] = [item for item in found if item["metadata"]["name"] == "puzzle-access-trainer"]
    namespace = wanted["metadata"]["namespace"]
    place = ("Secret", namespace, "puzzle-access-trainer")
    metadata = {"name": "puzzle-access-trainer", "namespace": namespace}
    now = 0.0
    applier = Applier(client, lambda: now)

    async def token() -> str | None:
        there = await api.find(*place)
        return None if there is None else base64.b64decode(there["data"]["KUBEROLL_POLICY_TOKEN"]).decode()

    async def someone_elses() -> None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        await api.create({**secret, "stringData": {"KUBEROLL_POLICY_TOKEN": "another"}})

    await someone_elses()
    for _ in range(2):
        await applier.apply(wanted, None)
        assert await token() == "another"
    await api.delete(*place)
    await applier.apply(wanted, None)
    assert await token() == wanted["stringData"]["KUBEROLL_POLICY_TOKEN"]
    # What was created is not asked for again, whatever became of it.
    await api.delete(*place)
    await applier.apply(wanted, None)
    assert await token() is None
    # As after a restart of the operator: one that stays is its own, or nothing to wait for.
    applier = Applier(client, lambda: now)
    await someone_elses()
    await applier.apply(wanted, None)
    now = CONFLICT_SECONDS
    await applier.apply(wanted, None)
    await api.delete(*place)
    await applier.apply(wanted, None)
    assert await token() is None


async def test_drift_is_mended(client: Client, job: Object, api: Api) -> None:  # noqa: F811
    wanted = next(item for item in children_of(job) if item["kind"] == "Deployment")
    applier = Applier(client)
    written = await applier.apply(wanted, None)
    assert written is not None
    name, namespace = wanted["metadata"]["name"], job["metadata"]["namespace"]
    changed = await api.patch("Deployment", namespace, name, {"spec": {"replicas": 7}})
    live = cached(job, [changed])["Deployment", name]
    with pytest.raises(FieldConflict) as refused:
        await applier.apply(wanted, live)
    assert refused.value.managers
    mended = await client.apply(wanted, names.MANAGER, force=True)
    assert mended["spec"]["replicas"] == wanted["spec"]["replicas"]


async def test_refusals_are_typed(client: Client, job: Object) -> None:
    wanted = next(item for item in children_of(job) if item["kind"] == "Deployment")
    broken = copy.deepcopy(wanted)
    broken["spec"]["template"]["spec"]["containers"][0]["name"] = "Not A Name"
    with pytest.raises(Invalid, match="RFC 1123"):
        await client.apply(seal(broken), names.MANAGER)
    elsewhere = copy.deepcopy(wanted)
    elsewhere["metadata"]["namespace"] = "nowhere"
    with pytest.raises(NotFound):
        await client.apply(elsewhere, names.MANAGER)
    with pytest.raises(Conflict):
        await client.create(job | {"metadata": {key: job["metadata"][key] for key in ("name", "namespace")}})


async def test_a_deletion_means_the_object_that_was_seen(client: Client, job: Object) -> None:
    wanted = next(item for item in children_of(job) if item["kind"] == "ConfigMap")
    resource = resource_of_object(wanted)
    place = (resource, job["metadata"]["namespace"], wanted["metadata"]["name"])
    written = await client.apply(wanted, names.MANAGER)
    with pytest.raises(Conflict):
        await client.delete(*place, uid="00000000-0000-0000-0000-000000000000")
    assert await client.get(*place) is not None
    assert await client.delete(*place, uid=written["metadata"]["uid"])
    assert not await client.delete(*place, uid=written["metadata"]["uid"])


async def test_status_is_written_over_what_it_was_computed_from_and_whole(client: Client, job: Object) -> None:
    kept = {key: job["metadata"][key] for key in ("namespace", "name", "uid", "resourceVersion")}
    status = {"phase": "Starting", "progress": {"completed": 1, "failed": 0, "estimatedSecondsRemaining": 3}}
    item = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": kept, "status": status}
    first = await client.apply(item, names.STATUS_MANAGER, subresource="status", force=True)
    assert first["status"]["phase"] == "Starting"
    assert first["metadata"]["generation"] == job["metadata"]["generation"]
    with pytest.raises(Conflict):
        await client.apply(item, names.STATUS_MANAGER, subresource="status", force=True)
    kept["resourceVersion"] = first["metadata"]["resourceVersion"]
    del status["progress"]["estimatedSecondsRemaining"]  # type: ignore[attr-defined]
    second = await client.apply(item, names.STATUS_MANAGER, subresource="status", force=True)
    assert "estimatedSecondsRemaining" not in second["status"]["progress"]
    assert second["spec"] == job["spec"]


async def test_an_event_is_there_once(client: Client, job: Object) -> None:
    event = Event("Warning", "Unschedulable", "StartGeneration", "0/3 nodes are available")
    for _ in range(2):
        await Recorder(client, "tests").record(job, [event])
    found = [item async for item in client.items(EVENTS, job["metadata"]["namespace"])]
    assert len(found) == 1
    assert found[0]["note"] == event.note
    assert found[0]["regarding"]["uid"] == job["metadata"]["uid"]


async def test_lists_go_on_over_pages(client: Client, job: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kuberoll_operator.kube.client.PAGE", 2)
    for item in children_of(job):
        await client.apply(item, names.MANAGER)
    found = [
        (item["kind"], item["metadata"]["name"])
        for resource in CHILDREN
        async for item in client.items(resource, job["metadata"]["namespace"], names.JOB_LABEL)
    ]
    assert sorted(found) == sorted((item["kind"], item["metadata"]["name"]) for item in children_of(job))
    assert [item async for item in client.items(ROLLOUT_JOBS, job["metadata"]["namespace"])]
