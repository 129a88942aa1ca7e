"""RolloutJobs in a real control plane: real workers, the simulated engine, everything that a cluster does to them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.cluster.api import Api, ApiError, Object, condition, is_true
from tests.cluster.api_proxy import ApiProxy, Write
from tests.cluster.control_plane import ApiServer
from tests.cluster.jobs import (
    CHILD_KINDS,
    CLAIM,
    children,
    contents,
    make_claim,
    read_output,
    rollout_job,
    stored_lines,
)
from tests.cluster.kubelet import Kubelet
from tests.cluster.operator_process import CRD, OperatorProcess, install
from tests.cluster.pods import kind_of_pods
from tests.cluster.services import is_ready

# Where pods are containers, their images are built before, in fixtures.
pytestmark = pytest.mark.timeout(300, func_only=True)
PATIENCE = 150.0

# Events included; the last ones may be more than there are, and are skipped then.
KILLED_AFTER = range(1, 31)


class Cluster:
    """One namespace, its operator, and the door between that and the API server."""

    def __init__(
        self, api: Api, kubelet: Kubelet, proxy: ApiProxy, namespace: str, directory: Path, token: str
    ) -> None:
        self.api, self.kubelet, self.proxy, self.namespace = api, kubelet, proxy, namespace
        self._directory, self._token = directory, token
        self.operators: list[OperatorProcess] = []

    def operator(self, *, start: bool = True, lease: str | None = None, **settings: object) -> OperatorProcess:
        """An operator of this namespace."""
        made = OperatorProcess(
            self._directory,
            self.proxy.url,
            self._token,
            namespace=self.namespace,
            lease=lease or self.namespace,
            settings=settings,
        )
        self.operators.append(made)
        if start:
            made.start()
        return made

    async def create(self, job: Object) -> Object:
        return await self.api.create(job)

    async def job(
        self, until: Callable[[Object], bool], name: str = "puzzles", *, why: str = "", seconds: float = PATIENCE
    ) -> Object:
        """The job as soon as `until` says so.

        Raises:
            AssertionError: Not in time; with what the operator and the pods wrote.
        """
        try:
            found = await self.api.wait(
                "RolloutJob",
                self.namespace,
                name,
                lambda item: item is not None and until(item),
                seconds=seconds,
                why=why,
            )
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.said()}") from None
        assert found is not None
        return found

    async def gone(self, kind: str, name: str) -> None:
        await self.api.wait(kind, self.namespace, name, lambda item: item is None, seconds=PATIENCE, why="to be gone")

    async def patch(self, spec: Object, name: str = "puzzles") -> Object:
        return await self.api.patch("RolloutJob", self.namespace, name, {"spec": spec})

    async def nothing_left(self) -> None:
        """Waits until no child, no pod and no process of a job is left."""
        for _ in range(600):
            if not await children(self.api, self.namespace) and not self.kubelet.running(self.namespace):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"left: {await children(self.api, self.namespace)}\n{self.said()}")

    async def nothing_runs(self) -> None:
        """Waits until no process of a pod is left, and sees that nothing holds a GPU or will make such a pod."""
        for _ in range(600):
            # A pod's GPUs are free when the API server has let go of it, a moment after its processes.
            if not self.kubelet.running(self.namespace) and not self.kubelet.used("nvidia.com/gpu"):
                break
            await asyncio.sleep(0.1)
        assert self.kubelet.running(self.namespace) == [], self.said()
        assert self.kubelet.used("nvidia.com/gpu") == 0
        assert await children(self.api, self.namespace, ("Deployment", "ReplicaSet")) == []

    async def stored(self, more_than: int, name: str = "puzzles") -> None:
        """Waits until more than so many trajectories are on the claim."""
        for _ in range(int(PATIENCE / 0.05)):
            if len(stored_lines(self.output(name))) > more_than:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"no more than {more_than} trajectories\n{self.said()}")

    def output(self, name: str = "puzzles") -> Path:
        return self.kubelet.claim(self.namespace, CLAIM) / name

    def writes(self) -> list[Write]:
        """What was written, events apart."""
        return [write for write in self.proxy.writes if "/events" not in write.path]

    def said(self) -> str:
        logs = "".join(
            f"--- {item.log.name}\n{item.process.tail(6000)}\n" for item in self.operators if item.log.exists()
        )
        return f"{logs}\n{self.kubelet.logs(self.namespace)[-6000:]}\nwrites: {self.proxy.writes[-20:]}"


@pytest.fixture(scope="session")
def installed() -> dict[str, str]:
    return {}


@pytest_asyncio.fixture
async def cluster(
    api: Api,
    control_plane: ApiServer,
    kubelet: Kubelet,
    light_pods: None,
    namespace: str,
    tmp_path: Path,
    installed: dict[str, str],
) -> AsyncIterator[Cluster]:
    if not CRD.is_file():
        pytest.skip(f"no {CRD}")
    if not installed:
        installed["token"] = await install(api)
    await make_claim(api, namespace)
    proxy = ApiProxy(control_plane.url, control_plane.authority)
    cluster = Cluster(api, kubelet, proxy, namespace, tmp_path, installed["token"])
    try:
        yield cluster
    finally:
        proxy.after_write = None
        for operator in cluster.operators:
            operator.stop()
        proxy.stop()


def complete(item: Object) -> bool:
    return is_true(item, "Complete") or is_true(item, "Failed")


def failed(item: Object) -> bool:
    return is_true(item, "Failed")


def phase(name: str) -> Callable[[Object], bool]:
    return lambda item: bool(item.get("status", {}).get("phase") == name)


def reason(kind: str, name: str) -> Callable[[Object], bool]:
    return lambda item: (condition(item, kind) or {}).get("reason") == name


def message(item: Object, kind: str) -> str:
    return str((condition(item, kind) or {}).get("message"))


def check_complete(cluster: Cluster, item: Object, trajectories: int = 16, name: str = "puzzles") -> None:
    """The job is Complete, with all its trajectories, their numbers and its report."""
    assert is_true(item, "Complete"), f"{json.dumps(item.get('status'), indent=1)}\n{cluster.said()}"
    output = cluster.output(name)
    assert len(read_output(output)) == trajectories
    # Not one of them twice, not even one that readers would leave out.
    assert len(stored_lines(output)) == trajectories
    assert (output / "report.html").is_file()
    numbers = json.loads((output / "aggregate_metrics.json").read_text())["environments"]["puzzle"]
    assert numbers["trajectories"] == trajectories
    status = item["status"]
    assert status["progress"]["trajectories"] == trajectories
    assert status["progress"]["meanReward"] == pytest.approx(numbers["fields"]["total_reward"]["mean"], abs=1e-6)
    assert status["phase"] == "Succeeded"
    assert is_true(item, "SuccessCriteriaMet")
    assert status["completionTime"] >= status["startTime"]


async def test_a_job_from_apply_to_complete(cluster: Cluster) -> None:
    # Progress is written when a condition changes: how often else depends on how long the job takes here.
    operator = cluster.operator(progress_seconds=3600)
    await cluster.create(rollout_job(cluster.namespace))
    done = await cluster.job(complete)
    check_complete(cluster, done)
    assert cluster.kubelet.used("nvidia.com/gpu") == 0
    left = await children(cluster.api, cluster.namespace, ("Deployment", "ReplicaSet"))
    assert left == [], "GPUs are money"
    assert cluster.kubelet.running(cluster.namespace) == []
    # The last event comes after the status that it tells of.
    writes = cluster.writes()
    written = Counter((write.method, write.path) for write in writes)
    statuses = sum(written.pop(key) for key in list(written) if key[1].endswith("/status"))
    assert statuses <= 12, writes
    assert set(written.values()) == {1}, "no child is written twice"
    # Level-triggered, but not restless: what is over is not touched again.
    operator.kill()
    operator.start()
    assert cluster.writes() == writes
    before = await cluster.api.get("RolloutJob", cluster.namespace, "puzzles")
    assert before["metadata"]["resourceVersion"] == done["metadata"]["resourceVersion"]
    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()


async def test_a_job_with_ray_serve(cluster: Cluster, ray_pods: None) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, light=False, count=4))
    check_complete(cluster, await cluster.job(complete), 8)


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    return {}


async def _uninterrupted(cluster: Cluster, expected: dict[str, Any]) -> Any:
    if not expected:
        await cluster.create(rollout_job(cluster.namespace))
        check_complete(cluster, await cluster.job(complete))
        expected["contents"] = contents(read_output(cluster.output()))
        await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
        await cluster.nothing_left()
        for path in cluster.output().iterdir():
            if path.is_file():
                path.unlink()
    return expected["contents"]


async def test_suspended_and_resumed_in_the_middle(cluster: Cluster, expected: dict[str, Any]) -> None:
    cluster.operator()
    whole = await _uninterrupted(cluster, expected)
    # Few at a time: what is in flight is finished, and there must be something left after it.
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5, rollout={"concurrency": 1}))
    await cluster.stored(2)
    await cluster.patch({"suspend": True})
    await cluster.job(lambda item: is_true(item, "Suspended"), why="to be suspended")
    await cluster.gone("Deployment", "puzzles-generation")
    await cluster.nothing_runs()
    before = len(stored_lines(cluster.output()))
    assert before < 16, "it was over before it was suspended"
    await cluster.patch({"suspend": False})
    done = await cluster.job(complete)
    check_complete(cluster, done)
    assert contents(read_output(cluster.output())) == whole


async def test_created_suspended_costs_nothing(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, suspend=True))
    item = await cluster.job(lambda item: is_true(item, "Suspended"))
    assert item["status"]["phase"] == "Suspended"
    assert await children(cluster.api, cluster.namespace, ("Deployment", "Pod")) == []
    await cluster.patch({"suspend": False})
    check_complete(cluster, await cluster.job(complete))


async def test_deleted_in_the_middle(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5))
    await cluster.stored(1)
    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()
    assert cluster.kubelet.used("nvidia.com/gpu") == 0


async def test_deleted_without_an_operator(cluster: Cluster) -> None:
    operator = cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5))
    await cluster.stored(1)
    operator.kill()
    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()


async def test_a_job_that_fits_nowhere_says_so(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, gpus=99))
    item = await cluster.job(reason("GenerationReady", "Unschedulable"))
    assert "Insufficient nvidia.com/gpu" in message(item, "GenerationReady")
    assert condition(item, "GenerationReady")["status"] == "False"  # type: ignore[index]
    assert await cluster.api.find("Job", cluster.namespace, "puzzles-workers") is None


async def test_an_image_that_is_not_there(cluster: Cluster) -> None:
    cluster.operator()
    # The light engine's template names an image of its own.
    await cluster.create(rollout_job(cluster.namespace, light=False, generation={"image": "missing/engine:1"}))
    item = await cluster.job(reason("GenerationReady", "ImagePullError"))
    assert "missing/engine:1" in message(item, "GenerationReady")


async def test_an_engine_that_does_not_start(cluster: Cluster, ray_pods: None) -> None:
    """The real pod, for it is its own words that are to come through."""
    cluster.operator()
    generation = {"model": {"source": "/no/such/model"}}
    await cluster.create(rollout_job(cluster.namespace, light=False, generation=generation))
    item = await cluster.job(lambda item: "/no/such/model" in json.dumps(item.get("status", {}).get("conditions")))
    said = message(item, "GenerationReady") + message(item, "FailureTarget") + message(item, "Failed")
    assert "/no/such/model" in said
    assert len(said) < 4096


@pytest.mark.engine
async def test_an_argument_that_vllm_does_not_know(cluster: Cluster, ray_pods: None) -> None:
    cluster.operator()
    generation: Object = {"engine": "VLLM", "simulated": None, "engineArgs": {"max_modle_len": 64}}
    await cluster.create(rollout_job(cluster.namespace, light=False, generation=generation))
    await cluster.job(lambda item: "max_modle_len" in json.dumps(item.get("status", {}).get("conditions")))


async def test_an_engine_that_is_not_ready_in_time(cluster: Cluster) -> None:
    cluster.operator()
    command = ["python", "-c", "import signal; signal.pause()"]
    template = {"spec": {"containers": [{"name": "generation", "command": command}]}}
    job = rollout_job(cluster.namespace, generation={"podTemplate": template}, startupDeadlineSeconds=3)
    await cluster.create(job)
    item = await cluster.job(failed)
    assert condition(item, "Failed")["reason"] == "StartupDeadlineExceeded"  # type: ignore[index]
    await cluster.nothing_runs()


async def test_a_shard_that_cannot_be_done_fails_the_job(cluster: Cluster) -> None:
    cluster.operator()
    job = rollout_job(cluster.namespace, shards=1, replicas=1, workers={"retriesPerShard": 0})
    job["spec"]["environments"] = [{"name": "puzzle", "entrypoint": "tests.cluster.crashing:Crashing"}]
    job["spec"]["dataset"] = {"source": {"rows": [{"prompt": "x", "task_name": "puzzle"}]}}
    await cluster.create(job)
    item = await cluster.job(failed)
    found = condition(item, "Failed")
    assert found is not None
    assert found["reason"] == "FailedShards"
    assert "shard 0" in found["message"] or "index 0" in found["message"] or "shards 0" in found["message"]
    assert is_true(item, "FailureTarget")
    assert item["status"]["phase"] == "Failed"
    await cluster.nothing_runs()


async def test_a_crashed_worker_is_retried(cluster: Cluster, expected: dict[str, Any]) -> None:
    cluster.operator()
    whole = await _uninterrupted(cluster, expected)
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5))
    await cluster.stored(2)
    pods = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=workers")
    cluster.kubelet.crash(cluster.namespace, pods[0]["metadata"]["name"])
    check_complete(cluster, await cluster.job(complete))
    assert contents(read_output(cluster.output())) == whole


async def test_an_evicted_worker_is_replaced(cluster: Cluster, expected: dict[str, Any]) -> None:
    cluster.operator()
    whole = await _uninterrupted(cluster, expected)
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5, workers={"retriesPerShard": 0}))
    await cluster.stored(2)
    pods = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=workers")
    cluster.kubelet.evict(cluster.namespace, pods[0]["metadata"]["name"])
    check_complete(cluster, await cluster.job(complete))
    assert contents(read_output(cluster.output())) == whole


async def test_a_crashed_engine_comes_back(cluster: Cluster, expected: dict[str, Any]) -> None:
    cluster.operator()
    whole = await _uninterrupted(cluster, expected)
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5))
    await cluster.stored(2)
    pods = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=generation")
    cluster.kubelet.crash(cluster.namespace, pods[0]["metadata"]["name"])
    check_complete(cluster, await cluster.job(complete))
    assert contents(read_output(cluster.output())) == whole


async def test_time_to_live(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, count=2, ttlSecondsAfterFinished=1))
    await cluster.job(complete)
    await cluster.gone("RolloutJob", "puzzles")
    await cluster.nothing_left()
    assert len(read_output(cluster.output())) == 4, "the output is the user's"


async def test_the_active_deadline(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=30, activeDeadlineSeconds=5))
    item = await cluster.job(failed)
    assert condition(item, "Failed")["reason"] == "DeadlineExceeded"  # type: ignore[index]
    await cluster.nothing_runs()


async def test_scale_changes_only_how_many_work_at_once(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, shards=4, replicas=1, seconds=0.5))

    def workers(count: int) -> Callable[[Object | None], bool]:
        return lambda item: bool(item and item["spec"]["parallelism"] == count)

    await cluster.api.wait("Job", cluster.namespace, "puzzles-workers", workers(1), seconds=PATIENCE)
    path = f"/apis/kuberoll.io/v1alpha1/namespaces/{cluster.namespace}/rolloutjobs/puzzles/scale"
    scaled = await cluster.api.request(
        "PATCH", path, {"spec": {"replicas": 3}}, content_type="application/merge-patch+json"
    )
    assert scaled["spec"]["replicas"] == 3
    found = await cluster.api.wait("Job", cluster.namespace, "puzzles-workers", workers(3), seconds=PATIENCE)
    assert found is not None
    assert found["spec"]["completions"] == 4
    check_complete(cluster, await cluster.job(complete))


@asynccontextmanager
async def named_engines(cluster: Cluster, file: Path) -> AsyncIterator[Object]:
    """Options of workers that find the engines by a name whose addresses change, in processes, too."""

    async def follow() -> None:
        while True:
            # Not from EndpointSlices, which take no addresses of this machine itself.
            ready = [pod["status"]["podIP"] for pod in await engine_pods(cluster) if is_ready(pod)]
            written = file.with_suffix(".new")
            written.write_text("\n".join(ready))
            written.replace(file)
            await asyncio.sleep(0.1)

    if kind_of_pods() == "containers":
        yield {}
        return
    # Written so that a directory of the tests below /tmp is not taken for one of the pod's.
    path = os.pathsep.join(f"/.{part}" for part in [Path(__file__).parent / "names", *sys.path] if str(part)[:1] == "/")
    variables = {"KUBEROLL_TEST_NAMES": f"/.{file}", "PYTHONPATH": path}
    following = asyncio.create_task(follow())
    try:
        yield {"env": [{"name": name, "value": value} for name, value in variables.items()]}
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_engines_are_scaled_up_and_down_in_mid_run(
    cluster: Cluster, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Turns are on both of two engines when one of them goes; none is lost, and none is there twice."""
    cluster.operator()
    whole = await _uninterrupted(cluster, expected)
    # Few at a time: an engine takes a while to start, and something must be left when it goes.
    few: dict[str, Any] = {
        "shards": 1,
        "replicas": 1,
        "rollout": {"concurrency": 2},
        "generation": {"routing": "LeastLoaded"},
    }
    async with named_engines(cluster, tmp_path / "engines") as workers:
        await cluster.create(rollout_job(cluster.namespace, seconds=1.0, workers=workers, **few))
        await cluster.stored(0)
        [first] = await engine_pods(cluster)
        await cluster.patch({"generation": {"replicas": 2}})
        scaled = await cluster.job(lambda item: item["status"].get("generation", {}).get("readyReplicas") == 2)
        assert is_true(scaled, "GenerationReady")
        there = {pod["metadata"]["name"]: pod for pod in await engine_pods(cluster)}
        # The engine that ran goes on.
        assert there.pop(first["metadata"]["name"])["metadata"]["uid"] == first["metadata"]["uid"]
        [second] = there.values()
        await used(cluster, second)
        await cluster.patch({"generation": {"replicas": 1}})
        await cluster.job(lambda item: item["status"].get("generation", {}).get("desiredReplicas") == 1)
        assert len(stored_lines(cluster.output())) < 16, "it was over before an engine went"
        check_complete(cluster, await cluster.job(complete))
    assert contents(read_output(cluster.output())) == whole


async def test_a_drain_takes_one_engine_at_a_time(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=2.0, generation={"replicas": 2}))
    await cluster.job(lambda item: item.get("status", {}).get("generation", {}).get("readyReplicas") == 2)
    await cluster.api.wait(
        "PodDisruptionBudget",
        cluster.namespace,
        "puzzles-generation",
        lambda item: item is not None and item.get("status", {}).get("disruptionsAllowed") == 1,
        seconds=PATIENCE,
    )
    first, second = [pod["metadata"]["name"] for pod in await engine_pods(cluster)]
    await evict(cluster, first)
    with pytest.raises(ApiError, match="disruption budget") as refused:
        await evict(cluster, second)
    assert refused.value.status == 429


async def evict(cluster: Cluster, pod: str) -> None:
    """Asks for the eviction of a pod, as a drain does."""
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/eviction"
    metadata = {"name": pod, "namespace": cluster.namespace}
    await cluster.api.request("POST", path, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})


async def engine_pods(cluster: Cluster) -> list[Object]:
    return await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=generation")


async def used(cluster: Cluster, pod: Object) -> None:
    """Waits until an engine has been asked for a response."""
    url = f"http://{pod['status']['podIP']}:8080/asked"
    async with aiohttp.ClientSession() as http:
        for _ in range(int(PATIENCE / 0.05)):
            async with http.get(url) as answer:
                if int(await answer.text()):
                    return
            await asyncio.sleep(0.05)
    raise AssertionError(f"nobody asks the second engine\n{cluster.said()}")


async def test_a_job_of_another_manager_is_left_alone(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, "theirs", managedBy="kueue.x-k8s.io/multikueue"))
    await cluster.create(rollout_job(cluster.namespace, count=2))
    await cluster.job(complete)
    theirs = await cluster.api.get("RolloutJob", cluster.namespace, "theirs")
    assert "status" not in theirs
    assert all("theirs" not in write.path for write in cluster.proxy.writes)


async def test_two_operators_of_which_one_is_stopped_in_mid_run(cluster: Cluster, expected: dict[str, Any]) -> None:
    """As in an upgrade: the other one goes on with what is there."""
    first = cluster.operator()
    second = cluster.operator(start=False)
    second.start(ready=False)
    whole = await _uninterrupted(cluster, expected)
    earlier = len(cluster.writes())
    await cluster.create(rollout_job(cluster.namespace, seconds=0.5, rollout={"concurrency": 1}))
    await cluster.stored(1)
    before = await uids(cluster)
    assert first.terminate() == 0
    # The other one holds the lease, and does what only its holder does.
    await cluster.patch({"workers": {"replicas": 1}})
    await cluster.api.wait(
        "Job",
        cluster.namespace,
        "puzzles-workers",
        lambda item: item is not None and item["spec"]["parallelism"] == 1,
        seconds=PATIENCE,
        why="to be written by the second operator",
    )
    now = await uids(cluster)
    assert {key: uid for key, uid in now.items() if key[0] != "Pod"} == {
        key: uid for key, uid in before.items() if key[0] != "Pod"
    }
    check_complete(cluster, await cluster.job(complete))
    assert contents(read_output(cluster.output())) == whole
    # One status was never written over by another: the conditions are in the order that they came in.
    created = [write.path for write in cluster.writes()[earlier:] if write.status == 201]
    assert len(set(created)) == len(created)


async def uids(cluster: Cluster) -> dict[tuple[str, str], str]:
    """Of all children, by kind and name."""
    return {
        (kind, item["metadata"]["name"]): item["metadata"]["uid"]
        for kind in CHILD_KINDS
        for item in await cluster.api.list(kind, cluster.namespace, labels="kuberoll.io/job")
    }


@pytest.mark.parametrize("number", KILLED_AFTER)
async def test_an_operator_killed_after_any_write_loses_nothing(
    cluster: Cluster, number: int, expected: dict[str, Any]
) -> None:
    """It dies after the server has taken its n-th write and before it is told so; another takes over."""
    operator = cluster.operator(start=False)
    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def kill(count: int, _: Write) -> None:
        if count == number:
            operator.kill()
            loop.call_soon_threadsafe(died.set)

    cluster.proxy.after_write = kill
    operator.start()
    await cluster.create(rollout_job(cluster.namespace, count=4))
    finished = asyncio.create_task(cluster.job(complete))
    await asyncio.wait({finished, asyncio.ensure_future(died.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if died.is_set():
        operator.start(ready=False)
    check_complete(cluster, await finished, 8)
    assert await children(cluster.api, cluster.namespace, ("Deployment", "ReplicaSet")) == []
    assert cluster.kubelet.used("nvidia.com/gpu") == 0
    if not died.is_set():
        pytest.skip(f"the whole life of a job is {len(cluster.proxy.writes)} writes")


@pytest.mark.parametrize("status", [409, 410, 429, 500])
async def test_errors_of_the_api_server_pass(cluster: Cluster, status: int) -> None:
    """Every third write is refused."""
    cluster.operator()
    count = iter(range(1, 10**6))

    def fault(method: str, path: str) -> int | None:
        if method in ("POST", "PATCH", "DELETE") and "/leases" not in path:
            return status if next(count) % 3 == 0 else None
        return None

    cluster.proxy.fault = fault
    await cluster.create(rollout_job(cluster.namespace, count=4))
    check_complete(cluster, await cluster.job(complete), 8)


async def test_an_api_server_that_is_away_for_a_while(cluster: Cluster) -> None:
    operator = cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=0.3))
    await cluster.stored(1)
    cluster.proxy.go_away()
    # Longer than the lease: it must not work on, and come back as the leader.
    await asyncio.sleep(5)
    cluster.proxy.come_back()
    if not operator.is_running():
        operator.start(ready=False)
    check_complete(cluster, await cluster.job(complete))


async def test_watches_that_break_miss_nothing(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, seconds=0.3))
    finished = asyncio.create_task(cluster.job(complete))
    while not finished.done():
        cluster.proxy.cut_watches()
        await asyncio.wait({finished}, timeout=1)
    check_complete(cluster, await finished)


async def test_without_the_right_to_make_deployments(cluster: Cluster) -> None:
    cluster.operator()
    cluster.proxy.fault = lambda method, path: 403 if method in ("PATCH", "POST") and "/deployments" in path else None
    await cluster.create(rollout_job(cluster.namespace, count=4))
    await cluster.job(reason("GenerationReady", "Forbidden"))
    cluster.proxy.fault = None
    # Rights may be given at any time; the job goes on by itself, only not at once.
    check_complete(cluster, await cluster.job(complete), 8)


async def test_a_pod_template_that_is_none(cluster: Cluster) -> None:
    cluster.operator()
    template = {"spec": {"containers": [{"name": "generation", "imagePullPolicy": "Sometimes"}]}}
    await cluster.create(rollout_job(cluster.namespace, generation={"podTemplate": template}))
    item = await cluster.job(failed)
    found = condition(item, "Failed")
    assert found is not None
    assert found["reason"] == "InvalidTemplate"
    assert "imagePullPolicy" in found["message"]


async def test_a_name_that_somebody_else_has(cluster: Cluster) -> None:
    cluster.operator()
    metadata = {"name": "puzzles-config", "namespace": cluster.namespace, "labels": {"kuberoll.io/job": "someone"}}
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"job.json": "{}"}}
    await cluster.api.apply(theirs)
    await cluster.create(rollout_job(cluster.namespace, count=4))
    await cluster.job(lambda item: "NameTaken" in json.dumps(item.get("status", {}).get("conditions", [])))
    left = await cluster.api.get("ConfigMap", cluster.namespace, "puzzles-config")
    assert left["data"] == {"job.json": "{}"}


async def test_an_external_endpoint(cluster: Cluster) -> None:
    from tests.local.support import Endpoint

    cluster.operator()
    async with Endpoint().serving(host=cluster.kubelet.node.address) as endpoint:
        generation = {"backend": "External", "external": {"url": endpoint.url}, "podTemplate": None, "resources": None}
        job = rollout_job(cluster.namespace, count=4, generation=generation)
        job["spec"]["generation"] = {
            key: value for key, value in job["spec"]["generation"].items() if value is not None
        }
        await cluster.create(job)
        item = await cluster.job(complete)
    check_complete(cluster, item, 8)
    assert condition(item, "GenerationReady") is not None
    assert item["status"]["generation"]["backend"] == "External"


async def test_an_output_that_would_be_lost_is_refused(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(rollout_job(cluster.namespace, output={"uri": "runs/mine"}))
    item = await cluster.job(failed)
    found = condition(item, "Failed")
    assert found is not None
    assert found["reason"] == "InvalidSpec"
    assert "spec.output.uri" in found["message"]
    assert await children(cluster.api, cluster.namespace) == []
