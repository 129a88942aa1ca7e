"""Environments with isolation Remote on a real control plane: their pods, what kills them, and what keeps them away."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.api import condition, is_true
from tests.cluster.jobs import CLAIM, children, contents, read_output, rollout_job
from tests.cluster.test_lifecycle import (
    Cluster,
    check_complete,
    cluster,
    complete,
    failed,
    installed,
    message,
    reason,
)

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(300, func_only=True)


def remote_job(namespace: str, remote: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return rollout_job(namespace, environment={"isolation": "Remote", "remote": remote or {}}, **changes)


async def server_pods(cluster: Cluster) -> list[Any]:
    found = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=environment")
    return list(found)


async def test_an_environment_in_pods_of_its_own_from_apply_to_complete(cluster: Cluster) -> None:
    """Also when its pod crashes in between; a run without servers has the same trajectories."""
    cluster.operator()
    await cluster.create(remote_job(cluster.namespace, seconds=0.3))
    await cluster.stored(2)
    [pod] = await server_pods(cluster)
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    variables = {item["name"]: item for item in spec["containers"][0]["env"]}
    assert "KUBEROLL_TOKEN_GENERATE" not in variables
    assert variables["KUBEROLL_ENVIRONMENT_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "0"
    assert all("secret" not in volume for volume in spec["volumes"])
    cluster.kubelet.crash(cluster.namespace, pod["metadata"]["name"])
    check_complete(cluster, await cluster.job(complete))
    left = await children(cluster.api, cluster.namespace, ("Deployment", "ReplicaSet"))
    assert left == [], "servers end with the job"
    remotely = contents(read_output(cluster.output()))

    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()
    await cluster.create(rollout_job(cluster.namespace, output={"uri": f"pvc://{CLAIM}/inline"}))
    assert is_true(await cluster.job(complete), "Complete")
    assert remotely == contents(read_output(cluster.output("inline")))


async def test_servers_that_cannot_start_say_so_before_an_engine_is_asked_for(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(remote_job(cluster.namespace, {"image": "missing/guessing:1"}))
    item = await cluster.job(reason("WorkersChecked", "ImagePullError"))
    assert "environment puzzle: 0 of 1 servers are ready" in message(item, "WorkersChecked")
    assert "missing/guessing:1" in message(item, "WorkersChecked")
    assert await cluster.api.find("Job", cluster.namespace, "puzzles-check") is None
    assert await cluster.api.find("Deployment", cluster.namespace, "puzzles-generation") is None


async def test_an_environment_that_cannot_be_created_fails_the_job(cluster: Cluster) -> None:
    cluster.operator()
    job = remote_job(cluster.namespace)
    job["spec"]["environments"][0]["config"] = {"size": 99}
    await cluster.create(job)
    item = await cluster.job(failed)
    found = condition(item, "Failed")
    assert found is not None
    assert found["reason"] == "Refused"
    assert "size" in found["message"]
    await cluster.nothing_runs()


async def test_servers_end_when_the_job_is_suspended_and_come_again(cluster: Cluster) -> None:
    cluster.operator()
    await cluster.create(remote_job(cluster.namespace, {"replicas": 2}, seconds=0.3))
    await cluster.stored(2)
    assert len(await server_pods(cluster)) == 2
    await cluster.patch({"suspend": True})
    await cluster.job(lambda item: is_true(item, "Suspended"))
    await cluster.nothing_runs()
    await cluster.patch({"suspend": False})
    check_complete(cluster, await cluster.job(complete))
