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

from tests.cluster.api import Api, Object, is_true
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
# Exit codes are bytes: statuses count from 200, and nothing answers 454 or 455.
UNREACHED, BROKEN = 254, 255
ASK = """
import json, os, socket, sys, urllib.error, urllib.parse, urllib.request
def ask(url, token, body=None, method="POST"):
    place = urllib.parse.urlsplit(url)
    socket.create_connection((place.hostname, place.port), 3).close()
    headers = {"authorization": "Bearer " + token, "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=50) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None
def session(endpoint, token):
    status, made = ask(endpoint + "/sessions", token, {})
    if status != 201:
        return status
    if urllib.parse.urlsplit(made["url"]).hostname == urllib.parse.urlsplit(endpoint).hostname:
        return 455
    status, _ = ask(made["openai_base_url"] + "/chat/completions", made["token"], chat)
    if status != 200:
        return status
    status, ended = ask(made["url"], made["token"], method="DELETE")
    return status if len(ended["trajectories"]) == 1 else 455
chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
url, token = os.environ["KUBEROLL_POLICY_URL"], os.environ["KUBEROLL_POLICY_TOKEN"]
try:
    match sys.argv[1]:
        case "chat":
            found, _ = ask(url + "/chat/completions", token, chat)
        case "weights":
            found, _ = ask(url + "/weights", token, {"uri": "/tmp/none", "version": "9"})
        case "session":
            found = session(url.removesuffix("/v1"), token)
except OSError:
    found = 454
sys.exit(found - 200)
"""


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


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """The operator's token, once it is installed: the tests share a cluster."""
    return {}


@pytest.fixture(scope="module")
def engines(machine: Containerd, request: pytest.FixtureRequest) -> None:
    """The image of generation pods with Ray Serve; not made where the test is skipped."""
    request.getfixturevalue("generation_image")


@pytest_asyncio.fixture
async def cluster(
    api: Api, server: ApiServer, kubelet: Kubelet, machine: Containerd, installed: dict[str, str], tmp_path: Path
) -> AsyncIterator[Cluster]:
    if not installed:
        for name in (NAMESPACE, ELSEWHERE):
            await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
            await api.wait("ServiceAccount", name, "default", lambda item: item is not None)
        installed["token"] = await install(api)
        await make_claim(api, NAMESPACE)
        await name_server_as_pod(api, machine)
    proxy = ApiProxy(server.url, server.authority)
    cluster = Cluster(api, kubelet, proxy, NAMESPACE, tmp_path, installed["token"])
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


def stranger(namespace: str, name: str, labels: Object, **given: Any) -> Object:
    """A pod that listens, of nobody or of another job; `given` are fields of its container."""
    container = {"name": "main", "image": PYTHON, "command": ["python3", "-c", LISTEN], **given}
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

    async def asks(self, what: str, question: str) -> int:
        """The policy's answer to a pod with the address and the token that it has: a status of HTTP, or a sign."""
        namespace, name, container, _ = self.places[what]
        command = ["python3", "-c", ASK, question]
        code = await asyncio.to_thread(self._kubelet.execute, namespace, name, container, command)
        return code if code in (UNREACHED, BROKEN) else code + 200

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


def open_job(name: str) -> Object:
    """Two replicas behind Ray Serve, each in a pod; who reaches them is a pod of each kind."""
    judge = {"name": "judge", "podSelector": {"matchLabels": {"app": "judge"}}}
    trainer = {
        "name": "trainer",
        "podSelector": {"matchLabels": {"app": "trainer"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ELSEWHERE}},
        "scopes": ["generate", "weights"],
        "tokenSecret": {"name": "trainer"},
    }
    generation = {"access": [judge, trainer], "replicas": 2}
    job = rollout_job(
        NAMESPACE, name, gpus=0, replicas=1, shards=1, count=20_000, seconds=0.2, light=False, generation=generation
    )
    puzzle = {**job["spec"]["environments"][0], "isolation": "Remote", "remote": {}}
    job["spec"]["environments"] = [puzzle, {**puzzle, "name": "asking", "access": {"policy": True}}]
    job["spec"]["dataset"]["source"]["generator"]["environments"] = ["puzzle"]
    return job


def users(url: str) -> dict[str, Object]:
    """Pods outside the job, which all have an address and a token of its policy."""
    judges: Object = {"envFrom": [{"secretRef": {"name": "open-access-judge"}}]}
    token = {"name": "KUBEROLL_POLICY_TOKEN", "valueFrom": {"secretKeyRef": {"name": "trainer", "key": "token"}}}
    trainers: Object = {"env": [{"name": "KUBEROLL_POLICY_URL", "value": url}, token]}
    return {
        "judge": stranger(NAMESPACE, "judge", {"app": "judge"}, **judges),
        "judge without the label": stranger(NAMESPACE, "unlabelled", {}, **judges),
        "judge elsewhere": stranger(ELSEWHERE, "judge", {"app": "judge"}, **trainers),
        "trainer": stranger(ELSEWHERE, "trainer", {"app": "trainer"}, **trainers),
        "trainer in the job's namespace": stranger(NAMESPACE, "trainer", {"app": "trainer"}, **trainers),
    }


SAMPLES = {"chat": 200, "session": 200, "weights": 403}
PUBLISHES = {"chat": 200, "session": 200, "weights": 202}
KEPT_OUT = dict.fromkeys(SAMPLES, UNREACHED)
ANSWERED = {
    "servers with policy": SAMPLES,
    "judge": SAMPLES,
    "judge without the label": KEPT_OUT,
    "judge elsewhere": KEPT_OUT,
    "trainer in the job's namespace": KEPT_OUT,
    "trainer": PUBLISHES,
}


async def test_who_has_access_samples_in_sessions_and_nobody_else_does(
    cluster: Cluster, server: ApiServer, engines: None
) -> None:
    for namespace in (NAMESPACE, ELSEWHERE):
        metadata = {"name": "trainer", "namespace": namespace}
        token = {"token": "chosen-by-the-trainer-itself"}
        await cluster.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": token})
    cluster.operator()
    await cluster.create(open_job("open"))
    pods = Pods(cluster.kubelet)
    label = "app.kubernetes.io/component=environment,kuberoll.io/job=open,kuberoll.io/environment="
    pods.add("servers", await ready_pod(cluster, NAMESPACE, label + "puzzle"))
    pods.add("servers with policy", await ready_pod(cluster, NAMESPACE, label + "asking"))
    for what, pod in users(f"http://open-generation.{NAMESPACE}.svc:8000/v1").items():
        metadata = pod["metadata"]
        metadata["labels"]["user"] = metadata["name"]
        await cluster.api.create(pod)
        pods.add(what, await ready_pod(cluster, metadata["namespace"], f"user={metadata['name']}"))
    await cluster.job(lambda item: is_true(item, "GenerationReady"), "open")
    both = await cluster.api.list(
        "Pod", NAMESPACE, labels="app.kubernetes.io/component=generation,kuberoll.io/job=open"
    )
    assert len(both) == 2
    for number, pod in enumerate(both):
        pods.add(f"replica {number}", pod)
    # Whoever has a token and a way samples: from here on, only the way is taken.
    assert await pods.asks("judge without the label", "session") == 200
    with enforced(server) as router:
        await until_kept_out(pods, router)
        for what, answers in ANSWERED.items():
            assert {question: await pods.asks(what, question) for question in answers} == answers, what
        # Without a token there is nothing to ask with, and no way either.
        assert await pods.reached("servers", ["replica 0:8000", "replica 1:8000"]) == []
        assert await pods.reached("judge", ["replica 0:8000", "replica 1:8000", "servers:8700"]) == [
            "replica 0:8000",
            "replica 1:8000",
        ]


async def until_kept_out(pods: Pods, router: ServerProcess) -> None:
    """Waits until those without access are kept from both replicas."""
    async with asyncio.timeout(PATIENCE):
        while True:
            assert router.process.poll() is None, router.tail()
            kept = ("servers", "judge without the label", "judge elsewhere", "trainer in the job's namespace")
            if not any([await pods.reached(what, ["replica 0:8000", "replica 1:8000"]) for what in kept]):
                return
