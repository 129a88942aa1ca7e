"""The chart on a real API server: installed, upgraded with a job under way, uninstalled and installed again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from helm_python import Config, HelmError

from kuberoll_api.manifest.loading import load_job
from kuberoll_operator.commands.render import children_of
from tests.charts.rendering import CHART, NAMESPACE, RELEASE, chart_of_version, one, rendered
from tests.cluster.api import Api, ApiError, Object, condition, is_true, path_of
from tests.cluster.control_plane import (
    ApiServer,
    MissingBinaries,
    kubeconfig,
    start_api_server,
    start_controller_manager,
)
from tests.cluster.jobs import CLAIM, children, make_claim, read_output, rollout_job
from tests.cluster.kubelet import Kubelet, running_kubelet
from tests.cluster.operator_process import OperatorProcess, token_of
from tests.cluster.pods import processes
from tests.cluster.test_crd import DRY
from tests.operator import support
from tests.operator.test_render import GOLDEN

pytestmark = pytest.mark.timeout(300)
JOBS = "research"
# No pods run here: the operator is a process of this machine, with the account that the chart makes.
VALUES = {"watch": {"namespaces": [JOBS]}, "operator": {"replicas": 0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server of these tests' own: a CRD belongs to one release."""
    try:
        server = start_api_server(tmp_path_factory.mktemp("chart-server"))
    except MissingBinaries as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()


@pytest_asyncio.fixture
async def api(server: ApiServer) -> AsyncIterator[Api]:
    async with Api(server.url, server.token, server.authority) as api:
        yield api


@pytest.fixture
def helm(server: ApiServer) -> Iterator[Config]:
    config = Config(kubeconfig_path=server.kubeconfig, namespace=NAMESPACE)
    try:
        yield config
    finally:
        config.close()


async def uids(api: Api) -> dict[str, str]:
    """What belongs to jobs, each with its identity."""
    found = {}
    for place in await children(api, JOBS):
        kind, name = place.split("/")
        item = await api.get(kind, JOBS, name)
        assert item is not None
        found[place] = str(item["metadata"]["uid"])
    return found


async def starting(api: Api) -> Object:
    """The job, as soon as its engine is awaited."""
    found = await api.wait(
        "RolloutJob",
        JOBS,
        "puzzles",
        lambda item: item is not None and bool(condition(item, "GenerationReady")),
        seconds=60,
    )
    assert found is not None
    return found


async def test_installed_upgraded_uninstalled_and_installed_again(
    server: ApiServer, api: Api, helm: Config, tmp_path: Path
) -> None:
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": JOBS}})
    first = chart_of_version("0.0.9", tmp_path)
    release = helm.install(first, RELEASE, VALUES, create_namespace=True)
    assert release["status"] == "deployed"
    for role, right in (("viewer", "list"), ("editor", "create")):
        item = await api.get("ClusterRole", None, f"kuberoll-{role}")
        assert item is not None
        assert right in {verb for rule in item["rules"] for verb in rule["verbs"]}

    async def operator() -> OperatorProcess:
        token = await token_of(api, NAMESPACE, "kuberoll-operator")
        settings = {"lease_namespace": NAMESPACE}
        made = OperatorProcess(
            tmp_path, server.url, token, namespace=JOBS, authority=server.authority, lease="kuberoll-operator",
            settings=settings,
        )  # fmt: skip
        made.start()
        return made

    running = await operator()
    try:
        await api.create(rollout_job(JOBS, light=False, gpus=0))
        await starting(api)
        before = await uids(api)
        assert "Job/puzzles-check" in before

        second = CHART
        upgraded = helm.upgrade(second, RELEASE, {**VALUES, "commonLabels": {"team": "post-training"}})
        assert (upgraded["status"], len(helm.history(RELEASE))) == ("deployed", 2)
        crd = await api.get("CustomResourceDefinition", None, "rolloutjobs.kuberoll.io")
        assert crd is not None
        assert crd["metadata"]["labels"]["team"] == "post-training"
        assert await uids(api) == before
        # Rights were not interrupted either.
        await api.patch("RolloutJob", JOBS, "puzzles", {"spec": {"startupDeadlineSeconds": 3000}})

        helm.uninstall(RELEASE)
    finally:
        running.stop()
    await api.get("CustomResourceDefinition", None, "rolloutjobs.kuberoll.io")
    with pytest.raises(ApiError, match="not found"):
        await api.get("ServiceAccount", NAMESPACE, "kuberoll-operator")
    assert await uids(api) == before

    again = helm.install(second, RELEASE, VALUES)
    assert again["status"] == "deployed"
    running = await operator()
    try:
        # The operator that comes later goes on with what it finds, and ends what is deleted meanwhile.
        await api.patch("RolloutJob", JOBS, "puzzles", {"spec": {"suspend": True}})
        await api.wait("Job", JOBS, "puzzles-check", lambda item: item is None, seconds=60)
        after = await uids(api)
        assert {place: before[place] for place in after} == after
    finally:
        running.stop()
        helm.uninstall(RELEASE)


@pytest.fixture
def node(server: ApiServer, session_id: str) -> Iterator[Kubelet]:
    """A node for the pods of the chart, and of the jobs of its operator."""
    start_controller_manager(server)
    with running_kubelet(server, processes(session_id)) as kubelet:
        yield kubelet


async def test_the_operator_as_the_chart_runs_it(
    server: ApiServer, api: Api, helm: Config, node: Kubelet, tmp_path: Path
) -> None:
    """`helm install --wait`, `helm test`, a job, `helm uninstall`, with all pods running."""
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lab"}})
    await api.wait("ServiceAccount", "lab", "default", lambda item: item is not None)
    chart = CHART
    helm.install(chart, RELEASE, {"operator": {"replicas": 0}}, create_namespace=True)
    access = tmp_path / "kubeconfig"
    token = await token_of(api, NAMESPACE, "kuberoll-operator")
    access.write_text(json.dumps(kubeconfig(server.url, token, server.authority)))
    # A process of this machine finds neither the files of its account nor an address of its own.
    environment = [
        {"name": "KUBECONFIG", "value": str(access)},
        {"name": "KUBEROLL_HTTP_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    helm.upgrade(chart, RELEASE, {"operator": {"extraEnv": environment}}, wait="watcher", timeout=120)
    try:
        [operator] = [item for item in await api.list("Pod", NAMESPACE) if "test" not in item["metadata"]["name"]]
        assert is_true(operator, "Ready")
        helm.test(RELEASE, timeout=60)
        told = node.logs(NAMESPACE, f"{RELEASE}-test")
        assert [f"{path} 200" in told for path in ("/healthz", "/readyz", "/metrics")] == [True] * 3
        assert await api.find("Pod", NAMESPACE, f"{RELEASE}-test") is None

        await make_claim(api, "lab")
        await api.create(rollout_job("lab"))
        await api.wait("RolloutJob", "lab", "puzzles", lambda item: is_true(item, "Complete"), seconds=120)
        assert len(read_output(node.claim("lab", CLAIM) / "puzzles")) == 16

        await api.delete("Service", NAMESPACE, "kuberoll-operator")
        with pytest.raises(HelmError, match=f"{RELEASE}-test"):
            helm.test(RELEASE, timeout=60)
    finally:
        helm.uninstall(RELEASE)


async def test_pod_security_restricted_admits_every_pod(api: Api) -> None:
    """Those of the chart, and those of jobs that nobody changed."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "restricted", "labels": labels}})
    # Not `default`: whether a controller makes that one depends on the tests before.
    account = {"name": "pods", "namespace": "restricted"}
    await api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    objects = rendered({"operator": {"replicas": 2}})
    pods = {
        "operator": one(objects, "Deployment")["spec"]["template"]["spec"],
        "test": one(objects, "Pod")["spec"],
    }
    for case in ("minimal", "simulated"):
        job = load_job(GOLDEN / case / "input.yaml")
        for _, child in children_of(job, "restricted", support.SETTINGS):
            if child["kind"] in {"Deployment", "Job"}:
                pods[f"{case} {child['metadata']['name']}"] = child["spec"]["template"]["spec"]
    assert len(pods) >= 8

    async def admitted(spec: Object) -> Object:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"},
            "spec": {**spec, "serviceAccountName": account["name"]},
        }
        return await api.request("POST", path_of("Pod", "restricted"), pod, parameters=DRY)

    for spec in pods.values():
        await admitted(spec)
    with pytest.raises(ApiError, match="PodSecurity"):
        await admitted({"containers": [{"name": "a", "image": "a", "securityContext": {"privileged": True}}]})
