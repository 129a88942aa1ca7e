"""Environments with isolation Remote on a real control plane: their pods, what kills them, and what keeps them away."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.cluster.api import Object, condition, is_true
from tests.cluster.jobs import CLAIM, children, contents, read_output, rollout_job
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


VERDICTS = {"[[A=B]]": 1.0, "[[A!=B]]": 0.0}


def judged_job(namespace: str) -> Object:
    """Its policy, behind Ray Serve, answers with verdicts, and judges these; two more environments look around."""
    remote = {"isolation": "Remote", "remote": {}}
    asking = {"entrypoint": "tests.cluster.asking:Asking", **remote}
    environments: list[Object] = [
        {"name": "puzzle", "type": "judge", **remote},
        {"name": "asking", **asking, "config": {"asks": True}, "access": {"policy": True}},
        {"name": "other", **asking},
    ]
    rows = [
        {"prompt": f"task {number}", "task_name": item["name"], "metadata": {"ground_truth": "up"}}
        for item in environments
        for number in range(4)
    ]
    generation = {"simulated": {"responses": list(VERDICTS)}}
    dataset = {"source": {"rows": rows}, "repeats": 2}
    job = rollout_job(namespace, light=False, generation=generation, dataset=dataset, rollout={"maxTurns": 1})
    job["spec"]["environments"] = environments
    return job


async def named(cluster: Cluster, kind: str, part: str) -> Object:
    """The one object whose name has this part."""
    [found] = [item for item in await cluster.api.list(kind, cluster.namespace) if part in item["metadata"]["name"]]
    return dict(found)


async def test_servers_ask_the_policy_with_a_token_of_their_own(cluster: Cluster, ray_pods: None) -> None:
    cluster.operator()
    made = await cluster.create(judged_job(cluster.namespace))
    owner = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "name": "puzzles",
        "uid": made["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    servers = await cluster.api.wait(
        "Deployment", cluster.namespace, "puzzles-env-0", lambda item: item is not None, seconds=PATIENCE
    )
    assert servers is not None
    [container] = servers["spec"]["template"]["spec"]["containers"]
    secret = await named(cluster, "Secret", "-env-policy-")
    name = secret["metadata"]["name"]
    variables = {item["name"]: item.get("valueFrom") for item in container["env"]}
    assert variables["KUBEROLL_POLICY_URL"] == {"secretKeyRef": {"name": name, "key": "url"}}
    assert variables["KUBEROLL_POLICY_TOKEN"] == {"secretKeyRef": {"name": name, "key": "token"}}
    assert secret["immutable"] is True
    given = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert given["url"] == f"http://puzzles-generation.{cluster.namespace}.svc:8000/v1"
    tokens = (await named(cluster, "Secret", "puzzles-tokens-"))["data"]
    assert secret["data"]["token"] not in tokens.values()
    policies = {item["metadata"]["name"]: item for item in await cluster.api.list("NetworkPolicy", cluster.namespace)}
    for item in (servers, secret, *policies.values()):
        assert item["metadata"]["ownerReferences"] == [owner]
    engines = {"app.kubernetes.io/component": "generation", "kuberoll.io/job": "puzzles"}
    port = [{"protocol": "TCP", "port": 8000}]
    way = {"ports": port, "to": [{"podSelector": {"matchLabels": engines}}]}
    assert [way in policies[f"puzzles-env-{number}"]["spec"]["egress"] for number in range(3)] == [True, True, False]
    entrance = {
        "matchExpressions": [{"key": "kuberoll.io/environment", "operator": "In", "values": ["asking", "puzzle"]}],
        "matchLabels": {"app.kubernetes.io/component": "environment", "kuberoll.io/job": "puzzles"},
    }
    assert {"ports": port, "from": [{"podSelector": entrance}]} in policies["puzzles-generation"]["spec"]["ingress"]

    item = await cluster.job(complete)
    assert is_true(item, "Complete"), cluster.said()
    records = read_output(cluster.output())
    states = {
        place: [dict(record.metadata or {}) for record in records if record.task_name == place]
        for place in ("puzzle", "asking", "other")
    }
    assert [len(found) for found in states.values()] == [8, 8, 8]
    judged = [state["judge"] for state in states["puzzle"]]
    assert [judge["score"] for judge in judged] == [VERDICTS[judge["verdict"]] for judge in judged]
    assert [record.total_reward for record in records if record.task_name == "puzzle"] == [
        judge["score"] for judge in judged
    ]
    both = ["KUBEROLL_POLICY_TOKEN", "KUBEROLL_POLICY_URL"]
    # A session is in one replica, which its URLs name; its token is good for nothing else.
    session = {"answers": [201, 200, 401, 200], "calls": 1, "own": True}
    expected = {"variables": both, "chat": 200, "weights": 403, "session": session}
    assert [state for state in states["asking"] if state != expected] == []
    assert all(state == {"variables": []} for state in states["other"])

    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.nothing_left()
    await cluster.gone("Secret", name)
    await cluster.create({**judged_job(cluster.namespace)})
    again = await cluster.api.wait(
        "Deployment", cluster.namespace, "puzzles-env-0", lambda item: item is not None, seconds=PATIENCE
    )
    assert again is not None
    other = await named(cluster, "Secret", "-env-policy-")
    assert other["metadata"]["name"] != name
    assert other["data"]["token"] != secret["data"]["token"], "another job has another token"


async def test_agents_on_servers_call_the_policy_in_their_sessions(cluster: Cluster, ray_pods: None) -> None:
    """They have no token but that of their session, and their pods reach the replicas; one of these pods crashes."""
    cluster.operator()
    remote = {"isolation": "Remote", "remote": {}, "processes": 2}
    environments: list[Object] = [
        {"name": "function", "agent": {"entrypoint": "tests.cluster.conversing:converse"}, **remote},
        {"name": "program", "agent": {"command": ["python", "-m", "tests.cluster.conversing"]}, **remote},
    ]
    rows = [{"prompt": f"task {number}\n", "task_name": item["name"]} for item in environments for number in range(4)]
    dataset = {"source": {"rows": rows}, "repeats": 2}
    job = rollout_job(cluster.namespace, light=False, dataset=dataset, seconds=0.3)
    job["spec"]["environments"] = environments
    await cluster.create(job)
    await cluster.stored(2)
    cluster.kubelet.crash(cluster.namespace, (await named(cluster, "Pod", "-env-0-"))["metadata"]["name"])
    item = await cluster.job(complete)
    assert is_true(item, "Complete"), cluster.said()
    secrets = [secret["metadata"]["name"] for secret in await cluster.api.list("Secret", cluster.namespace)]
    assert not any("-env-policy-" in name for name in secrets)
    records = read_output(cluster.output())
    for name in ("function", "program"):
        found = [record for record in records if record.task_name == name]
        assert len(found) == 8
        for record in found:
            assert record.metadata is not None
            responses = [message.content for message in record.messages if message.role == "assistant"]
            assert record.metadata == {"said": responses, "tokens": []}
            assert (record.turn_count, record.total_reward) == (2, 2.0)
            assert record.branches is None
            assert record.continuity is not None
            assert sum(record.continuity.values()) == 2
