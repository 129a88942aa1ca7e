"""What a job's workers get so that trajectories have sandboxes, and what those reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kuberoll_api import sandboxes
from kuberoll_operator import names, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.facts import child_refs, compute_facts, spec_problem
from kuberoll_operator.model import Object, Plan
from kuberoll_operator.plan import plan
from kuberoll_operator.render.context import Assignment, RenderContext
from kuberoll_operator.settings import Settings
from kuberoll_workers.sandboxes import drivers
from tests.operator import support

BROKER = "http://kuberoll-broker.kuberoll-system.svc:8790"
SETTINGS = support.SETTINGS.model_copy(update={"sandbox_broker": BROKER})


def environment(**sandbox: Any) -> dict[str, Any]:
    return {"name": "harbor", "agent": {"tools": {}}, "sandbox": {"image": "debian:bookworm", **sandbox}}


def spec(*environments: dict[str, Any], **more: Any) -> dict[str, Any]:
    given = {"generation": {"toolCallParser": "hermes"}, "environments": list(environments or [environment()])}
    return {**given, "dataset": {"source": {"generator": None, "uri": "s3://bucket/tasks"}}, **more}


def decide(*children: Object, environments: list[dict[str, Any]]) -> Plan:
    job, status = (
        support.job(**spec(*environments)),
        {"conditions": [support.condition("Suspended", True, "Suspended")]},
    )
    return plan(compute_facts(job, support.raw(status), support.observed(*children), SETTINGS, support.at(60)))


@pytest.mark.parametrize(
    ("settings", "sandbox", "words"),
    [
        (support.SETTINGS, {}, r"environments\[0\]\.sandbox: .*sandboxes\.enabled: true.*kuberoll run"),
        (SETTINGS, {"image": "oci:images:debian"}, r"sandbox\.image: oci:images:debian is on the disk of one machine"),
        (SETTINGS, {"builtImages": "docker-archive:x.tar"}, r"sandbox\.builtImages: .*kuberoll images build --push"),
    ],
)
def test_what_cannot_be_a_pod_is_refused(settings: Settings, sandbox: dict[str, Any], words: str) -> None:
    problem = spec_problem(support.job(**spec(environment(**sandbox))), "Native", settings)
    assert problem is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(problem)


def test_what_can_be_one_is_not() -> None:
    job = support.job(**spec(environment(builtImages="registry.example.org/tasks")))
    assert spec_problem(job, "Native", SETTINGS) is None


def context(*environments: dict[str, Any], **changes: Any) -> RenderContext:
    job = support.job(**spec(*environments))
    made = RenderContext(
        job=job,
        namespace=support.NAMESPACE,
        uid=support.UID,
        settings=SETTINGS,
        hosting=BACKENDS["Native"].hosting(job, support.NAMESPACE, SETTINGS),
        shards=4,
        tokens={},
        sandboxes_token=SETTINGS.token_of(support.UID, sandboxes.TOKEN_SCOPE),
    )
    return dataclasses.replace(made, **changes)


def variables(child: Object) -> dict[str, Object]:
    """Variables of a child's pods that concern sandboxes, by name."""
    given = child["spec"]["template"]["spec"]["containers"][0]["env"]
    return {item["name"]: item for item in given if "SANDBOX" in item["name"]}


def test_whoever_asks_the_broker_has_its_address_and_the_job_s_own_token() -> None:
    made = context()
    [secret] = render.build_sandbox_secret(made)
    token = secret["stringData"][sandboxes.TOKEN_SCOPE]
    assert token == SETTINGS.token_of(support.UID, sandboxes.TOKEN_SCOPE)
    assert secret["immutable"] is True
    expected: dict[str, dict[str, object]] = {
        sandboxes.DRIVER_VARIABLE: {"value": sandboxes.PODS},
        sandboxes.BROKER_VARIABLE: {"value": f"{BROKER}/v1/jobs/rollouts/puzzle"},
        sandboxes.TOKEN_VARIABLE: {
            "valueFrom": {"secretKeyRef": {"name": secret["metadata"]["name"], "key": sandboxes.TOKEN_SCOPE}}
        },
    }
    for child in (render.build_check_job(made), render.build_workers_job(made, suspend=False)):
        assert variables(child) == {name: {"name": name, **value} for name, value in expected.items()}
    assert variables(render.build_finish_job(made)) == {}
    # Of another job, the name is another one: an earlier Secret never serves a later job.
    [other] = render.build_sandbox_secret(dataclasses.replace(made, sandboxes_token="another"))
    assert other["metadata"]["name"] != secret["metadata"]["name"]


def test_a_job_without_sandboxes_has_nothing_of_it() -> None:
    plain = {"name": "sliding_puzzle", "type": "sliding_puzzle"}
    made = context(plain)
    assert render.build_sandbox_secret(made) == []
    assert variables(render.build_workers_job(made, suspend=False)) == {}
    assert not [item for item in render.build_network_policies(made) if "sandbox" in item["metadata"]["name"]]


def test_sandboxes_go_where_their_quota_is() -> None:
    toleration = {"key": "pool", "operator": "Exists"}
    granted = Assignment(count=4, node_selector={"pool": "cpu"}, tolerations=[toleration])
    made = context(assignments={"sandboxes": granted})
    text = variables(render.build_workers_job(made, suspend=False))[sandboxes.PLACEMENT_VARIABLE]["value"]
    found = sandboxes.Placement.model_validate_json(text)
    assert (found.node_selector, found.tolerations) == ({"pool": "cpu"}, [toleration])


def test_only_sandboxes_with_a_network_reach_something_and_never_what_is_left_out() -> None:
    settings = SETTINGS.model_copy(update={"egress_except": ("10.0.0.0/8",)})
    one = {**environment(network={"mode": "All"}), "name": "open"}
    policies = {
        item["metadata"]["name"]: item["spec"]
        for item in render.build_network_policies(context(environment(), one, settings=settings))
    }
    closed, opened = policies["puzzle-sandboxes"], policies["puzzle-sandboxes-all"]
    assert closed["policyTypes"] == ["Egress", "Ingress"]
    assert closed["egress"] == []
    pods = names.sandbox_labels("puzzle", "open", "a-worker", "All")
    assert closed["podSelector"]["matchLabels"].items() <= pods.items()
    assert opened["podSelector"]["matchLabels"].items() <= pods.items()
    others = names.sandbox_labels("puzzle", "harbor", "a-worker", "None")
    assert not opened["podSelector"]["matchLabels"].items() <= others.items()
    assert opened["policyTypes"] == ["Egress"]
    [rule] = opened["egress"]
    assert [set(item) for item in rule["to"]] == [{"ipBlock"}, {"ipBlock"}]
    assert {"169.254.0.0/16", "10.0.0.0/8"} <= {*rule["to"][0]["ipBlock"]["except"]}


def test_a_policy_of_sandboxes_with_a_network_goes_when_none_may_have_one() -> None:
    live = support.child("NetworkPolicy", "puzzle-sandboxes-all")
    assert [item.name for item in decide(live, environments=[environment()]).delete] == ["puzzle-sandboxes-all"]
    kept = decide(live, environments=[environment(network={"mode": "All"})])
    assert kept.delete == ()
    assert "puzzle-sandboxes-all" in {item["metadata"]["name"] for item in kept.apply}


def test_names_that_others_have_taken_are_noticed() -> None:
    job = support.job(**spec(environment(network={"mode": "All"})))
    found = {item.name for item in child_refs(job, BACKENDS["Native"]) if item.kind == "NetworkPolicy"}
    made = {item["metadata"]["name"] for item in render.build_network_policies(context(*[environment()]))}
    assert found >= {"puzzle-sandboxes", "puzzle-sandboxes-all"} | made


def test_workers_read_the_variable_that_names_their_driver() -> None:
    assert drivers.VARIABLE == sandboxes.DRIVER_VARIABLE
