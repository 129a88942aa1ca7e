"""Environments in sandboxes that agent-sandbox's own controller hands out of a warm pool.

KUBEROLL_TEST_AGENT_SANDBOX names the controller's binary, and KUBEROLL_TEST_AGENT_SANDBOX_CRDS the directory `k8s/crds`
of the sources that it was built from.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from ruamel.yaml import YAML

from tests.cluster.api import Api, Object, is_true
from tests.cluster.control_plane import ApiServer, ServerProcess
from tests.cluster.jobs import CLAIM, contents, read_output, rollout_job
from tests.cluster.test_lifecycle import (
    PATIENCE,
    Cluster,
    check_complete,
    cluster,
    complete,
    installed,
    message,
    reason,
)
from tests.cluster.test_servers import remote_job

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(300, func_only=True)

BINARY = os.environ.get("KUBEROLL_TEST_AGENT_SANDBOX", "")
CRDS = Path(os.environ.get("KUBEROLL_TEST_AGENT_SANDBOX_CRDS", ""))
VERSION = "extensions.agents.x-k8s.io/v1beta1"
POOL_SIZE = 2
MOUNT = "/etc/kuberoll-environment"

# As docs/how-to/remote-environments.md has it, less what only a cluster has.
TEMPLATE: Object = {
    "spec": {
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "environment",
                "image": "kuberoll/worker:test",
                "command": ["python", "-m", "kuberoll_workers.pods.environment"],
                "args": ["--config", f"{MOUNT}/environment.json", "--claimed"],
                "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                "ports": [{"name": "http", "containerPort": 8700}],
                "readinessProbe": {"tcpSocket": {"port": 8700}},
                "volumeMounts": [{"name": "claim", "mountPath": MOUNT, "readOnly": True}],
            }
        ],
        "volumes": [
            {
                "name": "claim",
                "downwardAPI": {
                    "items": [
                        {
                            "path": "environment.json",
                            "fieldRef": {"fieldPath": "metadata.annotations['kuberoll.io/environment']"},
                        }
                    ]
                },
            }
        ],
    }
}


@pytest_asyncio.fixture
async def pool(api: Api, control_plane: ApiServer, namespace: str, tmp_path: Path) -> AsyncIterator[str]:
    """A pool of two sandboxes, and the controller."""
    if not BINARY:
        pytest.skip("KUBEROLL_TEST_AGENT_SANDBOX names no controller of agent-sandbox")
    for path in sorted(CRDS.glob("*.yaml")):  # noqa: ASYNC240
        crd = YAML(typ="safe").load(path.read_text())
        # Older versions need the controller's webhook.
        crd["spec"].pop("conversion", None)
        crd["spec"]["versions"] = [version for version in crd["spec"]["versions"] if version["storage"]]
        await api.apply({**crd, "status": None})
        name = crd["metadata"]["name"]
        await api.wait("CustomResourceDefinition", None, name, lambda item: is_true(item, "Established"))
    flags = ("--extensions", "--enable-webhook=false", "--manage-webhook-certs=false", "--leader-elect=false")
    addresses = ("--metrics-bind-address=0", "--health-probe-bind-address=0")
    command = [BINARY, *flags, *addresses, f"--kubeconfig={control_plane.kubeconfig}"]
    controller = ServerProcess(command, tmp_path / "agent-sandbox.log", dict(os.environ))
    try:
        for kind, spec in (
            ("SandboxTemplate", {"podTemplate": TEMPLATE}),
            ("SandboxWarmPool", {"replicas": POOL_SIZE, "sandboxTemplateRef": {"name": "shells"}}),
        ):
            place = {"name": "shells", "namespace": namespace}
            await api.apply({"apiVersion": VERSION, "kind": kind, "metadata": place, "spec": spec})
        yield "shells"
    finally:
        controller.stop()


async def warm_pods(cluster: Cluster, pool: str) -> set[str]:
    """Names of the pool's pods, once they are ready."""
    await cluster.api.wait(
        "SandboxWarmPool",
        cluster.namespace,
        pool,
        lambda item: item is not None and item.get("status", {}).get("readyReplicas") == POOL_SIZE,
        seconds=PATIENCE,
    )
    return {item["metadata"]["name"] for item in await cluster.api.list("Pod", cluster.namespace)}


async def test_a_job_runs_in_sandboxes_that_were_warm(cluster: Cluster, pool: str) -> None:
    warm = await warm_pods(cluster, pool)
    cluster.operator()
    await cluster.create(
        remote_job(cluster.namespace, {"replicas": POOL_SIZE, "sandbox": {"warmPool": pool}}, seconds=0.3)
    )
    await cluster.stored(2)
    claimed = await cluster.api.list("Pod", cluster.namespace, labels="sandbox.users.io/kuberoll-job=puzzles")
    assert {item["metadata"]["name"] for item in claimed} == warm
    annotations = str([item["metadata"]["annotations"] for item in claimed])
    [secret] = [
        item for item in await cluster.api.list("Secret", cluster.namespace) if "env-tokens" in item["metadata"]["name"]
    ]
    token = base64.b64decode(secret["data"]["0"]).decode()
    assert token not in annotations
    assert hashlib.sha256(token.encode()).hexdigest() in annotations
    check_complete(cluster, await cluster.job(complete))
    assert await cluster.api.list("SandboxClaim", cluster.namespace) == [], "claims end with the job"
    claimed_run = contents(read_output(cluster.output()))

    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.create(rollout_job(cluster.namespace, output={"uri": f"pvc://{CLAIM}/inline"}))
    assert is_true(await cluster.job(complete), "Complete")
    assert claimed_run == contents(read_output(cluster.output("inline")))


async def test_a_pool_that_does_not_exist_is_named(cluster: Cluster, pool: str) -> None:
    cluster.operator()
    await cluster.create(remote_job(cluster.namespace, {"sandbox": {"warmPool": f"not-{pool}"}}))
    item = await cluster.job(reason("WorkersChecked", "SandboxNotReady"))
    assert "environment puzzle: 0 of 1 servers are ready" in message(item, "WorkersChecked")
    assert f"not-{pool}" in message(item, "WorkersChecked")
