"""Server pods of environments with isolation Remote: when they are there, and what is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_operator import names, render
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object, Plan
from kuberoll_operator.plan import plan
from kuberoll_operator.status.conditions import conditions_of
from tests.operator.support import (
    SETTINGS,
    at,
    check_job,
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

REMOTE: list[Object] = [{"name": "puzzle", "type": "sliding_puzzle", "isolation": "Remote"}]
CHECKED = condition("WorkersChecked", True, "Checked")


def servers(ready: int = 1) -> Object:
    """The Deployment of the environment's servers."""
    status = {"observedGeneration": 1, "readyReplicas": ready}
    return child("Deployment", "puzzle-env-0", spec={"replicas": 1}, status=status)


def decide(found: Any, status: Any = None, **spec: Any) -> Plan:
    return plan(compute_facts(job(environments=REMOTE, **spec), raw(status), found, SETTINGS, at(0)))


def applied(found: Plan) -> list[str]:
    return [f"{item['kind']}/{item['metadata']['name'].removeprefix('puzzle-')}" for item in found.apply]


def deleted(found: Plan) -> list[str]:
    return [f"{item.kind}/{item.name.removeprefix('puzzle-')}" for item in found.delete]


def server_pod(**container: Any) -> Object:
    found = pod("workers", container=container)
    labels = {**found["metadata"]["labels"], **names.environment_selector("puzzle", "puzzle")}
    status = found["status"]
    for item in status["containerStatuses"]:
        item["name"] = "environment"
    return {**found, "metadata": {**found["metadata"], "labels": labels}}


def test_the_check_waits_for_a_server() -> None:
    first = applied(decide(observed()))
    assert {"ConfigMap/env-0", "Service/env-0", "NetworkPolicy/env-0", "Deployment/env-0"} <= set(first)
    assert "Job/check" not in first
    assert "Job/check" not in applied(decide(observed(servers(0))))
    assert "Job/check" in applied(decide(observed(servers())))
    # One that runs is not taken back when a server restarts.
    assert "Job/check" in applied(decide(observed(servers(0), check_job(active=1))))


def test_workers_of_an_endpoint_elsewhere_wait_for_a_server() -> None:
    external: dict[str, Any] = {
        "generation": {"backend": "External", "replicas": None, "external": {"url": "http://a"}}
    }
    assert "Job/workers" not in applied(decide(observed(servers(0)), **external))
    assert "Job/workers" in applied(decide(observed(servers()), **external))


def test_servers_are_there_until_the_numbers_are_made() -> None:
    status = {"conditions": [CHECKED]}
    running = decide(observed(servers(), deployment(2), workers_job(active=2)), status)
    assert "Deployment/env-0" in applied(running)
    done = workers_job(succeeded=4, conditions=job_condition("Complete"))
    finishing = decide(observed(servers(), done), status)
    assert {"Deployment/env-0", "Job/finish"} <= set(applied(finishing))
    assert "Deployment/env-0" not in deleted(finishing)
    clearing = decide(observed(servers(), done, finish_job(conditions=job_condition("Complete"))), status)
    assert "Deployment/env-0" in deleted(clearing)


def test_servers_of_a_suspended_job_end_after_its_workers() -> None:
    status = {"conditions": [CHECKED]}
    draining = decide(observed(servers(), workers_job(active=1), pods=[pod("workers", shard=0)]), status, suspend=True)
    assert "Deployment/env-0" not in deleted(draining)
    ended = decide(observed(servers(), workers_job(suspend=True)), status, suspend=True)
    assert "Deployment/env-0" in deleted(ended)
    assert "Deployment/env-0" not in applied(ended)


def test_servers_of_a_failing_job_end() -> None:
    target = condition("FailureTarget", True, "Refused")
    assert "Deployment/env-0" in deleted(decide(observed(servers()), {"conditions": [target]}))


def test_a_server_that_cannot_start_is_in_the_condition() -> None:
    pods = [server_pod(**waiting("ErrImagePull", "no such image: guessing:7"))]
    facts = compute_facts(job(environments=REMOTE), raw({}), observed(servers(0), pods=pods), SETTINGS, at(0))
    status, reason, message = conditions_of(facts)["WorkersChecked"]
    assert (status, reason) == (False, "ImagePullError")
    assert "environment puzzle: 0 of 1 servers are ready" in message
    assert "no such image: guessing:7" in message


def test_an_environment_that_is_refused_fails_the_job() -> None:
    ended = {"state": {"terminated": {"exitCode": 78, "message": "size: must be at least 2", "reason": "Error"}}}
    found = observed(servers(0), pods=[server_pod(**ended)])
    cause = compute_facts(job(environments=REMOTE), raw({}), found, SETTINGS, at(0)).failure
    assert cause == ("Refused", "environment: size: must be at least 2")


def test_servers_that_would_need_the_policy_are_refused() -> None:
    environments = [{**REMOTE[0], "access": {"policy": True}}]
    found = compute_facts(job(environments=environments), raw({}), observed(), SETTINGS, at(0)).failure
    assert found is not None
    assert found.reason == "InvalidSpec"
    assert found.message.startswith("spec.environments[0].isolation: the servers of environment puzzle do not reach")


def test_each_environment_has_a_token_that_only_its_servers_and_the_workers_get() -> None:
    environments = [*REMOTE, {"name": "other", "type": "calculator", "isolation": "Remote"}]
    found = context(environments=environments)
    [secret] = render.build_environment_secret(found)
    assert secret["immutable"] is True
    assert len(set(secret["stringData"].values())) == 2
    assert not set(secret["stringData"].values()) & set(found.tokens.values())
    one, other = render.build_environment_deployments(found)
    others = [
        *render.build_environment_fixtures(found),
        render.build_config(found),
        *render.build_network_policies(found),
        *(one, other, render.build_workers_job(found, suspend=False), render.build_finish_job(found)),
    ]
    for token in [*secret["stringData"].values(), *found.tokens.values()]:
        assert token not in json.dumps(others)
    for number, item in enumerate((one, other)):
        variables = item["spec"]["template"]["spec"]["containers"][0]["env"]
        keys = [entry["valueFrom"]["secretKeyRef"]["key"] for entry in variables if "secretKeyRef" in str(entry)]
        assert keys == [str(number)]
    for worker in (render.build_workers_job(found, suspend=False), render.build_finish_job(found)):
        variables = worker["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {"KUBEROLL_TOKEN_ENVIRONMENT_0", "KUBEROLL_TOKEN_ENVIRONMENT_1"} <= {item["name"] for item in variables}


@pytest.mark.parametrize(("number", "egress"), [(0, True), (2, False)])
def test_only_workers_enter_and_nothing_leaves_unasked(number: int, egress: bool) -> None:
    [policy] = [
        item
        for item in children("remote")
        if (item["kind"], item["metadata"]["name"]) == ("NetworkPolicy", f"remote-env-{number}")
    ]
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Egress", "Ingress"]
    [entry] = spec["ingress"]
    [peer] = entry["from"]
    assert peer["podSelector"]["matchLabels"] == {names.JOB_LABEL: "remote"}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["check", "finish", "workers"]
    ports = [{port["port"] for port in rule["ports"]} for rule in spec["egress"] if "ports" in rule]
    assert ports == [{53, 5353}]
    assert len(spec["egress"]) == 1 + egress
