"""NetworkPolicies of jobs with something that enforces them: who reaches whom, tried from within the containers.

`KUBEROLL_TEST_KUBE_ROUTER` names kube-router's binary; pods are containers.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster.api import Api, Object
from tests.cluster.api_proxy import ApiProxy
from tests.cluster.control_plane import ApiServer, ServerProcess, start_api_server, start_controller_manager
from tests.cluster.jobs import WORKER, make_claim, rollout_job
from tests.cluster.kubelet import Kubelet, running_kubelet
from tests.cluster.network_policies import Unusable, binary, enforced
from tests.cluster.operator_process import install
from tests.cluster.pods import containers, kind_of_pods
from tests.cluster.test_lifecycle import PATIENCE, Cluster, check_complete, complete
from tests.containers.containerd import Containerd
from tests.containers.images import PYTHON

pytestmark = pytest.mark.timeout(400, func_only=True)

NAMESPACE, ELSEWHERE = "research", "elsewhere"
METADATA = "169.254.169.254"
LISTEN = """
import http.server, os, signal, threading
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane of these tests' own: kube-router looks after all pods that it knows of."""
    try:
        binary()
    except Unusable as why:
        pytest.skip(str(why))
    if kind_of_pods() != "containers":
        pytest.skip("the pods are no containers")
    server = start_api_server(tmp_path_factory.mktemp("policies-server"))
    try:
        start_controller_manager(server)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def machine(server: ApiServer, request: pytest.FixtureRequest) -> Containerd:
    """What runs the containers, with the workers' image; not made where the test is skipped."""
    found: Containerd = request.getfixturevalue("containerd")
    request.getfixturevalue("worker_image")
    return found


@pytest.fixture(scope="module")
def kubelet(server: ApiServer, machine: Containerd) -> Iterator[Kubelet]:
    with running_kubelet(server, containers(machine), direct_services=True) as kubelet:
        yield kubelet


@pytest.fixture(scope="module")
def metadata_server(machine: Containerd) -> Iterator[None]:
    """An answer where clouds serve credentials, as pods of this machine see it."""
    space = machine.name_space
    subprocess.run(["ip", "-n", space, "addr", "add", f"{METADATA}/32", "dev", "lo"], check=True)
    route = [f"{METADATA}/32", "via", machine.name_server]
    subprocess.run(["ip", "route", "add", *route], check=True)
    bound = machine.socket_of(METADATA, 80)
    bound.listen()
    try:
        yield
    finally:
        bound.close()
        subprocess.run(["ip", "route", "del", *route], check=True)
        subprocess.run(["ip", "-n", space, "addr", "del", f"{METADATA}/32", "dev", "lo"], check=True)


@pytest_asyncio.fixture
async def api(server: ApiServer) -> AsyncIterator[Api]:
    async with Api(server.url, server.token, server.authority) as api:
        yield api


@pytest_asyncio.fixture
async def cluster(
    api: Api, server: ApiServer, kubelet: Kubelet, machine: Containerd, tmp_path: Path
) -> AsyncIterator[Cluster]:
    for name in (NAMESPACE, ELSEWHERE):
        await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        await api.wait("ServiceAccount", name, "default", lambda item: item is not None)
    token = await install(api)
    await make_claim(api, NAMESPACE)
    await name_server_as_pod(api, machine)
    proxy = ApiProxy(server.url, server.authority)
    cluster = Cluster(api, kubelet, proxy, NAMESPACE, tmp_path, token)
    try:
        yield cluster
    finally:
        for operator in cluster.operators:
            operator.stop()
        proxy.stop()


async def name_server_as_pod(api: Api, machine: Containerd) -> None:
    """The cluster's DNS is a pod of a namespace; here it is one on paper, at the name server's address."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "dns", "namespace": ELSEWHERE},
        "spec": {"nodeName": "another", "containers": [{"name": "dns", "image": "dns"}]},
    }
    await api.create(pod)
    address = machine.name_server
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    await api.patch("Pod", ELSEWHERE, "dns", {"status": status}, subresource="status")


def many_kinds(name: str, **changes: Any) -> Object:
    """A job with a pod of each kind; the service's only listens."""
    listening = {"spec": {"containers": [{"name": "service", "image": WORKER, "command": ["python", "-c", LISTEN]}]}}
    grader = {"name": "grader", "model": {"source": "org/grader"}, "podTemplate": listening}
    job = rollout_job(NAMESPACE, name, gpus=0, replicas=1, shards=1, count=4, services=[grader], **changes)
    puzzle = {**job["spec"]["environments"][0], "isolation": "Remote", "remote": {}}
    asking = {**puzzle, "name": "asking", "access": {"policy": True}}
    roaming = {**puzzle, "name": "roaming", "remote": {"allowEgress": True}}
    job["spec"]["environments"] = [puzzle, asking, roaming]
    job["spec"]["dataset"]["source"]["generator"]["environments"] = ["puzzle"]
    return job


def stranger(namespace: str, name: str, labels: Object) -> Object:
    """A pod that listens, of nobody or of another job."""
    container = {"name": "main", "image": PYTHON, "command": ["python3", "-c", LISTEN]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [container], "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1},
    }


class Pods:
    """Containers by what they are, each with its address."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self.places: dict[str, tuple[str, str, str, str]] = {}

    def add(self, what: str, pod: Object) -> None:
        metadata = pod["metadata"]
        container = pod["spec"]["containers"][0]["name"]
        self.places[what] = (metadata["namespace"], metadata["name"], container, pod["status"]["podIP"])

    async def reaches(self, what: str, target: str) -> bool:
        """Whether a connection to `WHAT:PORT`, or `ADDRESS:PORT`, is accepted."""
        namespace, name, container, _ = self.places[what]
        host, _, port = target.partition(":")
        address = self.places[host][3] if host in self.places else host
        command = ["python3", "-c", CONNECT, address, port]
        return await asyncio.to_thread(self._kubelet.execute, namespace, name, container, command) == 0

    async def reached(self, what: str, targets: Iterable[str]) -> list[str]:
        return [target for target in targets if await self.reaches(what, target)]


async def running_pods(cluster: Cluster, job: str) -> Pods:
    """The pods of a job that runs, and strangers."""
    found = Pods(cluster.kubelet)
    ready = "app.kubernetes.io/component={},kuberoll.io/job=" + job
    wanted = {
        "workers": ready.format("workers"),
        "generation": ready.format("generation"),
        "servers": ready.format("environment") + ",kuberoll.io/environment=puzzle",
        "servers with policy": ready.format("environment") + ",kuberoll.io/environment=asking",
        "servers with egress": ready.format("environment") + ",kuberoll.io/environment=roaming",
        "service": ready.format("service"),
    }
    for what, labels in wanted.items():
        found.add(what, await ready_pod(cluster, NAMESPACE, labels))
    theirs = {"app.kubernetes.io/component": "workers", "kuberoll.io/job": "another"}
    strangers: list[tuple[str, str, Object]] = [
        ("stranger", NAMESPACE, {}),
        ("another job", NAMESPACE, theirs),
        ("elsewhere", ELSEWHERE, {**theirs, "kuberoll.io/job": job}),
    ]
    for what, namespace, labels_of_it in strangers:
        name = what.replace(" ", "-")
        await cluster.api.create(stranger(namespace, name, {**labels_of_it, "stranger": name}))
        found.add(what, await ready_pod(cluster, namespace, f"stranger={name}"))
    return found


async def ready_pod(cluster: Cluster, namespace: str, labels: str) -> Object:
    async with asyncio.timeout(PATIENCE):
        while True:
            for pod in await cluster.api.list("Pod", namespace, labels=labels):
                conditions = pod.get("status", {}).get("conditions", ())
                if any(item["type"] == "Ready" and item["status"] == "True" for item in conditions):
                    return dict(pod)
            await asyncio.sleep(0.1)


JOBS_PORTS = (
    *("generation:8000", "generation:8080", "service:8000"),
    *("servers:8700", "servers with policy:8700", "servers with egress:8700"),
)
OTHERS = ("stranger:8000", "another job:8000", f"{METADATA}:80")
ALLOWED: dict[str, set[str]] = {
    "workers": {target for target in JOBS_PORTS if target != "generation:8080"},
    "servers": set(),
    "servers with policy": {"generation:8000"},
    "servers with egress": {"generation:8080", "stranger:8000", "another job:8000"},
    # What loads models reaches all but what keeps it out.
    "generation": {*OTHERS},
    "service": {"generation:8080", *OTHERS},
    "stranger": {"generation:8080", *OTHERS},
    "another job": {"generation:8080", *OTHERS},
    "elsewhere": {"generation:8080", *OTHERS},
}


def tried(what: str) -> list[str]:
    """Targets of a pod: all but itself, which no policy keeps from itself."""
    return [target for target in (*JOBS_PORTS, *OTHERS) if target.rpartition(":")[0] != what]


async def until_enforced(pods: Pods, router: ServerProcess) -> None:
    """Waits until the last of the job's pods is kept from something, and the first is."""
    async with asyncio.timeout(PATIENCE):
        while True:
            assert router.process.poll() is None, router.tail()
            if not any(
                [
                    await pods.reaches("workers", f"{METADATA}:80"),
                    await pods.reaches("servers", "generation:8000"),
                    await pods.reaches("stranger", "service:8000"),
                ]
            ):
                return


async def test_only_documented_paths_are_open(cluster: Cluster, server: ApiServer, metadata_server: None) -> None:
    cluster.operator()
    # Its first turn takes longer than the test.
    await cluster.create(many_kinds("slow", seconds=600.0))
    pods = await running_pods(cluster, "slow")
    for what in ALLOWED:
        assert await pods.reached(what, tried(what)) == tried(what), f"{what}, before anything is enforced"
    with enforced(server) as router:
        await until_enforced(pods, router)
        for what, allowed in ALLOWED.items():
            assert await pods.reached(what, tried(what)) == [item for item in tried(what) if item in allowed], what
        await cluster.api.delete("RolloutJob", NAMESPACE, "slow")
        # A whole job passes: names, check, servers, policy, service, progress.
        await cluster.create(many_kinds("quick"))
        check_complete(cluster, await cluster.job(complete, "quick"), 8, "quick")
