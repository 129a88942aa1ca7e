"""Reconciles against an API emulator: what is written, what is not, and when a job is looked at again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api import conditions, contract
from kuberoll_operator import names
from kuberoll_operator.cache import Cache
from kuberoll_operator.kube.access import load_access
from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import Conflict
from kuberoll_operator.kube.events import Recorder
from kuberoll_operator.kube.resources import CHILDREN, PODS, ROLLOUT_JOBS, resource_of_object
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.model import Key, Object, PodReports, condition, is_true
from kuberoll_operator.observe import observe
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.polling import ReportPoller
from kuberoll_operator.queue import WorkQueue
from kuberoll_operator.reconciler import Pool, Reconciler
from tests.operator import waiting_cases
from tests.operator.emulator import Emulator, Fault, in_virtual_time
from tests.operator.support import NAMESPACE, SETTINGS, checked_manifest, manifest, pod, unschedulable, waiting

KEY = Key(NAMESPACE, "puzzle")


@dataclass
class Bench:
    """A reconciler, its API server, and the time."""

    server: Emulator
    cache: Cache
    client: Client
    reconciler: Reconciler
    metrics: Metrics
    now: datetime

    async def reconcile(self) -> float | None:
        """Once, with a cache that has seen everything."""
        for resource in (ROLLOUT_JOBS, *CHILDREN, PODS):
            items = self.server.all(resource.plural)
            self.cache.add_page(resource, None, items, str(self.server._version), last=True)
        return await self.reconciler.reconcile(KEY)

    async def settle(self) -> float | None:
        """Until it is not called for at once."""
        for _ in range(10):
            if (again := await self.reconcile()) != 0:
                return again
        raise AssertionError("it does not settle")

    @property
    def job(self) -> Object:
        found = self.server.get("rolloutjobs", *KEY)
        assert found is not None
        return found

    def set_status(self, plural: str, name: str, status: Object) -> None:
        """As a controller does."""
        item = self.server.get(plural, NAMESPACE, name)
        assert item is not None
        self.server.put({**item, "status": status})

    def generation_is_ready(self) -> None:
        self.set_status("deployments", "puzzle-generation", {"observedGeneration": 1, "readyReplicas": 2})


@asynccontextmanager
async def bench(directory: Path, **spec: Any) -> AsyncIterator[Bench]:
    server, cache, metrics = Emulator(), Cache(lambda _: None), Metrics()
    server.put(checked_manifest(**spec))
    async with (
        server.running(directory) as kubeconfig,
        Client(await load_access(kubeconfig), on_answer=metrics.record_request) as client,
        ReportPoller(lambda _: None, seconds=15) as poller,
    ):
        found = Bench(server, cache, client, None, metrics, datetime.now(UTC))  # type: ignore[arg-type]
        found.reconciler = Reconciler(
            client, cache, poller, Recorder(client, "tests"), metrics, SETTINGS, now=lambda: found.now
        )
        yield found


async def test_a_new_job_gets_its_children_and_its_status_and_then_nothing_is_written(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        kinds = {item["metadata"]["name"] for plural in ("deployments", "services") for item in it.server.all(plural)}
        assert kinds >= {"puzzle-generation", "puzzle-generation-pods"}
        assert it.job["status"]["phase"] == "Starting"
        for item in it.server.all("deployments"):
            (owner,) = item["metadata"]["ownerReferences"]
            assert owner["uid"] == it.job["metadata"]["uid"]
        written = len(it.server.writes())
        for _ in range(3):
            it.now += timedelta(seconds=20)
            await it.settle()
        assert len(it.server.writes()) == written
        assert {item.query.get("fieldManager") for item in it.server.writes() if item.method == "PATCH"} == {
            names.MANAGER,
            names.STATUS_MANAGER,
        }


async def test_a_restarted_operator_changes_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        written = len(it.server.writes())
        async with ReportPoller(lambda _: None, seconds=15) as poller:
            cache = Cache(lambda _: None)
            for resource in (ROLLOUT_JOBS, *CHILDREN, PODS):
                cache.add_page(resource, None, it.server.all(resource.plural), "99", last=True)
            recorder = Recorder(it.client, "tests")
            again = Reconciler(it.client, cache, poller, recorder, Metrics(), SETTINGS, now=lambda: it.now)
            await again.reconcile(KEY)
            # Whether the tokens' Secret is there it may not look; being told so once is enough.
            [asked] = it.server.writes()[written:]
            assert (asked.method, asked.plural) == ("POST", "secrets")
            await again.reconcile(KEY)
        assert len(it.server.writes()) == written + 1


async def test_tokens_are_created_once_before_all_else_and_never_looked_at(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        asked = [item for item in it.server.requests if item.plural == "secrets"]
        assert [item.method for item in asked] == ["POST"]
        assert it.server.writes()[0] == asked[0]
        [secret] = it.server.all("secrets")
        uid = it.job["metadata"]["uid"]
        assert secret["stringData"] == {scope: SETTINGS.token_of(uid, scope) for scope in contract.SCOPES}
        assert secret["metadata"]["ownerReferences"][0]["uid"] == uid


async def test_tokens_that_pods_miss_are_created_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        [secret] = it.server.all("secrets")
        name = secret["metadata"]["name"]
        it.server.remove("secrets", NAMESPACE, name)
        await it.settle()
        assert it.server.all("secrets") == []
        missing = waiting("CreateContainerConfigError", f'secret "{name}" not found')
        it.server.put(
            {"apiVersion": "v1", **merge(pod("generation", container=missing), {"metadata": {"namespace": NAMESPACE}})}
            | {"kind": "Pod", "spec": {}}
        )
        await it.settle()
        [again] = it.server.all("secrets")
        assert again["stringData"] == secret["stringData"]


async def test_tokens_that_may_not_be_created_are_told_of(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        words = {"reason": "Forbidden", "message": 'secrets is forbidden: User "kuberoll" cannot create'}
        it.server.faults.append(Fault(lambda asked: asked.plural == "secrets", 403, words, times=None))
        await it.settle()
        ready = condition(it.job["status"], conditions.GENERATION_READY)
        assert ready["reason"] == conditions.Reason.FORBIDDEN
        assert "secrets is forbidden" in ready["message"]
        it.server.faults.clear()
        await it.settle()
        assert len(it.server.all("secrets")) == 1


async def test_a_successor_of_the_same_name_has_tokens_of_its_own(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        [first] = it.server.all("secrets")
        it.server.remove("rolloutjobs", *KEY)
        await it.reconcile()
        it.server.put(manifest())
        await it.settle()
        [second] = it.server.all("secrets")
        assert second["metadata"]["name"] != first["metadata"]["name"]


async def test_what_was_removed_is_made_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.server.remove("services", NAMESPACE, "puzzle-generation")
        await it.settle()
        assert it.server.get("services", NAMESPACE, "puzzle-generation")


async def test_what_only_has_the_name_of_a_child_is_not_written_to(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        metadata = {"name": "puzzle-config", "namespace": NAMESPACE}
        it.server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"mine": "yes"}})
        await it.settle()
        found = it.server.get("configmaps", NAMESPACE, "puzzle-config")
        assert found is not None
        assert found["data"] == {"mine": "yes"}
        assert "ownerReferences" not in found["metadata"]
        ready = condition(it.job["status"], conditions.GENERATION_READY)
        assert (ready["status"], ready["reason"]) == ("False", conditions.Reason.NAME_TAKEN)
        assert "ConfigMap puzzle-config already exists and does not belong to this job" in ready["message"]
        assert it.server.get("deployments", NAMESPACE, "puzzle-generation") is None


async def test_the_way_to_the_end_writes_little_and_tells_every_step_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        again = await it.settle()
        workers = it.server.get("jobs", NAMESPACE, "puzzle-workers")
        assert workers is not None
        assert it.job["status"]["phase"] == "Running"
        assert again is not None
        assert again <= SETTINGS.progress_seconds
        complete = [{"type": "Complete", "status": "True"}]
        done = {"succeeded": 4, "completedIndexes": "0-3", "conditions": complete}
        it.set_status("jobs", "puzzle-workers", done)
        await it.settle()
        # The engines are not needed any more, and the Job that aggregates is there.
        assert it.server.get("deployments", NAMESPACE, "puzzle-generation") is None
        assert it.job["status"]["phase"] == "Finishing"
        it.set_status("jobs", "puzzle-finish", {"succeeded": 1, "conditions": complete})
        await it.settle()
        assert is_true(it.job["status"], conditions.COMPLETE)
        assert it.job["status"]["phase"] == "Succeeded"
        assert len(it.server.writes()) <= 25
        reasons = [item["reason"] for item in it.server.all("events")]
        assert len(reasons) == len(set(reasons))
        assert {"GenerationStarting", "GenerationReady", "Completed"} <= set(reasons)
        value = it.metrics.registry.get_sample_value
        for milestone in ("generation_ready", "complete"):
            assert value("kuberoll_operator_milestone_seconds_count", {"milestone": milestone}) == 1


async def test_events_come_after_the_status_that_they_tell_of(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        kinds = [item.plural for item in it.server.writes() if item.plural in ("events", "rolloutjobs")]
        assert kinds[0] == "rolloutjobs"
        assert "events" in kinds


async def test_what_is_remembered_of_jobs_ends_with_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        remembered = set()
        for _ in range(20):
            await it.settle()
            assert it.reconciler._applier._last_writes
            it.server.remove("rolloutjobs", *KEY)
            await it.reconcile()
            remembered.add(len(it.reconciler._applier._last_writes))
            it.server.put(checked_manifest())
        assert remembered == {0}


async def test_a_job_of_another_manager_is_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path, managedBy="kueue.x-k8s.io/multikueue") as it:
        assert await it.reconcile() is None
        assert it.server.writes() == []


async def test_a_job_that_is_gone_or_going_is_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        going = it.job
        going["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
        it.server.put(going)
        assert await it.reconcile() is None
        it.server.remove("rolloutjobs", *KEY)
        assert await it.reconcile() is None
        assert it.server.writes() == []


async def test_a_job_that_cannot_be_understood_fails_with_every_mistake(tmp_path: Path) -> None:
    async with bench(tmp_path, workers={"replicas": -1}, rollout={"maxTurn": 3}) as it:
        assert await it.reconcile() is None
        status = it.job["status"]
        for kind in (conditions.FAILURE_TARGET, conditions.FAILED):
            found = condition(status, kind)
            assert found["reason"] == "InvalidSpec"
            assert "spec.workers.replicas" in found["message"]
            assert "maxTurns" in found["message"]
        written = len(it.server.writes())
        assert await it.reconcile() is None
        assert len(it.server.writes()) == written


async def test_a_job_that_runs_and_is_not_understood_any_more_is_left_as_it_is(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        newer = it.job
        newer["spec"]["fieldOfTheFuture"] = 1
        it.server.put(newer)
        written = len(it.server.writes())
        assert await it.reconcile() is None
        assert len(it.server.writes()) == written


async def test_a_job_with_a_removed_field_goes_on_without_it_and_says_so_once(tmp_path: Path) -> None:
    """As with an older CRD, or from before it was upgraded: what there is runs on."""
    async with bench(tmp_path) as it:
        await it.settle()
        written = len(it.server.writes())
        spec = {**it.job["spec"], "workers": {**it.job["spec"].get("workers", {}), "tolerations": []}}
        managed: list[Object] = [{"fieldsV1": {"f:spec": {"f:generation": {"f:runtimeClassName": {}}}}}]
        job = it.job
        it.server.put({**job, "metadata": {**job["metadata"], "managedFields": managed}, "spec": spec})
        for _ in range(2):
            await it.settle()
        # Beside the status, which names the version of the job that was observed.
        assert [item.plural for item in it.server.writes()[written:]] == ["events", "rolloutjobs"]
        [event] = [item for item in it.server.all("events") if item["reason"] == "FieldsRemoved"]
        assert event["type"] == "Warning"
        assert "spec.workers.tolerations was removed: set spec.workers.podTemplate.spec.tolerations" in event["note"]
        assert "spec.generation.runtimeClassName was removed" in event["note"]
        assert it.job["status"]["phase"] == "Starting"


async def test_a_job_whose_time_is_over_is_deleted_with_what_it_owns(tmp_path: Path) -> None:
    async with bench(tmp_path, ttlSecondsAfterFinished=60) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        complete = [{"type": "Complete", "status": "True"}]
        it.set_status("jobs", "puzzle-workers", {"succeeded": 4, "completedIndexes": "0-3", "conditions": complete})
        await it.settle()
        it.set_status("jobs", "puzzle-finish", {"succeeded": 1, "conditions": complete})
        again = await it.settle()
        assert again is not None
        assert 0 < again <= 60
        it.now += timedelta(seconds=61)
        await it.reconcile()
        assert it.server.get("rolloutjobs", *KEY) is None
        assert it.server.all("jobs") == []
        (deletion,) = [item for item in it.server.writes("rolloutjobs") if item.method == "DELETE"]
        assert deletion.body["propagationPolicy"] == "Background"


async def test_pods_of_a_predecessor_are_not_looked_at(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        for name, created in (("old", "2026-03-01T11:59:59Z"), ("new", "2026-03-01T12:00:00Z")):
            pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}}
            pod["metadata"] |= {"labels": names.labels("puzzle", "workers"), "creationTimestamp": created}
            it.cache.add_written(
                resource_of_object(pod), {**pod, "metadata": {**pod["metadata"], "resourceVersion": "1"}}
            )
        raw = {"metadata": {"creationTimestamp": "2026-03-01T12:00:00Z"}}
        observed = observe(it.cache, KEY, raw, lambda *_: PodReports())
        assert [pod["metadata"]["name"] for pod in observed.pods] == ["new"]


def pool(queue: WorkQueue[Key], reconcile: Any, size: int = 2, seconds: float = 60) -> Pool:
    return Pool(queue, reconcile, Metrics(), size=size, seconds=seconds, resync=600)


def test_a_key_is_looked_at_again_when_it_said_so_and_at_least_now_and_then() -> None:
    async def main() -> list[float]:
        queue: WorkQueue[Key] = WorkQueue()
        times: list[float] = []

        async def reconcile(_: Key) -> float | None:
            times.append(asyncio.get_running_loop().time())
            return 10.0 if len(times) < 3 else None

        work = pool(queue, reconcile)
        work.start()
        queue.add(KEY)
        await asyncio.sleep(1000)
        await work.stop(1)
        return times

    times = in_virtual_time(main())
    assert times[:3] == [0, 10, 20]
    assert 480 <= times[3] - times[2] <= 720


def test_failures_are_tried_again_with_growing_pauses_and_hang_nothing() -> None:
    async def main() -> list[float]:
        queue: WorkQueue[Key] = WorkQueue()
        times: list[float] = []

        async def reconcile(_: Key) -> float | None:
            times.append(asyncio.get_running_loop().time())
            if len(times) == 1:
                raise ValueError("a mistake of ours")
            if len(times) == 2:
                await asyncio.Event().wait()
            return None

        work = pool(queue, reconcile)
        work.start()
        queue.add(KEY)
        await asyncio.sleep(100)
        await work.stop(1)
        return times

    first, second, third = in_virtual_time(main())
    assert 0.25 <= second - first <= 0.5
    assert 60.5 <= third - second <= 61


def test_a_pool_that_stops_finishes_what_is_under_way_and_takes_no_more() -> None:
    async def main() -> list[str]:
        queue: WorkQueue[Key] = WorkQueue()
        told: list[str] = []

        async def reconcile(key: Key) -> float | None:
            told.append(f"{key.name} begins")
            await asyncio.sleep(5)
            told.append(f"{key.name} ends")
            return None

        work = pool(queue, reconcile, size=1)
        work.start()
        for name in ("a", "b"):
            queue.add(Key("n", name))
        await asyncio.sleep(1)
        await work.stop(20)
        return told

    assert in_virtual_time(main()) == ["a begins", "a ends"]


def test_a_pool_that_must_stop_does() -> None:
    async def main() -> float:
        queue: WorkQueue[Key] = WorkQueue()

        async def reconcile(_: Key) -> float | None:
            await asyncio.Event().wait()
            return None

        work = pool(queue, reconcile, seconds=1e6)
        work.start()
        queue.add(KEY)
        await asyncio.sleep(1)
        await work.stop(20)
        return asyncio.get_running_loop().time()

    assert in_virtual_time(main()) == pytest.approx(21)


async def test_a_job_is_read_when_others_have_changed_it(tmp_path: Path) -> None:
    def reads(it: Bench) -> int:
        return len([item for item in it.server.requests if item.plural == "rolloutjobs" and item.method == "GET"])

    async with bench(tmp_path) as it:
        it.server.put({**it.job, "status": {}})
        for status in (
            {"active": 1},
            {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
        ):
            await it.settle()
            it.set_status("jobs", "puzzle-check", status)
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        assert it.job["status"]["phase"] == "Running"
        assert reads(it) == 1
        it.server.put(merge(it.job, {"spec": {"suspend": True}}))
        await it.settle()
        assert it.job["status"]["phase"] == "Suspended"
        assert reads(it) == 2
        # A version that the API server has gone on from is refused, and read again.
        it.server.put(merge(it.job, {"spec": {"suspend": False}, "metadata": {"labels": {"a": "b"}}}))
        await it.settle()
        assert it.job["status"]["phase"] == "Starting"
        assert reads(it) == 3


async def test_a_status_of_an_outdated_job_is_not_written(tmp_path: Path) -> None:
    """The watch lags: what was decided by the old spec is decided again by the new one."""
    async with bench(tmp_path) as it:
        await it.settle()
        it.server.put(merge(it.job, {"spec": {"suspend": True}}))
        it.generation_is_ready()
        for resource in (*CHILDREN, PODS):
            items = it.server.all(resource.plural)
            it.cache.add_page(resource, None, items, str(it.server._version), last=True)
        with pytest.raises(Conflict):
            await it.reconciler.reconcile(KEY)
        assert it.job["status"]["phase"] == "Starting"
        # The next attempt reads, also if the watch still lags.
        assert await it.reconciler.reconcile(KEY) is not None
        assert it.job["status"]["conditions"][0]["reason"] in {"Suspending", "JobSuspended"}


async def test_a_config_map_that_a_pod_waits_for(tmp_path: Path) -> None:
    files = {"configMap": {"name": "code", "items": [{"key": "a.py", "path": "a.py"}]}}
    rows = {"generator": None, "configMap": {"name": "rows"}}
    async with bench(tmp_path, workers={"files": files}, dataset={"source": rows}) as it:
        it.server.put({**it.job, "status": {}})
        await it.settle()
        assert checked(it)["reason"] == "Checking"
        asked = len(it.server.requests)
        check = pod("check", phase="Pending", container=waiting("ContainerCreating"))
        check["metadata"] |= {"namespace": NAMESPACE, "uid": "check-uid"}
        check["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        it.server.put({"apiVersion": "v1", "kind": "Pod", **check})
        again = await it.settle()
        assert again is not None, "nothing tells that it was created"
        assert again <= 60
        found = checked(it)
        assert (found["status"], found["reason"]) == ("False", "PodConfigError")
        assert "ConfigMap code does not exist (spec.workers.files); `kuberoll apply` makes it" in found["message"]
        assert "ConfigMap rows does not exist (spec.dataset.source.configMap)" in found["message"]
        read = {item.path.rpartition("/")[2] for item in it.server.requests[asked:] if item.plural == "configmaps"}
        assert {"code", "rows"} <= read

        for name, data in (("code", {"b.py": ""}), ("rows", {"dataset.jsonl": ""})):
            metadata = {"name": name, "namespace": NAMESPACE}
            it.server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
        # Messages are written at most every progressSeconds.
        it.now += timedelta(seconds=20)
        await it.settle()
        assert checked(it)["message"].startswith("ConfigMap code has no key a.py (spec.workers.files)")

        metadata = {"name": "code", "namespace": NAMESPACE}
        it.server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": {"a.py": ""}})
        await it.settle()
        assert checked(it)["reason"] == "Checking"


async def test_a_pod_that_cannot_mount_says_so_and_then_no_more(tmp_path: Path) -> None:
    case = waiting_cases.load("secret-volume-missing")
    [found] = [item for item in case["objects"] if item["kind"] == "Pod"]
    async with bench(tmp_path) as it:
        it.server.put({**it.job, "status": {}})
        await it.settle()
        it.set_status("jobs", "puzzle-check", {"active": 1})
        metadata = pod("check")["metadata"] | {"namespace": NAMESPACE, "uid": found["metadata"]["uid"]}
        born = it.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"name": found["metadata"]["name"], "creationTimestamp": born}
        status = {**found["status"], "conditions": [{**found["status"]["conditions"][0], "lastTransitionTime": born}]}
        waits = {**found, "metadata": metadata, "status": status}
        it.server.put(waits)
        for item in case["events"]:
            it.server.put(
                {**item, "metadata": {**item["metadata"], "namespace": NAMESPACE}, "apiVersion": "v1", "kind": "Event"}
            )
        it.server.put(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": "other", "namespace": NAMESPACE},
                "reason": "FailedMount",
                "message": "of another pod",
                "involvedObject": {"kind": "Pod", "name": "other"},
            }
        )
        # Nothing is asked in the first seconds, and it is looked at again after them.
        again = await it.settle()
        assert again is not None
        assert 0 < again <= 10
        assert checked(it)["reason"] == "Checking"
        it.now += timedelta(seconds=again + 0.1)
        again = await it.settle()
        assert again is not None
        assert again <= 25
        assert checked(it)["reason"] == "PodConfigError"
        assert "volume v: Secret creds does not exist; create it, or correct the name" in checked(it)["message"]
        read = [item for item in it.server.requests if item.plural == "events" and item.method == "GET"]
        assert len(read) == 1
        await it.settle()
        assert len([item for item in it.server.requests if item.plural == "events" and item.method == "GET"]) == 1

        # It starts: the event is still there, and is not told any more.
        running = pod("check", container={"ready": True, "state": {"running": {}}})["status"]
        it.server.put({**waits, "status": {**running, "phase": "Running"}})
        it.now += timedelta(seconds=20)
        await it.settle()
        assert checked(it)["reason"] == "Checking"


async def test_a_quota_that_lets_no_worker_start_is_told(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        [live] = [item for item in it.server.all("jobs") if item["metadata"]["name"] == "puzzle-workers"]
        refused = next(
            item for item in waiting_cases.load("quota-gpu-job")["events"] if item["reason"] == "FailedCreate"
        )
        regarding = {"kind": "Job", "name": "puzzle-workers", "uid": live["metadata"]["uid"]}
        it.server.put(
            {
                **refused,
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": "refused", "namespace": NAMESPACE},
                "involvedObject": regarding,
            }
        )
        it.now += timedelta(seconds=30)
        await it.settle()
        ready = condition(it.job["status"], conditions.WORKERS_READY)
        assert (ready["status"], ready["reason"]) == ("False", "QuotaExceeded")
        assert "exceeded quota: team-quota, requested: requests.nvidia.com/gpu=8" in ready["message"]


async def test_engines_are_given_back_while_no_worker_can_run(tmp_path: Path) -> None:
    def worker(phase: str, **status: Any) -> Object:
        found = pod("workers", "0", phase=phase, shard=0, **status)
        found["metadata"] |= {"namespace": NAMESPACE, "creationTimestamp": it.now.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return {"apiVersion": "v1", "kind": "Pod", **found}

    def engines() -> int:
        return len([item for item in it.server.all("deployments") if item["metadata"]["name"] == "puzzle-generation"])

    running = {"ready": True, "state": {"running": {}}}
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        it.set_status("jobs", "puzzle-workers", {"active": 1})
        it.server.put(worker("Running", container=running))
        it.now += timedelta(seconds=20)
        await it.settle()
        assert is_true(it.job["status"], conditions.WORKERS_READY)

        it.server.put(worker("Pending", conditions=unschedulable("0/3 nodes are available: 3 Insufficient cpu.")))
        it.now += timedelta(seconds=60)
        again = await it.settle()
        assert condition(it.job["status"], conditions.WORKERS_READY)["reason"] == "Unschedulable"
        assert engines() == 1
        # It is looked at again, whatever happens, until the engines have gone.
        waited = 0.0
        while engines():
            assert again is not None
            waited += again
            it.now += timedelta(seconds=again + 0.1)
            again = await it.settle()
        assert 595 <= waited <= 620
        assert condition(it.job["status"], conditions.GENERATION_READY)["reason"] == "Released"
        it.now += timedelta(hours=5)
        await it.settle()
        assert engines() == 0
        assert it.job["status"]["phase"] == "Running"

        it.server.put(worker("Running", container=running))
        await it.settle()
        assert engines() == 1
        it.now += timedelta(minutes=20)
        await it.settle()
        assert condition(it.job["status"], conditions.GENERATION_READY)["reason"] == "Starting"
        it.generation_is_ready()
        await it.settle()
        assert is_true(it.job["status"], conditions.GENERATION_READY)


def volume(*modes: str) -> Object:
    """The claim of the output."""
    metadata = {"name": "runs", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {"accessModes": list(modes), "storageClassName": "gp3"},
        "status": {"phase": "Bound"},
    }


def workers_affinity(it: Bench) -> Any:
    """That of the workers' pods."""
    [live] = [item for item in it.server.all("jobs") if item["metadata"]["name"] == "puzzle-workers"]
    return live["spec"]["template"]["spec"].get("affinity")


@pytest.mark.parametrize(
    ("modes", "replicas", "together"),
    [(["ReadWriteOnce"], 2, True), (["ReadWriteOnce"], 1, False), (["ReadWriteMany"], 2, False), ([], 2, False)],
)
async def test_workers_of_a_volume_of_one_node_are_kept_together(
    tmp_path: Path, modes: list[str], replicas: int, together: bool
) -> None:
    async with bench(tmp_path, output={"uri": "pvc://runs/a"}, workers={"replicas": replicas}) as it:
        if modes:
            it.server.put(volume(*modes))
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        affinity = workers_affinity(it)
        if not together:
            assert affinity is None
            return
        [term] = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = {"kuberoll.io/job": "puzzle", "app.kubernetes.io/component": "workers"}
        assert term["labelSelector"] == {"matchLabels": labels}
        asked = [item for item in it.server.requests if item.plural == "persistentvolumeclaims"]
        assert len(asked) == 1
        # The claim goes; what runs keeps its shape.
        it.server.remove("persistentvolumeclaims", NAMESPACE, "runs")
        written = len(it.server.writes("jobs"))
        await it.settle()
        assert workers_affinity(it) == affinity
        assert len(it.server.writes("jobs")) == written


async def test_a_users_affinity_stays_beside_that_of_the_volume(tmp_path: Path) -> None:
    own: Object = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    workers = {"podTemplate": {"spec": {"affinity": own}}}
    async with bench(tmp_path, output={"uri": "pvc://runs/a"}, workers=workers) as it:
        it.server.put(volume("ReadWriteOnce"))
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        assert set(workers_affinity(it)) == {"nodeAffinity", "podAffinity"}


async def test_several_workers_on_a_volume_of_one_pod_are_refused(tmp_path: Path) -> None:
    async with bench(tmp_path, output={"uri": "pvc://runs/a"}) as it:
        it.server.put(volume("ReadWriteOncePod"))
        await it.settle()
        failed = condition(it.job["status"], conditions.FAILURE_TARGET)
        assert failed["reason"] == "InvalidSpec"
        assert failed["message"].startswith("spec.output.uri: the claim runs is of access mode ReadWriteOncePod")


async def test_an_operator_that_may_not_read_claims_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path, output={"uri": "pvc://runs/a"}) as it:
        words = {"reason": "Forbidden", "message": "persistentvolumeclaims is forbidden"}
        it.server.faults.append(Fault(lambda asked: asked.plural == "persistentvolumeclaims", 403, words, times=None))
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        assert workers_affinity(it) is None


async def test_an_operator_that_may_not_read_events_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        words = {"reason": "Forbidden", "message": "events is forbidden"}
        it.server.faults.append(
            Fault(lambda asked: asked.plural == "events" and asked.method == "GET", 403, words, times=None)
        )
        it.now += timedelta(seconds=30)
        await it.settle()
        assert condition(it.job["status"], conditions.WORKERS_READY)["reason"] == "Starting"


def lost_worker() -> Object:
    """A worker's pod that Kubernetes has deleted, on a node that does not answer."""
    found = pod("workers", "0-a", shard=0, container={"ready": True, "state": {"running": {}}})
    found["metadata"] |= {"namespace": NAMESPACE, "uid": "u", "deletionTimestamp": "2030-01-01T00:00:00Z"}
    found["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    return {**found, "apiVersion": "v1", "kind": "Pod", "spec": {"nodeName": "node-b"}}


async def test_a_worker_on_a_lost_node_is_ended_so_that_another_takes_its_place(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        it.server.put(lost_worker())
        await it.settle()
        found = it.server.get("pods", NAMESPACE, "puzzle-workers-0-a")
        assert found is not None
        assert found["status"]["phase"] == "Failed"
        assert is_true(found["status"], "DisruptionTarget")
        # What it said as long as nobody knew: that there will be no other one.
        assert "no other pod is made" not in condition(it.job["status"], conditions.WORKERS_READY)["message"]


async def test_an_operator_that_may_not_end_lost_pods_says_what_else_brings_their_successors(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        words = {"reason": "Forbidden", "message": "pods/status is forbidden"}
        it.server.faults.append(
            Fault(lambda asked: asked.plural == "pods" and asked.method == "PATCH", 403, words, times=None)
        )
        it.server.put(lost_worker())
        await it.settle()
        told = condition(it.job["status"], conditions.WORKERS_READY)
        assert told["reason"] == "NodeLost"
        assert "no other pod is made until the node is back" in told["message"]


async def test_nobody_steps_back_for_a_job_that_has_joined_a_queue(tmp_path: Path) -> None:
    """Its last status without one said that it lacks room, and says so to nobody any more."""
    async with bench(tmp_path) as it:
        await it.settle()
        it.generation_is_ready()
        await it.settle()
        no_room = pod("workers", "0-a", shard=0, phase="Pending", conditions=unschedulable("Insufficient cpu"))
        no_room["metadata"] |= {"namespace": NAMESPACE, "uid": "u"}
        it.server.put({**no_room, "apiVersion": "v1", "kind": "Pod", "spec": {}})
        await it.settle()
        young, later = Key(NAMESPACE, "young"), it.now + timedelta(seconds=SETTINGS.turn_seconds)
        held = {"phase": "Starting", "conditions": [{"type": "GenerationReady", "status": "False",
                "reason": "Unschedulable"}, {"type": "WorkersReady", "status": "False"}]}  # fmt: skip
        created = {"metadata": {"creationTimestamp": "2999-01-01T00:00:00Z"}}
        turns = it.reconciler._turns
        turns.note(young, created, held, it.now)
        assert turns.first(young, created, later) == KEY
        it.server.put(merge(it.job, {"metadata": {"labels": {names.QUEUE_LABEL: "team"}}}))
        await it.settle()
        assert turns.first(young, created, later) is None


def checked(it: Bench) -> Object:
    """The condition of the workers' check."""
    return dict(condition(it.job["status"], conditions.WORKERS_CHECKED))
