"""Server pods of environments with isolation Remote: when they are there, and what is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kuberoll_api import contract
from kuberoll_operator import names, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.facts import Facts, compute_facts
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
    stamp,
    waiting,
    workers_job,
)
from tests.operator.test_render import children, context, templates
from tests.schemas import validate

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


EXTERNAL: dict[str, Any] = {
    "backend": "External", "replicas": None, "external": {"url": "http://a:8123", "apiKeyVariable": "KEY"},
}  # fmt: skip
POLICY = {"KUBEROLL_POLICY_URL", "KUBEROLL_POLICY_TOKEN"}


def variables_of(child: Object) -> dict[str, Any]:
    """Variables of the first container of each of its pods, by name."""
    containers = [template["spec"]["containers"][0] for template in templates(child)]
    return {item["name"]: item for container in containers for item in container["env"]}


@pytest.mark.parametrize("backend", ["Native", "KubeRay"])
def test_servers_with_access_to_the_policy_have_a_token_of_their_own(backend: str) -> None:
    debate: Object = {"name": "debate", "entrypoint": "a:B", "isolation": "Remote", "access": {"policy": True}}
    judge: Object = {"name": "judge", "type": "judge", "isolation": "Remote"}
    found = context(backend, environments=[debate, *REMOTE, judge])
    [secret] = render.build_policy_access(found)
    assert secret["immutable"] is True
    assert secret["stringData"]["url"] == f"{found.hosting.endpoint}/v1"
    token = secret["stringData"]["token"]
    # No token of anybody else: not the workers', which is of the same scope.
    assert token not in {*found.tokens.values(), *found.environment_tokens.values()}
    name = secret["metadata"]["name"]

    deployments = render.build_environment_deployments(found)
    configs = [item for item in render.build_environment_fixtures(found) if item["kind"] == "ConfigMap"]
    for number, (made, config) in enumerate(zip(deployments, configs, strict=True)):
        given = {key: item for key, item in variables_of(made).items() if key in POLICY}
        told = json.loads(config["data"]["environment.json"]).get("variables", [])
        if number == 1:
            assert (given, told) == ({}, [])
            continue
        keys = {key: item["valueFrom"]["secretKeyRef"] for key, item in given.items()}
        assert keys == {
            "KUBEROLL_POLICY_URL": {"name": name, "key": "url"},
            "KUBEROLL_POLICY_TOKEN": {"name": name, "key": "token"},
        }
        # Or the processes of the environment, which start with few variables, would not see them.
        assert set(told) == POLICY
    engines = BACKENDS[backend].engines(found, observed(), at(0))[-1:]
    workers = [render.build_workers_job(found, suspend=False), render.build_check_job(found)]
    for engine in engines:
        reference = variables_of(engine)["KUBEROLL_TOKEN_GENERATE_SERVERS"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": name, "key": "token"}
    for item in [*workers, render.build_finish_job(found)]:
        assert name not in json.dumps(item)
    shown = [*deployments, *configs, *engines, *workers, render.build_config(found)]
    assert token not in json.dumps([*shown, *render.build_network_policies(found)])
    # To workers, these servers have what they need: they do not look for an address on their behalf.
    told_workers = json.loads(render.build_config(found)["data"]["job.json"])["job"]["spec"]
    parsed = job(environments=told_workers["environments"]).spec.environments
    assert [spec.uses_policy for spec in parsed] == [False] * 3


def test_without_servers_that_use_the_policy_nobody_has_a_token_for_it() -> None:
    found = context(environments=[*REMOTE, {"name": "judge", "type": "judge"}])
    assert render.build_policy_access(found) == []
    [*_, engine] = BACKENDS["Native"].engines(found, observed(), at(0))
    assert "KUBEROLL_TOKEN_GENERATE_SERVERS" not in variables_of(engine)
    assert not POLICY & set(variables_of(render.build_environment_deployments(found)[0]))


@pytest.mark.parametrize("backend", ["Native", "KubeRay"])
def test_only_servers_with_access_are_let_in_by_the_policy(backend: str) -> None:
    debate: Object = {"name": "debate", "entrypoint": "a:B", "isolation": "Remote", "access": {"policy": True}}
    found = context(backend, environments=[*REMOTE, debate])
    _, engines, plain, asking = render.build_network_policies(found)
    entries = [
        (peer["podSelector"], [port["port"] for port in rule["ports"]])
        for rule in engines["spec"]["ingress"]
        for peer in rule["from"]
        if "environment" in str(peer)
    ]
    selector = {
        "matchExpressions": [{"key": names.ENVIRONMENT_LABEL, "operator": "In", "values": ["debate"]}],
        "matchLabels": names.selector("puzzle", names.ENVIRONMENT),
    }
    # With KubeRay, sessions are at ports of the replicas' own.
    replicas = [{"protocol": "TCP", "port": 30000, "endPort": 31000}] if backend == "KubeRay" else []
    assert entries == [(selector, [8000, *(port["port"] for port in replicas)])]
    way = {
        "ports": [{"protocol": "TCP", "port": 8000}, *replicas],
        "to": [{"podSelector": {"matchLabels": names.selector("puzzle", names.GENERATION)}}],
    }
    assert asking["spec"]["egress"][1:] == [way]
    assert plain["spec"]["egress"][1:] == []
    for policy in (engines, plain, asking):
        validate(policy)


def test_servers_reach_an_external_policy_with_the_key_that_they_are_given() -> None:
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "for-judges", "key": "k"}}}
    judge: Object = {"name": "judge", "type": "judge", "isolation": "Remote", "remote": {"env": [key]}}
    found = context("External", environments=[judge], generation=EXTERNAL)
    [secret] = render.build_policy_access(found)
    assert secret["stringData"] == {"url": "http://a:8123/v1"}
    variables = variables_of(render.build_environment_deployments(found)[0])
    assert variables["KUBEROLL_POLICY_TOKEN"] == {**key, "name": "KUBEROLL_POLICY_TOKEN"}
    assert variables["KUBEROLL_POLICY_URL"]["valueFrom"]["secretKeyRef"]["key"] == "url"
    [_, policy] = render.build_network_policies(found)
    assert [rule["ports"] for rule in policy["spec"]["egress"][1:]] == [[{"protocol": "TCP", "port": 8123}]]
    validate(policy)


def test_servers_without_the_key_of_an_external_policy_are_refused() -> None:
    workers = {"env": [{"name": "KEY", "value": "of the workers"}]}
    judge: Object = {"name": "judge", "type": "judge", "isolation": "Remote"}
    asked = job(environments=[*REMOTE, judge], generation=EXTERNAL, workers=workers)
    found = compute_facts(asked, raw({}), observed(), SETTINGS, at(0)).failure
    assert found is not None
    assert found.reason == "InvalidSpec"
    assert found.message.startswith(
        "spec.environments[1].remote.env: environment judge uses the policy, whose API key is in the variable KEY"
    )
    assert "set KEY here too" in found.message


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


SANDBOXES: list[Object] = [{**REMOTE[0], "remote": {"replicas": 2, "sandbox": {"warmPool": "python"}}}]
READY = [{"type": "Ready", "status": "True", "reason": "DependenciesReady", "message": "Pod is Ready"}]


def sandbox_claim(
    index: int = 0, conditions: list[Object] | None = None, *, seconds: float = 0, **status: Any
) -> Object:
    """A claim, with what agent-sandbox's controller says of it."""
    status = {"conditions": READY if conditions is None else conditions, **status}
    return child("SandboxClaim", f"puzzle-env-0-{index}", status=status, creationTimestamp=stamp(seconds))


def facts_of(found: Any, status: Any = None, *, settings: Any = SETTINGS, seconds: float = 0, **spec: Any) -> Facts:
    return compute_facts(job(environments=SANDBOXES, **spec), raw(status or {}), found, settings, at(seconds))


def test_sandboxes_are_claimed_in_place_of_pods() -> None:
    first = applied(plan(facts_of(observed())))
    assert {"SandboxClaim/env-0-0", "SandboxClaim/env-0-1", "Service/env-0", "NetworkPolicy/env-0"} <= set(first)
    assert not {"Deployment/env-0", "ConfigMap/env-0", "Job/check"} & set(first)
    assert "Job/check" in applied(plan(facts_of(observed(sandbox_claim(), sandbox_claim(1, [])))))


def unready(reason: str, message: str) -> list[Object]:
    return [{"type": "Ready", "status": "False", "reason": reason, "message": message}]


@pytest.mark.parametrize(
    ("conditions", "status", "reason", "says"),
    [
        ([], {}, "Starting", ": agent-sandbox has not answered; its controller needs --extensions"),
        (
            unready("WarmPoolNotFound", 'SandboxWarmPool "a" not found'),
            {},
            "SandboxNotReady",
            ': WarmPoolNotFound: SandboxWarmPool "a" not found',
        ),
        (
            unready("DependenciesNotReady", "Pod is Running but not Ready"),
            {"sandbox": {"name": "python-x7"}},
            "Starting",
            " (sandbox python-x7): DependenciesNotReady: Pod is Running but not Ready",
        ),
    ],
)
def test_a_claim_without_a_sandbox_says_why(conditions: list[Object], status: Object, reason: str, says: str) -> None:
    found = conditions_of(facts_of(observed(sandbox_claim(0, conditions, **status))))["WorkersChecked"]
    text = f"environment puzzle: 0 of 2 servers are ready: SandboxClaim puzzle-env-0-0{says}"
    assert found == (False, reason, text)


def test_a_cluster_without_agent_sandbox_is_told_and_nothing_is_written_there() -> None:
    facts = facts_of(observed(), settings=SETTINGS.model_copy(update={"agent_sandbox": False}))
    assert facts.failure is None
    assert [item for item in applied(plan(facts)) if item.startswith("SandboxClaim")] == []
    status, reason, message = conditions_of(facts)["WorkersChecked"]
    assert (status, reason) == (False, "SandboxNotReady")
    assert (
        "the cluster does not serve extensions.agents.x-k8s.io/v1beta1 sandboxclaims; install agent-sandbox" in message
    )


def test_claims_end_with_the_job_and_when_it_is_suspended() -> None:
    claims = [sandbox_claim(), sandbox_claim(1)]
    status = {"conditions": [CHECKED]}
    done = workers_job(succeeded=4, conditions=job_condition("Complete"))
    finishing = plan(facts_of(observed(*claims, done), status))
    assert deleted(finishing) == []
    for ended in (
        facts_of(observed(*claims, done, finish_job(conditions=job_condition("Complete"))), status),
        facts_of(observed(*claims, workers_job(suspend=True)), status, suspend=True),
        facts_of(observed(*claims), {"conditions": [condition("FailureTarget", True, "Refused")]}),
    ):
        found = plan(ended)
        assert [item for item in deleted(found) if "Claim" in item] == ["SandboxClaim/env-0-0", "SandboxClaim/env-0-1"]
        assert not any("Claim" in item for item in applied(found))


def test_a_sandbox_that_has_ended_is_replaced_but_not_at_once() -> None:
    ended = [
        {"type": "Finished", "status": "True", "reason": "PodFailed", "message": "Pod failed"},
        {"type": "Ready", "status": "False", "reason": "PodFailed", "message": "Pod failed"},
    ]
    found = observed(sandbox_claim(), sandbox_claim(1, ended), sandbox_claim(2))
    early, late = (plan(facts_of(found, seconds=seconds)) for seconds in (59, 60))
    assert deleted(early) == ["SandboxClaim/env-0-2"], "one more than replicas"
    assert deleted(late) == ["SandboxClaim/env-0-1", "SandboxClaim/env-0-2"]
    assert "SandboxClaim/env-0-1" not in applied(late)
    assert "SandboxClaim/env-0-1" in applied(plan(facts_of(observed(sandbox_claim()), seconds=60)))


def test_a_claim_brings_the_configuration_and_no_token() -> None:
    found = context(environments=SANDBOXES, workers={"files": {"configMap": {"name": "a"}}})
    claims = render.build_sandbox_claims(found)
    token = found.environment_tokens["puzzle"]
    assert len(claims) == 2
    for claim in claims:
        metadata = claim["spec"]["additionalPodMetadata"]
        config = json.loads(metadata["annotations"]["kuberoll.io/environment"])
        assert config["token_digest"] == contract.token_digest(token)
        assert "modules" not in config
        assert token not in json.dumps(claim)
        # agent-sandbox's default list of domains for labels.
        assert {label.split("/")[0] for label in metadata["labels"]} == {"sandbox.users.io"}
    services = [item for item in render.build_environment_fixtures(found) if item["kind"] == "Service"]
    assert [item["spec"]["selector"] for item in services] == [claims[0]["spec"]["additionalPodMetadata"]["labels"]]
    assert [item["metadata"]["name"] for item in render.build_environment_secret(found)] != []
    assert render.environment_pod_sets(found) == []


def test_a_policy_adds_the_workers_and_nothing_else_to_a_template_s() -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in children("sandboxes") if item["kind"] == "NetworkPolicy"
    }
    entered = policies["sandboxes-env-0"]
    assert entered["policyTypes"] == ["Egress", "Ingress"]
    assert entered["egress"] == []
    peers = [peer for rule in policies["sandboxes-workers"]["egress"] for peer in rule["to"]]
    assert {"podSelector": {"matchLabels": {"sandbox.users.io/kuberoll-job": "sandboxes"}}} in peers


def test_a_configuration_that_no_annotation_holds_is_refused() -> None:
    environments = [{**SANDBOXES[0], "config": {"text": "x" * 140_000}}]
    found = compute_facts(job(environments=environments), raw({}), observed(), SETTINGS, at(0)).failure
    assert found is not None
    assert found.message.startswith("spec.environments[0].config: reaches claimed sandboxes in an annotation")
