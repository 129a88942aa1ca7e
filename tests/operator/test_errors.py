"""What the API server may answer, each with its reason in the status and its pause."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api import conditions
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import (
    ApiError,
    Conflict,
    FieldConflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    NotLeader,
    QuotaExceeded,
    TooMany,
    Unauthorized,
    Unavailable,
    error_of,
)
from kuberoll_operator.kube.resources import PODS, ROLLOUT_JOBS
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key, condition, is_true
from kuberoll_operator.queue import WorkQueue
from kuberoll_operator.reconciler import SLOW_SECONDS, Pool
from tests.operator.emulator import Emulator, Fault, Request, in_virtual_time
from tests.operator.support import NAMESPACE, manifest
from tests.operator.test_reconciler import KEY, bench

CONFLICT = {
    "reason": "Conflict",
    "message": 'Apply failed with 1 conflict: conflict with "kubectl" using apps/v1: .spec.replicas',
    "details": {
        "causes": [
            {"reason": "FieldManagerConflict", "message": 'conflict with "kubectl" using apps/v1', "field": ".spec"}
        ]
    },
}
QUOTA = {"reason": "Forbidden", "message": 'services "x" is forbidden: exceeded quota: small, requested: services=1'}


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (400, {}, Invalid),
        (401, {}, Unauthorized),
        (403, {}, Forbidden),
        (403, QUOTA, QuotaExceeded),
        (404, {}, NotFound),
        (408, {}, Unavailable),
        (409, {"reason": "AlreadyExists"}, Conflict),
        (409, CONFLICT, FieldConflict),
        (410, {"reason": "Expired"}, Gone),
        (413, {}, Invalid),
        (422, {"reason": "Invalid"}, Invalid),
        (429, {}, TooMany),
        (500, {}, Unavailable),
        (503, {}, Unavailable),
        (504, {}, Unavailable),
    ],
)
def test_every_answer_has_its_type(code: int, body: dict[str, Any], kind: type[ApiError]) -> None:
    error = error_of(code, body, "patch /x")
    assert type(error) is kind
    assert str(error).startswith("patch /x: ")


def test_messages_are_capped_and_managers_named() -> None:
    assert len(error_of(422, {"message": "x" * 5000}, "").message) == 1000
    found = error_of(409, CONFLICT, "")
    assert isinstance(found, FieldConflict)
    assert found.managers == ("kubectl",)


@pytest.mark.parametrize(
    ("header", "body", "seconds"),
    [
        ("7", {}, 7.0),
        (None, {"details": {"retryAfterSeconds": 3}}, 3.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", {}, None),
        (None, {}, None),
    ],
)
def test_the_pause_that_a_busy_server_asks_for(header: str | None, body: dict[str, Any], seconds: float | None) -> None:
    found = error_of(429, body, "", header)
    assert isinstance(found, TooMany)
    assert found.retry_after == seconds


async def test_lost_connections_and_time_outs_are_unavailability(tmp_path: Path) -> None:
    server = Emulator()
    server.put(manifest())
    async with server.running(tmp_path) as kubeconfig, Client(await load_access(kubeconfig)) as client:
        # aiohttp itself repeats what may be repeated, once.
        server.faults.append(Fault(lambda _: True, 0, times=2))
        with pytest.raises(Unavailable):
            await client.get(ROLLOUT_JOBS, *KEY)
        assert await client.get(ROLLOUT_JOBS, *KEY)
    async with Client(await load_access(kubeconfig)) as client:
        with pytest.raises(Unavailable):
            await client.get(ROLLOUT_JOBS, *KEY)


async def test_a_token_that_was_renewed_is_used(tmp_path: Path) -> None:
    server = Emulator()
    server.put(manifest())
    async with server.running(tmp_path) as kubeconfig, Client(await load_access(kubeconfig)) as client:
        kubeconfig.write_text(kubeconfig.read_text().replace("secret", "renewed"))
        server.faults.append(Fault(lambda _: True, 401))
        assert await client.get(ROLLOUT_JOBS, *KEY)
        server.faults.append(Fault(lambda _: True, 401, times=None))
        with pytest.raises(Unauthorized):
            await client.get(ROLLOUT_JOBS, *KEY)


async def test_no_write_begins_when_the_lease_may_be_anothers(tmp_path: Path) -> None:
    server = Emulator()
    job = server.put(manifest())
    remaining = 0.0
    async with server.running(tmp_path) as kubeconfig:  # noqa: SIM117
        async with Client(await load_access(kubeconfig), remaining=lambda: remaining) as client:
            assert await client.get(ROLLOUT_JOBS, *KEY)
            for write in (client.create, client.replace):
                with pytest.raises(NotLeader):
                    await write(job)
            with pytest.raises(NotLeader):
                await client.apply(job, "tests")
            with pytest.raises(NotLeader):
                await client.delete(ROLLOUT_JOBS, *KEY, uid="x")
            assert server.writes() == []
            remaining = 5.0
            await client.replace(job)


def applying(plural: str) -> Any:
    def meant(item: Request) -> bool:
        return item.method == "PATCH" and item.plural == plural

    return meant


@pytest.mark.parametrize(
    ("status", "body", "reason", "words"),
    [
        (403, {"reason": "Forbidden", "message": "deployments is forbidden"}, "Forbidden", "deployments is forbidden"),
        (403, QUOTA, "QuotaExceeded", "exceeded quota: small"),
        (409, CONFLICT, "FieldConflict", "managed by kubectl"),
    ],
)
async def test_what_somebody_has_to_mend_is_in_the_status_and_tried_slowly(
    tmp_path: Path, status: int, body: dict[str, Any], reason: str, words: str
) -> None:
    async with bench(tmp_path) as it:
        it.server.faults.append(Fault(applying("deployments"), status, body, times=None))
        again = await it.settle()
        assert again is not None
        assert again <= SLOW_SECONDS
        found = condition(it.job["status"], conditions.GENERATION_READY)
        assert (found["status"], found["reason"]) == ("False", reason)
        assert words in found["message"]
        # The others are not held up.
        assert it.server.get("services", NAMESPACE, "puzzle-generation")
        value = it.metrics.registry.get_sample_value
        assert value("kuberoll_operator_errors_total", {"reason": reason})
        it.server.faults.clear()
        await it.settle()
        assert it.server.get("deployments", NAMESPACE, "puzzle-generation")
        assert condition(it.job["status"], conditions.GENERATION_READY)["reason"] != reason


async def test_an_invalid_template_fails_the_job_for_good(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        body = {"reason": "Invalid", "message": "spec.template.spec.containers[0].name: Invalid value"}
        it.server.faults.append(Fault(applying("deployments"), 422, body, times=None))
        await it.settle()
        found = condition(it.job["status"], conditions.FAILURE_TARGET)
        assert (found["status"], found["reason"]) == ("True", "InvalidTemplate")
        assert "containers[0].name" in found["message"]
        await it.settle()
        assert is_true(it.job["status"], conditions.FAILED)


@pytest.mark.parametrize("status", [0, 409, 410, 429, 500, 503])
@pytest.mark.parametrize("plural", ["deployments", "rolloutjobs"])
async def test_what_may_be_better_in_a_moment_is_not_in_the_status(tmp_path: Path, status: int, plural: str) -> None:
    async with bench(tmp_path) as it:
        it.server.faults.append(Fault(applying(plural), status, times=None))
        with pytest.raises(ApiError):
            await it.reconcile()
        assert "phase" not in it.job["status"]
        it.server.faults.clear()
        await it.settle()
        assert it.job["status"]["phase"] == "Starting"


async def test_an_absence_changes_nothing_in_a_running_job(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        before = it.job
        it.server.faults.append(Fault(lambda _: True, 503, times=None))
        for _ in range(5):
            # It knows all that it needs, and has nothing to write.
            await it.settle()
        it.now += timedelta(seconds=20)
        it.set_status("jobs", "puzzle-workers", {"active": 2})
        with pytest.raises(Unavailable):
            await it.settle()
        it.set_status("jobs", "puzzle-workers", {})
        it.server.faults.clear()
        await it.settle()
        assert it.job["status"] == before["status"]


@pytest.mark.parametrize("plural", ["deployments", "rolloutjobs", "events"])
async def test_a_lost_answer_to_a_write_does_no_harm(tmp_path: Path, plural: str) -> None:
    async with bench(tmp_path) as it:
        written: Any = lambda item: item.plural == plural and item.method in ("PATCH", "POST")  # noqa: E731
        it.server.faults.append(Fault(written, 0, after=True))
        for _ in range(3):
            try:
                await it.settle()
            except ApiError:
                continue
        reasons = [item["reason"] for item in it.server.all("events")]
        assert len(reasons) == len(set(reasons))
        assert it.job["status"]["phase"] == "Starting"
        assert it.server.get("deployments", NAMESPACE, "puzzle-generation")


async def test_a_status_is_not_written_over_a_newer_object(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        seen = it.server.get("rolloutjobs", *KEY)
        assert seen is not None
        # Edited between the read and the write.
        original = it.client.get

        async def get(*place: Any) -> Any:
            found = await original(*place)
            edited = it.job
            edited["spec"]["workers"]["replicas"] += 1
            it.server.put(edited)
            return found

        it.client.get = get  # type: ignore[method-assign,assignment]
        with pytest.raises(Conflict):
            await it.reconcile()
        it.client.get = original  # type: ignore[method-assign]
        await it.settle()
        assert it.job["status"]["observedGeneration"] == it.job["metadata"]["generation"]


async def test_events_that_cannot_be_recorded_hold_up_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.server.faults.append(Fault(lambda item: item.plural == "events", 403, times=None))
        await it.settle()
        assert it.job["status"]["phase"] == "Starting"
        assert it.server.all("events") == []


@pytest.mark.parametrize(
    ("error", "least", "most"),
    [
        (error_of(429, {}, "", "9"), 9, 9.1),
        (error_of(403, {}, ""), SLOW_SECONDS, SLOW_SECONDS + 1),
        (error_of(503, {}, ""), 0.25, 0.5),
        (error_of(409, {}, ""), 0.25, 0.5),
    ],
)
def test_pauses(error: ApiError, least: float, most: float) -> None:
    async def main() -> float:
        queue: WorkQueue[Key] = WorkQueue()
        times: list[float] = []

        async def reconcile(_: Key) -> float | None:
            times.append(asyncio.get_running_loop().time())
            if len(times) == 1:
                raise error
            return None

        pool = Pool(queue, reconcile, Metrics(), size=1, seconds=60, resync=600)
        pool.start()
        queue.add(KEY)
        await asyncio.sleep(100)
        await pool.stop(0)
        return times[1] - times[0]

    assert least <= in_virtual_time(main()) <= most


async def test_pages_of_a_list_whose_continuation_is_gone_are_an_error(tmp_path: Path) -> None:
    server = Emulator()
    async with server.running(tmp_path) as kubeconfig, Client(await load_access(kubeconfig)) as client:
        server.faults.append(Fault(lambda item: item.is_list, 410, {"reason": "Expired"}))
        with pytest.raises(Gone):
            _ = [item async for item in client.items(PODS, None)]
