"""Who is given what of a job's policy: tokens, and ways through the network. What is rendered, of all backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kuberoll_api import contract
from kuberoll_operator import names, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.commands.render import UID
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object
from kuberoll_operator.placement import placement_problem
from kuberoll_operator.plan import render_context
from kuberoll_operator.render.objects import has_other_shape
from tests.operator import support
from tests.operator.test_render import CASES, children, context
from tests.schemas import validate

POLICY = {"protocol": "TCP", "port": 8000}
REPLICAS = {"protocol": "TCP", "port": 30000, "endPort": 31000}
TRAINER = {"name": "trainer", "podSelector": {"matchLabels": {"app": "trainer"}}, "scopes": ["weights", "generate"]}
JUDGE = {"name": "judge", "podSelector": {"matchLabels": {"app": "judge"}}}
EVERYONE = {"name": "everyone", "podSelector": {}, "namespaceSelector": {}, "scopes": ["read"]}
OTHERS = {
    "name": "others",
    "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]},
    "tokenSecret": {"name": "shared", "key": "key"},
}
ALL = [TRAINER, JUDGE, EVERYONE, OTHERS]
GROUPS = {"engineArgs": {"tensor_parallel_size": 16}, "resources": {"limits": {"nvidia.com/gpu": "8"}}}
HOSTED = {"Native": ("Native", {}), "in groups": ("Native", GROUPS), "KubeRay": ("KubeRay", {})}


def ingress(found: render.RenderContext) -> list[Object]:
    [policy] = [
        item for item in render.build_network_policies(found) if item["metadata"]["name"] == "puzzle-generation"
    ]
    validate(policy)
    return list(policy["spec"]["ingress"])


def pod_specs(child: Any) -> Iterator[Object]:
    """All pod specs in an object, whatever its kind."""
    if isinstance(child, dict):
        if "containers" in child:
            yield child
        for value in child.values():
            yield from pod_specs(value)
    elif isinstance(child, list):
        for item in child:
            yield from pod_specs(item)


def references(spec: Object) -> list[tuple[str, str, str]]:
    """Variable, Secret and key of all that a pod has of Secrets; of whole Secrets the name alone."""
    assert not any("projected" in volume for volume in spec.get("volumes", ()))
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    return [
        *(
            (item["name"], source["name"], source["key"])
            for container in containers
            for item in container.get("env", ())
            if (source := item.get("valueFrom", {}).get("secretKeyRef"))
        ),
        *(
            ("", item["secretRef"]["name"], "")
            for container in containers
            for item in container.get("envFrom", ())
            if "secretRef" in item
        ),
        *(("", volume["secret"]["secretName"], "") for volume in spec.get("volumes", ()) if "secret" in volume),
    ]


@pytest.mark.parametrize("where", HOSTED)
def test_a_way_in_is_for_whom_it_is_named_and_no_further_than_its_scopes(where: str) -> None:
    backend, generation = HOSTED[where]
    closed = ingress(context(backend, generation=generation))
    opened = ingress(context(backend, generation={**generation, "access": ALL}))
    added = [rule for rule in opened if rule not in closed]
    assert [rule for rule in opened if rule in closed] == closed
    # Native's replicas are at the policy's own port.
    sampling = [POLICY, REPLICAS] if backend == "KubeRay" else [POLICY]
    assert added == [
        {"ports": [POLICY], "from": [{"podSelector": {}, "namespaceSelector": {}}]},
        {"ports": sampling, "from": [{"podSelector": {"matchLabels": {"app": "judge"}}}]},
        {
            "ports": sampling,
            "from": [{"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}}],
        },
        {"ports": sampling, "from": [{"podSelector": {"matchLabels": {"app": "trainer"}}}]},
    ]


@pytest.mark.parametrize("where", HOSTED)
def test_servers_of_environments_that_reach_the_policy_reach_its_replicas(where: str) -> None:
    backend, generation = HOSTED[where]
    closed = {"name": "closed", "type": "sliding_puzzle", "isolation": "Remote"}
    asking = {**closed, "name": "asking", "access": {"policy": True}}
    found = context(backend, generation=generation, environments=[closed, asking])
    assert [spec.reaches_policy for spec in found.job.spec.environments] == [False, True]
    ports = [POLICY, REPLICAS] if backend == "KubeRay" else [POLICY]
    policies = {item["metadata"]["name"]: item["spec"] for item in render.build_network_policies(found)}
    engines = [{"podSelector": {"matchLabels": names.selector("puzzle", names.GENERATION)}}]
    assert len(policies["puzzle-env-0"]["egress"]) == 1
    assert policies["puzzle-env-1"]["egress"][1:] == [{"ports": ports, "to": engines}]
    servers = [rule for rule in ingress(found) if "kuberoll.io/environment" in json.dumps(rule)]
    assert [rule["ports"] for rule in servers] == [ports]
    assert servers[0]["from"][0]["podSelector"]["matchExpressions"] == [
        {"key": "kuberoll.io/environment", "operator": "In", "values": ["asking"]}
    ]


@pytest.mark.parametrize("case", CASES)
def test_only_engines_know_how_weights_are_published(case: str) -> None:
    for child in children(case):
        engines = child["metadata"]["labels"][names.COMPONENT_LABEL] == names.GENERATION
        for spec in pod_specs(child):
            if child["kind"] == "Workload":
                # Of all pods together; nothing is made from it.
                continue
            secrets = references(spec)
            tokens = {key for _, secret, key in secrets if secret.startswith(f"{job_of(child)}-tokens-")}
            if engines:
                assert set(contract.SCOPES) <= tokens
                continue
            # Of pods outside the job workers know the tokens that only read.
            reading = {entry[0]: entry[1:] for entry in secrets if entry[0].startswith("KUBEROLL_TOKEN_READ_ACCESS_")}
            assert not reading or child["metadata"]["labels"][names.COMPONENT_LABEL] == names.WORKERS
            others = [entry for entry in secrets if entry[0] not in reading]
            assert tokens - {key for _, key in reading.values()} <= {"generate"}
            assert not [name for name, _, _ in others if "WEIGHTS" in name or "_ACCESS_" in name]
            assert not [secret for _, secret, _ in others if "-access-" in secret]


def job_of(child: Object) -> str:
    return str(child["metadata"]["labels"][names.JOB_LABEL])


@pytest.mark.parametrize("where", HOSTED)
def test_engines_accept_the_tokens_of_others_and_others_get_theirs_from_a_secret(where: str) -> None:
    backend, generation = HOSTED[where]
    if where == "in groups":
        assert (
            placement_problem(context(generation=GROUPS).job.spec.generation, one_per_pod=True, may_span=True) is None
        )
    found = context(backend, generation={**generation, "access": ALL})
    own, *theirs = render.build_access_secrets(found)
    assert {item["metadata"]["name"] for item in theirs} == {
        f"puzzle-access-{name}" for name in found.access_tokens
    } - {"puzzle-access-others"}
    for secret in (own, *theirs):
        assert (secret["kind"], secret["immutable"], secret["metadata"]["ownerReferences"][0]["uid"]) == (
            *("Secret", True),
            UID,
        )
        validate(secret)
    for secret in theirs:
        name = secret["metadata"]["name"].removeprefix("puzzle-access-")
        assert secret["stringData"] == {
            "KUBEROLL_POLICY_URL": "http://puzzle-generation.rollouts.svc:8000/v1",
            "KUBEROLL_POLICY_TOKEN": found.access_tokens[name],
        }
        assert own["stringData"][name] == found.access_tokens[name]
    accepted = own["metadata"]["name"]
    engines = BACKENDS[backend].engines(found, support.observed(), support.START)
    specs = list(pod_specs(list(engines)))
    assert len(specs) == (1 if where == "Native" else 2)
    for spec in specs:
        assert [item for item in references(spec) if "_ACCESS_" in item[0]] == [
            ("KUBEROLL_TOKEN_READ_ACCESS_EVERYONE", accepted, "everyone"),
            ("KUBEROLL_TOKEN_GENERATE_ACCESS_JUDGE", accepted, "judge"),
            ("KUBEROLL_TOKEN_GENERATE_ACCESS_OTHERS", "shared", "key"),
            ("KUBEROLL_TOKEN_GENERATE_ACCESS_TRAINER", accepted, "trainer"),
            ("KUBEROLL_TOKEN_WEIGHTS_ACCESS_TRAINER", accepted, "trainer"),
        ]
    text = json.dumps([render.build_config(found), *engines, *render.build_network_policies(found)])
    assert not [token for token in found.access_tokens.values() if token in text]
    # Who has access is the operator's affair: it is not in what pods read.
    assert "everyone" not in json.dumps(render.build_config(found))


@pytest.mark.parametrize("where", HOSTED)
def test_workers_know_the_tokens_that_only_read(where: str) -> None:
    backend, generation = HOSTED[where]
    reader = {**OTHERS, "name": "reader", "scopes": ["read"]}
    publisher = {**OTHERS, "name": "publisher", "scopes": ["read", "weights"]}
    found = context(backend, generation={**generation, "access": [*ALL, reader, publisher]})
    own = render.build_access_secrets(found)[0]["metadata"]["name"]
    [workers] = pod_specs(render.build_workers_job(found, suspend=False))
    assert [item for item in references(workers) if "_ACCESS_" in item[0]] == [
        ("KUBEROLL_TOKEN_READ_ACCESS_EVERYONE", own, "everyone"),
        ("KUBEROLL_TOKEN_READ_ACCESS_READER", "shared", "key"),
    ]
    [check] = pod_specs(render.build_check_job(found))
    assert not [item for item in references(check) if "_ACCESS_" in item[0]]


def test_tokens_of_others_are_of_a_job_and_a_name() -> None:
    manifest = support.manifest(generation={"access": ALL})
    job = support.job(generation={"access": ALL})
    made: dict[tuple[str, str], str] = {}
    for uid in ("a", "b"):
        raw = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        found = render_context(compute_facts(job, raw, support.observed(), support.SETTINGS, support.START))
        made |= {(uid, name): token for name, token in {**found.access_tokens, **found.tokens}.items()}
    assert len(made) == len(set(made.values())) == 2 * (len(ALL) + 3)


def test_the_order_of_entries_means_nothing() -> None:
    """An API server takes another order of a keyed list for no change, also while the job runs."""
    one, other = (context(generation={"access": entries}) for entries in (ALL, ALL[::-1]))
    assert render.build_access_secrets(one) == render.build_access_secrets(other)
    assert render.build_network_policies(one) == render.build_network_policies(other)
    engines = [render.build_generation_deployment(item, replicas=1) for item in (one, other)]
    assert not has_other_shape(*engines)
    without = render.build_generation_deployment(context(generation={"access": ALL[1:]}), replicas=1)
    # Its token ends with the engines that accepted it.
    assert has_other_shape(without, engines[0])


def test_nobody_has_access_without_being_named() -> None:
    assert render.build_access_secrets(context()) == []
    assert "_ACCESS_" not in json.dumps(render.build_generation_deployment(context(), replicas=1))
