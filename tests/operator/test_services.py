"""Services, further served models: when their pods are there, who reaches them, and what is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_operator import names, render
from kuberoll_operator.deadlines import startup_deadlines
from kuberoll_operator.facts import Facts, Stage, compute_facts
from kuberoll_operator.model import Object, Plan
from kuberoll_operator.plan import plan
from kuberoll_operator.status.conditions import conditions_of
from tests.operator.support import (
    SETTINGS,
    at,
    child,
    condition,
    deployment,
    finish_job,
    job,
    job_condition,
    observed,
    pod,
    raw,
    waiting,
    workers_job,
)
from tests.operator.test_render import children, context

GRADER: Object = {"name": "grader", "model": {"source": "org/grader"}, "engineArgs": {"runner": "pooling"}}
SCORING: Object = {"name": "helpful", "type": "reward_model", "config": {"service": "grader"}}
CHECKED = condition("WorkersChecked", True, "Checked")
READY = condition("GenerationReady", True, "Ready")
EXTERNAL: dict[str, Any] = {"generation": {"backend": "External", "replicas": None, "external": {"url": "http://a"}}}


def service(ready: int = 1, number: int = 0) -> Object:
    """The Deployment of a service."""
    status = {"observedGeneration": 1, "readyReplicas": ready}
    return child("Deployment", f"puzzle-service-{number}", spec={"replicas": 1}, status=status)


def service_pod(**container: Any) -> Object:
    found = pod("workers", container=container)
    labels = {**found["metadata"]["labels"], **names.service_selector("puzzle", "grader")}
    for item in found["status"]["containerStatuses"]:
        item["name"] = "service"
    return {**found, "metadata": {**found["metadata"], "labels": labels}}


def facts(found: Any, *conditions: Object, services: list[Object] | None = None, **spec: Any) -> Facts:
    made = job(services=[GRADER] if services is None else services, environments=[SCORING], **spec)
    return compute_facts(made, raw({"conditions": list(conditions), "startTime": "2026-03-01T12:00:00Z"}), found,
                         SETTINGS, at(0))  # fmt: skip


def decide(found: Any, *conditions: Object, **spec: Any) -> Plan:
    return plan(facts(found, *conditions, **spec))


def applied(found: Plan) -> list[str]:
    return [f"{item['kind']}/{item['metadata']['name'].removeprefix('puzzle-')}" for item in found.apply]


def deleted(found: Plan) -> list[str]:
    return [f"{item.kind}/{item.name.removeprefix('puzzle-')}" for item in found.delete]


def test_services_start_with_the_engines_after_the_check() -> None:
    checking = applied(decide(observed()))
    assert {"Service/service-0", "NetworkPolicy/service-0"} <= set(checking)
    assert "Deployment/service-0" not in checking
    assert {"Deployment/generation", "Deployment/service-0"} <= set(applied(decide(observed(), CHECKED)))


def test_workers_wait_for_a_server_of_each_service() -> None:
    two = [GRADER, {**GRADER, "name": "other"}]
    waits = facts(observed(deployment(2), service(), service(0, 1)), CHECKED, READY, services=two)
    assert waits.stage is Stage.STARTING
    assert "Job/workers" not in applied(plan(waits))
    assert conditions_of(waits)["WorkersReady"] == (False, "Starting", "service other: 0 of 1 servers are ready")
    runs = facts(observed(deployment(2), service(), service(1, 1)), CHECKED, READY, services=two)
    assert runs.stage is Stage.RUNNING
    assert "Job/workers" in applied(plan(runs))


def workers_of(found: Plan) -> Object:
    [only] = [item for item in found.apply if (item["kind"], item["metadata"]["name"]) == ("Job", "puzzle-workers")]
    return only


def test_a_resumed_job_waits_for_its_services_too() -> None:
    made = workers_of(decide(observed(deployment(2), service()), CHECKED, READY))
    suspended = {**made, "spec": {**made["spec"], "suspend": True}, "status": {}}
    waits = workers_of(decide(observed(deployment(2), service(0), suspended), CHECKED, READY))
    assert waits["spec"]["suspend"] is True
    goes_on = workers_of(decide(observed(deployment(2), service(), suspended), CHECKED, READY))
    assert goes_on["spec"]["suspend"] is False


def test_workers_go_on_while_a_service_restarts() -> None:
    found = facts(observed(deployment(2), service(0), workers_job(active=2)), CHECKED, READY)
    assert found.stage is Stage.RUNNING
    assert workers_of(plan(found))["spec"]["suspend"] is False


def test_workers_of_an_endpoint_elsewhere_wait_and_not_for_ever() -> None:
    assert "Job/workers" not in applied(decide(observed(service(0)), **EXTERNAL))
    assert "Job/workers" in applied(decide(observed(service()), **EXTERNAL))
    status = {
        "startTime": "2026-03-01T12:00:00Z",
        "conditions": [condition("GenerationReady", True, "External"), condition("WorkersReady", False, "Starting")],
    }
    made = job(services=[GRADER], environments=[SCORING], **EXTERNAL)
    assert startup_deadlines(made, status) == {"WorkersReady": at(1800)}
    assert startup_deadlines(job(**EXTERNAL), status) == {}


def test_services_end_with_the_engines() -> None:
    done = workers_job(succeeded=4, conditions=job_condition("Complete"))
    finishing = decide(observed(service(), deployment(2), done), CHECKED)
    assert {"Deployment/service-0", "Deployment/generation"} <= set(deleted(finishing))
    assert "Deployment/service-0" not in applied(finishing)
    clearing = decide(observed(service(), done, finish_job(conditions=job_condition("Complete"))), CHECKED)
    assert "Deployment/service-0" in deleted(clearing)
    failing = decide(observed(service()), condition("FailureTarget", True, "Refused"))
    assert "Deployment/service-0" in deleted(failing)


def test_services_of_a_suspended_job_end_after_its_workers() -> None:
    draining = decide(observed(service(), workers_job(active=1), pods=[pod("workers", shard=0)]), CHECKED, suspend=True)
    assert "Deployment/service-0" not in deleted(draining)
    ended = decide(observed(service(), workers_job(suspend=True)), CHECKED, suspend=True)
    assert "Deployment/service-0" in deleted(ended)
    assert "Deployment/service-0" not in applied(ended)


def test_a_service_that_the_job_no_longer_has_is_deleted() -> None:
    assert "Deployment/service-7" in deleted(decide(observed(service(number=7)), CHECKED, suspend=True))


@pytest.mark.parametrize("ready", [0, 2])
def test_a_service_that_cannot_start_is_in_the_condition(ready: int) -> None:
    pods = [service_pod(**waiting("ErrImagePull", "no such image: vllm:7"))]
    found = facts(observed(deployment(ready), service(0), pods=pods), CHECKED)
    status, reason, message = conditions_of(found)["WorkersReady"]
    assert status is False
    assert reason == ("ImagePullError" if ready else "WaitingForGeneration")
    assert "service grader: 0 of 1 servers are ready: container service: no such image: vllm:7" in message


def test_a_service_that_is_refused_fails_the_job() -> None:
    ended = {"state": {"terminated": {"exitCode": 78, "message": "there is no /models/x", "reason": "Error"}}}
    found = facts(observed(service(0), pods=[service_pod(**ended)]), CHECKED).failure
    assert found == ("Refused", "service: there is no /models/x")


def test_servers_that_would_need_a_service_are_refused() -> None:
    environments = [{**SCORING, "isolation": "Remote"}]
    made = job(services=[GRADER], environments=environments)
    found = compute_facts(made, raw({}), observed(), SETTINGS, at(0)).failure
    assert found is not None
    assert found.reason == "InvalidSpec"
    assert "the servers of environment helpful do not reach the service grader" in found.message


def test_machines_of_trajectories_without_a_broker_are_refused_before_anything_is_made() -> None:
    made = job(environments=[{"name": "tasks", "agent": {"tools": {}}, "sandbox": {}}])
    found = compute_facts(made, raw({}), observed(), SETTINGS, at(0)).failure
    assert found is not None
    assert found.reason == "InvalidSpec"
    assert found.message.startswith("spec.environments[0].sandbox: this installation makes no pods for sandboxes")


def test_each_service_has_a_key_that_only_its_pods_and_the_workers_get() -> None:
    found = context(services=[GRADER, {**GRADER, "name": "the-other"}])
    [secret] = render.build_service_secret(found)
    assert secret["immutable"] is True
    keys = secret["stringData"]
    assert sorted(keys) == ["0", "1"]
    assert len({*keys.values(), *found.tokens.values()}) == 2 + len(found.tokens)
    deployments = render.build_service_deployments(found)
    workers, check = render.build_workers_job(found, suspend=False), render.build_check_job(found)
    others = [
        *(render.build_config(found), workers, check, render.build_finish_job(found)),
        *(*render.build_service_fixtures(found), *render.build_network_policies(found), *deployments),
    ]
    for token in [*keys.values(), *found.tokens.values()]:
        assert token not in json.dumps(others)

    def variables(item: Object) -> dict[str, Any]:
        [container] = item["spec"]["template"]["spec"]["containers"]
        return {entry["name"]: entry for entry in container["env"]}

    for number, item in enumerate(deployments):
        given = variables(item)
        reference = {"name": secret["metadata"]["name"], "key": str(number)}
        assert given["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == reference
        # Never the policy's.
        assert [name for name in given if name.startswith("KUBEROLL")] == []
    given = variables(workers)
    assert given["KUBEROLL_SERVICE_THE_OTHER_URL"]["value"] == "http://puzzle-service-1.rollouts.svc:8000/v1"
    assert given["KUBEROLL_SERVICE_THE_OTHER_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "1"
    assert not [name for name in variables(check) if name.startswith("KUBEROLL_SERVICE")]


def test_only_workers_reach_a_service() -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in children("services") if item["kind"] == "NetworkPolicy"
    }
    spec = policies["services-service-0"]
    assert spec["podSelector"] == {"matchLabels": names.service_selector("services", "grader")}
    assert spec["policyTypes"] == ["Ingress"]
    [entry] = spec["ingress"]
    assert entry["from"] == [{"podSelector": {"matchLabels": names.selector("services", names.WORKERS)}}]
    assert entry["ports"] == [{"protocol": "TCP", "port": 8000}]
    models = {"podSelector": {"matchLabels": names.selector("services", names.SERVICE)}}
    assert {"ports": [{"protocol": "TCP", "port": 8000}], "to": [models]} in policies["services-workers"]["egress"]


def test_services_need_quota_as_engines_do() -> None:
    [workload] = [item for item in children("services") if item["kind"] == "Workload"]
    counts = {item["name"]: item["count"] for item in workload["spec"]["podSets"]}
    assert counts == {"generation": 1, "service-0": 2, "service-1": 1, "workers": 2}
    first = next(item for item in workload["spec"]["podSets"] if item["name"] == "service-0")
    assert first["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_services_are_given_back_with_the_engines_while_no_worker_runs() -> None:
    """They hold GPUs as engines do; made again in the reconcile that deletes them, they would come and go."""
    ended = condition("WorkersReady", False, "Unschedulable", seconds=-900)
    since = condition("GenerationReady", True, "Ready", seconds=-1000)
    made = facts(observed(deployment(2), service(), workers_job(active=1)), CHECKED, since, ended)
    assert made.idle
    found = plan(made)
    assert {item.name for item in found.delete} >= {"puzzle-generation", "puzzle-service-0"}
    assert [item["metadata"]["name"] for item in found.apply if item["kind"] == "Deployment"] == []
