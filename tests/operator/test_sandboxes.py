"""What a job's workers get so that trajectories have sandboxes, and what those reach."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api import sandboxes
from kuberoll_operator import names, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.facts import child_refs, compute_facts, spec_problem
from kuberoll_operator.model import Object, Plan
from kuberoll_operator.plan import plan
from kuberoll_operator.quantities import number_of
from kuberoll_operator.render.context import Assignment, RenderContext
from kuberoll_operator.render.demand import demand
from kuberoll_operator.render.workload import PodSet
from kuberoll_operator.sandbox_pod import PodContext, build_pod, problem
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


@pytest.mark.parametrize(("ahead", "more"), [({}, 1), ({"startAhead": 0}, 0), ({"startAhead": 5}, 5)])
def test_quota_is_asked_for_those_that_start_ahead_too(ahead: dict[str, Any], more: int) -> None:
    made = context(environment(resources={"limits": {"cpu": 1}}, **ahead))
    rollout = made.job.spec.rollout.model_copy(update={"concurrency": 8})
    job = made.job.model_copy(update={"spec": made.job.spec.model_copy(update={"rollout": rollout})})
    [found] = render.sandbox_pod_sets(dataclasses.replace(made, job=job))
    workers = min(job.spec.workers.replicas, made.shards)
    assert found.pods == workers * (8 + more)


def placements(made: RenderContext) -> dict[str, sandboxes.Placement]:
    """Where the workers are told that sandboxes may be, by their environment."""
    found = variables(render.build_workers_job(made, suspend=False)).get(sandboxes.PLACEMENT_VARIABLE)
    return {} if found is None else sandboxes.Placements.model_validate_json(found["value"]).root


def test_sandboxes_go_where_their_quota_is() -> None:
    toleration = {"key": "pool", "operator": "Exists"}
    granted = Assignment(count=4, node_selector={"pool": "cpu"}, tolerations=[toleration])
    [(name, found)] = placements(context(assignments={"sandboxes": granted})).items()
    assert name == "harbor"
    assert (found.node_selector, found.tolerations) == ({"pool": "cpu"}, [toleration])


def sized(cpu: str, memory: str, *, name: str = "harbor", **sandbox: Any) -> dict[str, Any]:
    """An environment whose sandboxes may be so large."""
    given = environment(resources={"limits": {"cpu": cpu, "memory": memory}}, **sandbox)
    return {**given, "name": name}


def asked(item: PodSet) -> Object:
    """What a pod set asks for, for its main container."""
    [found] = [each for each in item.template["spec"]["containers"] if each["name"] == sandboxes.CONTAINER]
    return dict(found["resources"]["requests"])


def test_sandboxes_that_may_be_on_the_same_nodes_ask_for_the_largest_together() -> None:
    secrets = {"spec": {"imagePullSecrets": [{"name": "registry"}], "hostUsers": False}}
    made = context(sized("2", "1Gi"), sized("1", "4Gi", name="other", podTemplate=secrets))
    [pods] = render.sandbox_pod_sets(made)
    assert (pods.name, asked(pods)) == ("sandboxes", {"cpu": "2000m", "memory": "4096Mi"})


def test_a_request_that_is_not_said_is_the_limit() -> None:
    one = sized("1", "1Gi")
    other = {**sized("4", "1Gi", name="other"), "sandbox": {**sized("4", "1Gi")["sandbox"]}}
    other["sandbox"]["resources"] = {**other["sandbox"]["resources"], "requests": {"cpu": "10m"}}
    [pods] = render.sandbox_pod_sets(context(one, other))
    assert asked(pods)["cpu"] == "1000m"


def test_sandboxes_on_different_nodes_ask_apart_and_each_goes_to_its_own() -> None:
    here, there = ({"spec": {"nodeSelector": {"disk": disk}}} for disk in ("ssd", "hdd"))
    made = context(
        sized("1", "1Gi", podTemplate=here),
        sized("2", "2Gi", name="second", podTemplate=there),
        sized("3", "1Gi", name="third", podTemplate=here),
    )
    found = render.sandbox_pod_sets(made)
    assert [(item.name, item.template["spec"]["nodeSelector"]["disk"], asked(item)["cpu"]) for item in found] == [
        ("sandboxes", "ssd", "3000m"),
        ("sandboxes-1", "hdd", "2000m"),
    ]
    # Beside the machines of trajectories that run, those that are started ahead: an eighth for each environment.
    workers, running = min(made.job.spec.workers.replicas, 4), made.job.spec.rollout.concurrency
    assert [item.pods for item in found] == [workers * (running + count * running // 8) for count in (2, 1)]
    granted = {item.name: Assignment(node_selector={"flavor": item.name}) for item in found}
    assert {name: place.node_selector["flavor"] for name, place in placements(context_of(made, granted)).items()} == {
        "harbor": "sandboxes",
        "second": "sandboxes-1",
        "third": "sandboxes",
    }


def context_of(made: RenderContext, assignments: dict[str, Assignment]) -> RenderContext:
    return dataclasses.replace(made, assignments=assignments)


LABELS = st.dictionaries(st.sampled_from(["disk", "pool", "zone"]), st.sampled_from(["a", "b"]), max_size=3)
TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from(["disk", "pool", "node.kubernetes.io/not-ready"])},
        optional={"operator": st.just("Exists"), "effect": st.sampled_from(["NoSchedule", "NoExecute"])},
    ),
    max_size=3,
    unique_by=repr,
)
AFFINITY = st.builds(
    lambda key, value: {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}]
            }
        }
    },
    st.sampled_from(["disk", "zone"]),
    st.sampled_from(["a", "b"]),
)
SPREAD = st.just([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}])
SIDECAR = {"name": "log", "image": "example.org/log:1", "resources": {"requests": {"cpu": "100m", "memory": "32Mi"}}}
SETUP = {"name": "setup", "image": "example.org/setup:1", "resources": {"requests": {"cpu": "3", "memory": "128Mi"}}}
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "affinity": AFFINITY,
        "containers": st.sampled_from(
            [[SIDECAR], [{"name": "sandbox", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]]
        ),
        "initContainers": st.sampled_from([[SETUP], [{"name": "runtime", "resources": {"requests": {"cpu": "2"}}}]]),
        "nodeSelector": LABELS,
        "overhead": st.just({"cpu": "250m"}),
        "priorityClassName": st.just("low"),
        "schedulerName": st.just("bin-packer"),
        "tolerations": TOLERATIONS,
        "topologySpreadConstraints": SPREAD,
    },
)


def reserved(spec: Object) -> dict[str, Decimal]:
    """What a scheduler takes a pod to need: all containers together, or an init container that needs more.

    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """

    def of(container: Object) -> dict[str, Decimal]:
        given = container.get("resources", {})
        amounts = {**given.get("limits", {}), **given.get("requests", {})}
        return {name: number_of(amount) for name, amount in amounts.items()}

    together, first = list(map(of, spec["containers"])), list(map(of, spec["initContainers"]))
    return {
        name: max(
            sum((item.get(name, Decimal(0)) for item in together), Decimal(0)),
            *(item.get(name, Decimal(0)) for item in first),
        )
        for item in (*together, *first)
        for name in item
    }


def text_of(item: Object) -> str:
    return json.dumps(item, sort_keys=True)


def placed(spec: Object) -> Object:
    """All that a scheduler reads of where a pod may be, in no order."""
    found = {name: value for name, value in demand({"spec": spec})["spec"].items() if "ontainers" not in name}
    return {**found, "tolerations": sorted(map(text_of, found["tolerations"]))}


@given(
    over=SPECS,
    runtime=st.sampled_from([None, "gvisor"]),
    flavor=st.tuples(LABELS, TOLERATIONS),
    share=st.floats(0.01, 1),
    identify=st.booleans(),
    storage=st.booleans(),
    requests=st.sampled_from([{}, {"cpu": "10m"}, {"cpu": "1", "memory": "1Gi"}]),
)
def test_a_pod_set_agrees_with_the_broker_s_pods(
    over: Object,
    runtime: str | None,
    flavor: tuple[dict[str, str], list[Object]],
    share: float,
    identify: bool,
    storage: bool,
    requests: dict[str, str],
) -> None:
    """It asks for the nodes that each pod may be on, and for as much as the largest one."""
    limits = {"cpu": "2", "memory": "3Gi", **({"ephemeral-storage": "10Gi"} if storage else {})}
    options = {"resources": {"limits": limits, "requests": requests}, "podTemplate": {"spec": over}}
    made = context(environment(**options, **({"runtimeClassName": runtime} if runtime else {})))
    [pods] = render.sandbox_pod_sets(made)
    template = pods.template["spec"]
    selector, tolerations = flavor
    [place] = placements(
        context_of(made, {pods.name: Assignment(node_selector=selector or {"x": "y"}, tolerations=tolerations)})
    ).values()

    def pod(part: float, placement: sandboxes.Placement) -> Object:
        request = sandboxes.SandboxRequest(
            environment="harbor",
            worker="a-worker",
            image="debian:bookworm",
            command=["server"],
            identify=["identify"] if identify else [],
            cpus=2 * part,
            memory=int((3 << 30) * part),
            storage=int((10 << 30) * part) if storage else None,
            placement=placement,
        )
        whose = PodContext(job=made.job, uid=made.uid, namespace=made.namespace, worker_image="example.org/worker:1")
        assert problem(request, whose) is None
        return dict(build_pod("one", request, whose)["spec"])

    largest = pod(1, sandboxes.Placement())
    assert placed(largest) == placed(template)
    assert reserved(largest) == reserved(template)
    smaller = pod(share, place)
    assert reserved(smaller).keys() <= reserved(template).keys()
    assert all(amount <= reserved(template)[name] for name, amount in reserved(smaller).items())
    # What the admission adds is added to both, and nothing that the pod set asked for is lost.
    assert smaller["nodeSelector"] == {**template.get("nodeSelector", {}), **place.node_selector}
    added = map(text_of, place.tolerations)
    lost = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert {text for text in placed(smaller)["tolerations"] if not any(name in text for name in lost)} == {
        text for text in (*placed(template)["tolerations"], *added) if not any(name in text for name in lost)
    }
    given, wanted = placed(smaller), placed(template)
    assert {name: given[name] for name in wanted if name not in ("nodeSelector", "tolerations")} == {
        name: value for name, value in wanted.items() if name not in ("nodeSelector", "tolerations")
    }


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


def test_what_has_no_token_is_closed_to_sandboxes_of_all_jobs() -> None:
    """One with network `All` reaches whatever does not refuse it."""
    policies = {item["metadata"]["name"]: item["spec"] for item in render.build_network_policies(context())}
    for name, port in (("puzzle-workers", 9464), ("puzzle-generation", 8080)):
        [rule] = [
            item for item in policies[name]["ingress"] if [one["port"] for one in item.get("ports", [])] == [port]
        ]
        [peer] = rule["from"]
        [expression] = peer["podSelector"]["matchExpressions"]
        assert peer["namespaceSelector"] == {}
        assert expression["operator"] == "DoesNotExist"
        assert expression["key"] in names.sandbox_labels("another", "open", "a-worker", "All")
        assert expression["key"] not in names.labels("another", names.WORKERS)


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
