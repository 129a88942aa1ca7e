"""Services, further served models, on a real control plane: vLLM's own server in pods, which environments ask."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.classifier import ENGINE_ARGS, VARIABLES, logits, make_classifier
from tests.cluster.api import Object, condition, is_true
from tests.cluster.jobs import CLAIM, children, read_output, rollout_job
from tests.cluster.test_lifecycle import (
    PATIENCE,
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

MODELS = "/models"
LABELS = {"app.kubernetes.io/component": "service", "kuberoll.io/job": "puzzles", "kuberoll.io/service": "grader"}
PORT = {"protocol": "TCP", "port": 8000}


def graded_job(namespace: str, service: Object | None = None, **changes: Any) -> Object:
    """A reward model on the claim scores single turns; the policy is the light one."""
    mount = {"name": "models", "mountPath": MODELS, "subPath": "models", "readOnly": True}
    container = {"name": "service", "volumeMounts": [mount]}
    models = {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}}
    grader = {
        "name": "grader",
        "model": {"source": f"{MODELS}/grader"},
        "engineArgs": dict(ENGINE_ARGS),
        "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
        "podTemplate": {"spec": {"containers": [container], "volumes": [models]}},
        **(service or {}),
    }
    scoring = {"type": "reward_model", "config": {"service": "grader"}, "stepTimeoutSeconds": 300}
    rows = [{"prompt": f"task {number}", "task_name": "puzzle"} for number in range(8)]
    return rollout_job(
        namespace,
        environment=scoring,
        dataset={"source": {"rows": rows}, "repeats": 2},
        rollout={"maxTurns": 1},
        services=[grader],
        **changes,
    )


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("reward-model"))


def put_on_claim(cluster: Cluster, model: Path) -> None:
    place = cluster.kubelet.claim(cluster.namespace, CLAIM) / "models" / "grader"
    shutil.copytree(model, place)
    for path in (place.parent, place, *place.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def waits_for(words: str) -> Any:
    return lambda item: words in message(item, "WorkersReady")


@pytest.mark.engine
async def test_a_reward_model_in_a_pod_of_its_own_scores_the_job(
    cluster: Cluster, ray_pods: None, reward_model: Path
) -> None:
    put_on_claim(cluster, reward_model)
    cluster.operator()
    made = await cluster.create(graded_job(cluster.namespace))
    waiting = await cluster.job(waits_for("service grader: 0 of 1 servers are ready"))
    assert condition(waiting, "WorkersReady")["status"] == "False"  # type: ignore[index]
    assert await cluster.api.find("Job", cluster.namespace, "puzzles-workers") is None
    owner = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "name": "puzzles",
        "uid": made["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    found = {
        kind: await cluster.api.get(kind, cluster.namespace, "puzzles-service-0")
        for kind in ("Deployment", "Service", "NetworkPolicy")
    }
    [secret] = [
        item
        for item in await cluster.api.list("Secret", cluster.namespace)
        if item["metadata"]["name"].startswith("puzzles-service-tokens-")
    ]
    for item in (*found.values(), secret):
        assert item["metadata"]["ownerReferences"] == [owner]
    deployment = found["Deployment"]["spec"]
    assert deployment["selector"] == {"matchLabels": LABELS}
    [container] = deployment["template"]["spec"]["containers"]
    variables = {item["name"]: item for item in container["env"]}
    key = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "0"}}
    assert variables["VLLM_API_KEY"]["valueFrom"] == key
    assert [name for name in variables if name.startswith("KUBEROLL")] == []
    assert secret["immutable"] is True
    assert len(base64.b64decode(secret["data"]["0"])) >= 32
    assert found["Service"]["spec"]["selector"] == LABELS
    workers = {"app.kubernetes.io/component": "workers", "kuberoll.io/job": "puzzles"}
    entrance = {"ports": [PORT], "from": [{"podSelector": {"matchLabels": workers}}]}
    policy = found["NetworkPolicy"]["spec"]
    assert policy == {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress"], "ingress": [entrance]}

    check_complete(cluster, await cluster.job(complete, seconds=2 * PATIENCE))
    records = read_output(cluster.output())
    chats = [[{"role": item.role, "content": item.content} for item in record.messages[:2]] for record in records]
    assert [record.total_reward for record in records] == pytest.approx(logits(reward_model, chats), abs=1e-4)
    assert len({round(record.total_reward, 3) for record in records}) > 1
    left = await children(cluster.api, cluster.namespace, ("Deployment", "ReplicaSet"))
    assert left == [], "GPUs are money"

    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()


@pytest.mark.engine
async def test_an_argument_that_the_server_does_not_know_is_in_the_condition(
    cluster: Cluster, ray_pods: None, reward_model: Path
) -> None:
    put_on_claim(cluster, reward_model)
    cluster.operator()
    job = graded_job(cluster.namespace, {"engineArgs": {**ENGINE_ARGS, "no_such_argument": 1}})
    await cluster.create(job)
    await cluster.job(waits_for("no-such-argument"))


async def test_a_model_that_is_not_mounted_fails_the_job(cluster: Cluster, ray_pods: None) -> None:
    cluster.operator()
    await cluster.create(graded_job(cluster.namespace, {"podTemplate": {}}))
    item = await cluster.job(failed)
    assert condition(item, "Failed")["reason"] == "Refused"  # type: ignore[index]
    assert f"there is no {MODELS}/grader in this pod: mount a volume there" in message(item, "Failed")
    await cluster.nothing_runs()


async def test_a_service_that_cannot_be_pulled_is_not_waited_for_longer_than_the_deadline(cluster: Cluster) -> None:
    cluster.operator()
    job = graded_job(cluster.namespace, {"image": "missing/vllm:1"}, startupDeadlineSeconds=60)
    await cluster.create(job)
    item = await cluster.job(reason("WorkersReady", "ImagePullError"))
    assert "service grader: 0 of 1 servers are ready" in message(item, "WorkersReady")
    assert "missing/vllm:1" in message(item, "WorkersReady")
    assert await cluster.api.find("Job", cluster.namespace, "puzzles-workers") is None
    await cluster.patch({"startupDeadlineSeconds": 1})
    late = await cluster.job(failed)
    assert condition(late, "Failed")["reason"] == "StartupDeadlineExceeded"  # type: ignore[index]
    assert not is_true(late, "Complete")
    await cluster.nothing_runs()


async def test_a_service_ends_with_a_suspended_job_and_with_a_deleted_one(cluster: Cluster) -> None:
    """Also without an operator: the API server's own collector deletes what the job owns."""
    operator = cluster.operator()
    await cluster.create(graded_job(cluster.namespace, {"image": "missing/vllm:1"}))
    await cluster.job(reason("WorkersReady", "ImagePullError"))
    await cluster.patch({"suspend": True})
    await cluster.job(lambda item: is_true(item, "Suspended"))
    await cluster.gone("Deployment", "puzzles-service-0")
    await cluster.nothing_runs()
    await cluster.patch({"suspend": False})
    await cluster.api.wait(
        "Deployment", cluster.namespace, "puzzles-service-0", lambda item: item is not None, seconds=PATIENCE
    )
    operator.kill()
    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()
