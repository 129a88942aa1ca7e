"""Every child of a dozen jobs, as it was looked at and kept: `python -m tests.operator.test_render --update-golden`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from kuberoll_api import contract
from kuberoll_api.manifest.loading import load_job
from kuberoll_api.output_location import InvalidOutput, output_of
from kuberoll_operator import names, render
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.commands.render import TOKEN, UID, children_of, to_yaml
from kuberoll_operator.model import Object, Observed
from kuberoll_operator.render import RenderContext, generation, seal, workers
from kuberoll_operator.render.objects import annotation, has_other_shape, keep_shape
from kuberoll_operator.settings import MissingTokenKey, Settings
from tests.operator import published_crds, support
from tests.schemas import validate

PUBLISHED = {
    kind: Draft202012Validator(published_crds.schema(plural))
    for kind, plural in (
        ("LeaderWorkerSet", "leaderworkersets"),
        ("RayService", "rayservices"),
        ("Workload", "workloads"),
    )
}
GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def settings_of(case: str) -> Settings:
    """The operator's settings of a case: those of all, with what its settings.json says."""
    path = GOLDEN / case / "settings.json"
    if not path.exists():
        return support.SETTINGS
    given = {name: getattr(support.SETTINGS, name) for name in support.SETTINGS.model_fields_set}
    return Settings.model_validate({**given, **json.loads(path.read_bytes())})


def rendered(case: str) -> dict[str, str]:
    """The children of a case, by file name, each with the comment that says when it is created."""
    job = load_job(GOLDEN / case / "input.yaml")
    found = {}
    for when, child in children_of(job, str(job.metadata.namespace), settings_of(case)):
        suffix = child["metadata"]["name"].removeprefix(f"{job.metadata.name}-")
        found[f"{child['kind'].lower()}-{suffix}.yaml"] = f"# {when}\n{to_yaml(child)}"
    return found


def children(case: str) -> list[Object]:
    job = load_job(GOLDEN / case / "input.yaml")
    return [child for _, child in children_of(job, str(job.metadata.namespace), settings_of(case))]


def context(backend: str = "Native", **spec: Any) -> RenderContext:
    job = support.job(**spec)
    return RenderContext(
        job=job,
        namespace=support.NAMESPACE,
        uid=UID,
        settings=support.SETTINGS,
        hosting=BACKENDS[backend].hosting(job, support.NAMESPACE, support.SETTINGS),
        shards=4,
        tokens={scope: support.SETTINGS.token_of(UID, scope) for scope in contract.SCOPES},
        environment_tokens={
            spec.name: support.SETTINGS.token_of(UID, f"environment/{spec.name}") for spec in job.spec.environments
        },
        service_tokens={
            item.name: support.SETTINGS.token_of(UID, f"service/{item.name}") for item in job.spec.services
        },
        servers_token=support.SETTINGS.token_of(UID, "generate/servers"),
        access_tokens={
            item.name: support.SETTINGS.token_of(UID, f"access/{item.name}") for item in job.spec.generation.access
        },
    )


def templates(child: Object) -> list[Object]:
    """The pod templates of a child."""
    if child["kind"] == "RayService":
        cluster = child["spec"]["rayClusterConfig"]
        return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return [child["spec"]["template"]] if child["kind"] in {"Deployment", "Job"} else []


@pytest.mark.parametrize("case", CASES)
def test_children_are_as_they_were(case: str) -> None:
    kept = {path.name: path.read_text() for path in (GOLDEN / case).glob("*.yaml") if path.name != "input.yaml"}
    assert rendered(case) == kept


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_schemas_know_all_of_it(case: str) -> None:
    for child in children(case):
        if child["kind"] == "SandboxClaim":
            # tests/cluster/test_sandboxes.py shows it to an API server with the published CRD.
            continue
        if (schema := PUBLISHED.get(child["kind"])) is not None:
            schema.validate(child)
            for template in templates(child):
                # Its containers' names and ports are KubeRay's to fill in; all else is a pod template's.
                validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]})
        else:
            validate(child)


@pytest.mark.slow
def test_two_processes_render_the_same_bytes() -> None:
    program = "from tests.operator.test_render import CASES, rendered; print([rendered(case) for case in CASES])"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] == f"{[rendered(case) for case in CASES]}\n".encode()


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted_whoever_runs_in_them(case: str) -> None:
    for child in children(case):
        for template in templates(child):
            pod = template["spec"]
            # Ray's autoscaler, beside the head, talks to the API server.
            head = pod["containers"][0]["name"] == "head"
            scales = head and "enableInTreeAutoscaling" in child["spec"]["rayClusterConfig"]
            assert pod["automountServiceAccountToken"] is scales
            assert pod["enableServiceLinks"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            main = pod["containers"][0]["securityContext"]
            assert main["allowPrivilegeEscalation"] is False
            assert main["capabilities"] == {"drop": ["ALL"]}
            servers = child["metadata"]["labels"][names.COMPONENT_LABEL] == names.ENVIRONMENT
            assert main.get("readOnlyRootFilesystem", False) is (child["kind"] == "Job" or servers)


@pytest.mark.parametrize("case", CASES)
def test_every_child_is_found_and_collected_with_its_job(case: str) -> None:
    job = load_job(GOLDEN / case / "input.yaml")
    for child in children(case):
        metadata = child["metadata"]
        assert len(metadata["name"]) <= 63
        assert metadata["labels"][names.JOB_LABEL] == job.metadata.name
        [owner] = metadata["ownerReferences"]
        assert owner["uid"] == UID
        assert owner["controller"] is owner["blockOwnerDeletion"] is True
        for template in templates(child):
            # The label by which a pod is found is not the user's to change.
            assert template["metadata"]["labels"][names.JOB_LABEL] == job.metadata.name


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("model-cache")])
def test_only_the_operator_s_container_can_write_to_the_model_cache(case: str) -> None:
    settings, found = settings_of(case), 0
    for child in children(case):
        groups = child.get("spec", {}).get("leaderWorkerTemplate", {})
        for template in [*templates(child), *(groups[name] for name in ("leaderTemplate", "workerTemplate") if groups)]:
            spec = template["spec"]
            everyone = [*spec.get("initContainers", ()), *spec["containers"]]
            mounts = [(item, mount) for item in everyone for mount in item.get("volumeMounts", ())]
            for container, mount in mounts:
                if mount["name"] not in ("model-cache", "cached-models") or mount.get("readOnly"):
                    continue
                found += 1
                assert container["name"] == contract.MODEL_CACHE_CONTAINER
                assert container["image"] == settings.generation_image
                assert container["command"][:3] == ["python", "-m", "kuberoll_workers.pods.models"]
                assert container["workingDir"] == "/"
                assert container["securityContext"]["runAsUser"] == settings.run_as_user
                own = {"KUBEROLL_NODE", "HOME", "HF_HOME", "TMPDIR"}
                assert {item["name"] for item in container["env"]} <= contract.MODEL_VARIABLES | own
                prefixes = [item["prefix"] for item in container.get("envFrom", ())]
                assert all(prefix.startswith(contract.GIVEN_PREFIX) for prefix in prefixes)
            names = [item["name"] for item in everyone]
            assert len(names) == len(set(names))
    assert found > 0


@pytest.mark.parametrize(
    ("fields", "cached"),
    [
        ({"model": {"source": "org/model"}}, True),
        ({"model": {"source": "gpt2"}}, True),
        ({"model": {"source": "s3://bucket/model"}}, True),
        ({"model": {"source": "/models/huge"}}, False),
        ({"model": {"source": "/models/huge", "tokenizer": "org/model"}}, True),
        ({"model": {"source": "org/model", "cache": False}}, False),
        ({"engine": "Simulated"}, False),
        # Its processes would see the files of the container that writes.
        ({"podTemplate": {"spec": {"shareProcessNamespace": True}}}, False),
    ],
)
def test_what_the_model_cache_is_for(fields: dict[str, Any], cached: bool) -> None:
    settings = support.SETTINGS.model_copy(update={"model_cache_claim": "models"})
    made = generation_deployment(dataclasses.replace(context(generation=fields), settings=settings))
    spec = made["spec"]["template"]["spec"]
    assert ("initContainers" in spec) is cached
    assert any(item["name"] == "model-cache" for item in spec["volumes"]) is cached
    # A claim's files belong to the group of the pods that write them.
    assert (spec["securityContext"].get("fsGroup") == settings.fs_group) is cached
    without = generation_deployment(context(generation=fields))
    assert "initContainers" not in without["spec"]["template"]["spec"]


def test_no_variable_is_put_into_the_name_of_a_model() -> None:
    settings = support.SETTINGS.model_copy(update={"model_cache_claim": "models"})
    given = context(generation={"model": {"source": "org/model", "revision": "$(HF_TOKEN)"}})
    made = generation_deployment(dataclasses.replace(given, settings=settings))
    [filling] = made["spec"]["template"]["spec"]["initContainers"]
    assert "--revision=$$(HF_TOKEN)" in filling["command"]


def generation_deployment(given: RenderContext) -> Object:
    return generation.build_generation_deployment(given, replicas=1)


def test_what_environments_run_beside_does_not_know_the_engines_secrets() -> None:
    [config] = [child for child in children("untrusted") if child["kind"] == "ConfigMap"]
    assert "never-shown" not in config["data"]["job.json"]
    jobs = [child for child in children("untrusted") if child["kind"] == "Job"]
    assert "never-shown" not in json.dumps(jobs)


@pytest.mark.parametrize(
    "change",
    [
        {"workers": {"replicas": 9}},
        {"suspend": True},
        {"activeDeadlineSeconds": 7},
        {"ttlSecondsAfterFinished": 7},
    ],
)
def test_what_may_be_edited_while_pods_run_does_not_change_what_they_read(change: dict[str, Any]) -> None:
    assert render.build_config(context(**change)) == render.build_config(context())


@pytest.mark.parametrize(
    ("uri", "location", "claim"),
    [
        ("s3://bucket/run", "s3://bucket/run", None),
        ("pvc://claim", "/var/lib/kuberoll-output", "claim"),
        ("pvc://claim/", "/var/lib/kuberoll-output", "claim"),
        ("pvc://claim/a/b/", "/var/lib/kuberoll-output/a/b", "claim"),
    ],
)
def test_outputs(uri: str, location: str, claim: str | None) -> None:
    assert output_of(uri) == (location, claim)


@pytest.mark.parametrize("uri", [None, "", "runs/x", "/data", "file:///data", "pvc://", "pvc://claim/../etc"])
def test_outputs_that_would_be_lost_are_refused(uri: str | None) -> None:
    with pytest.raises(InvalidOutput, match=r"spec\.output\.uri: .*pvc://CLAIM"):
        output_of(uri)


def test_sealing_twice_is_sealing_once() -> None:
    sealed = seal(render.build_config(context()))
    assert seal(sealed) == sealed


def test_what_runs_keeps_its_template_and_takes_its_numbers() -> None:
    live = seal(render.build_workers_job(context(), suspend=False))
    wanted = render.build_workers_job(
        context(workers={"replicas": 1, "image": "example.org/new:1", "retriesPerShard": 1}), suspend=True
    )
    assert has_other_shape(wanted, live)
    kept = keep_shape(wanted, live, workers.MUTABLE)
    assert kept["spec"]["template"] == live["spec"]["template"]
    assert kept["spec"]["backoffLimitPerIndex"] == 6
    assert (kept["spec"]["parallelism"], kept["spec"]["suspend"]) == (1, True)
    assert annotation(kept, names.SHAPE_DIGEST) == annotation(live, names.SHAPE_DIGEST)
    assert keep_shape(wanted, seal(kept), workers.MUTABLE) == kept


def test_another_default_image_does_not_restart_engines() -> None:
    live = seal(render.build_generation_deployment(context(), replicas=2))
    wanted = render.build_generation_deployment(context(generation={"image": "example.org/new:1"}), replicas=2)
    assert keep_shape(wanted, live, generation.MUTABLE)["spec"]["template"] == live["spec"]["template"]


def test_weights_are_read_by_pods_that_go_on() -> None:
    other = context(weights={"uri": "/models/2", "version": "2"})
    assert render.build_generation_deployment(other, replicas=2) == render.build_generation_deployment(
        context(), replicas=2
    )
    [before, after] = [json.loads(render.build_config(item)["data"]["job.json"]) for item in (context(), other)]
    assert after["job"]["spec"].pop("weights") == {"uri": "/models/2", "version": "2"}
    assert before == after


def test_tokens_are_of_a_job_and_a_scope() -> None:
    tokens = [support.SETTINGS.token_of(uid, scope) for uid in ("a", "b") for scope in contract.SCOPES]
    assert len(set(tokens)) == 6
    assert tokens[0] == support.SETTINGS.token_of("a", "generate")
    assert {len(token) for token in tokens} == {64}
    assert "a key" not in repr(support.SETTINGS)
    other = Settings(token_key=SecretStr("another key"))
    assert other.token_of("a", "generate") not in tokens


@pytest.mark.parametrize("key", [None, "", " \n"])
def test_no_token_is_made_without_a_key(key: str | None) -> None:
    settings = Settings(token_key=None if key is None else SecretStr(key))
    with pytest.raises(MissingTokenKey, match="KUBEROLL_TOKEN_KEY: not set or empty"):
        settings.token_of("a", "generate")


@pytest.mark.parametrize("backend", ["Native", "KubeRay", "External"])
def test_tokens_are_in_their_secret_and_nowhere_else(backend: str) -> None:
    found = context(backend)
    secrets = render.build_token_secrets(found)
    others = [
        render.build_config(found),
        *render.build_network_policies(found),
        render.build_workers_job(found, suspend=False),
        render.build_finish_job(found),
        *(BACKENDS[backend].engines(found, support.observed(), support.START)),
    ]
    text = json.dumps(others)
    for token in found.tokens.values():
        assert token not in text
    if backend == "External":
        # Somebody else's servers have not heard of them.
        assert (secrets, "KUBEROLL_TOKEN" in text) == ([], False)
        return
    [secret] = secrets
    assert secret["stringData"] == found.tokens
    assert secret["immutable"] is True
    name = secret["metadata"]["name"]
    assert re.fullmatch(r"puzzle-tokens-[0-9a-f]{10}", name)
    wanted: dict[str, set[str]] = {"worker": {"generate"}, "finish": set(), "head": set(contract.SCOPES)}
    containers = [item["spec"]["containers"][0] for child in others for item in templates(child)]
    assert len(containers) == (4 if backend == "KubeRay" else 3)
    for container in containers:
        given = {
            item["name"]: item["valueFrom"]["secretKeyRef"]
            for item in container["env"]
            if item["name"].startswith("KUBEROLL_TOKEN")
        }
        scopes = wanted.get(container["name"], set(contract.SCOPES))
        assert given == {f"KUBEROLL_TOKEN_{scope.upper()}": {"name": name, "key": scope} for scope in scopes}


def test_workers_can_be_kept_from_the_cluster_s_own_networks() -> None:
    settings = support.SETTINGS.model_copy(update={"egress_except": ("10.0.0.0/8", "fd00::/8")})
    store = {"name": "AWS_ENDPOINT_URL", "value": "http://store:9000"}
    found = dataclasses.replace(context(workers={"env": [store]}), settings=settings)
    policy = render.build_network_policies(found)[0]
    outside, named = policy["spec"]["egress"][-2:]
    assert outside == {
        "ports": [{"protocol": "TCP", "port": 443}],
        "to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16", "10.0.0.0/8"]}},
            {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::/32", "fd00::/8"]}},
        ],
    }
    # It may be in the cluster.
    assert named["ports"] == [{"protocol": "TCP", "port": 9000}]
    assert {"namespaceSelector": {}} in named["to"]
    validate(policy)


IDENTITIES = {
    "s3": [("169.254.170.23/32", 80), ("fd00:ec2::23/128", 80)],
    "gs": [("169.254.169.252/32", 988), ("169.254.169.254/32", 80)],
}


@pytest.mark.parametrize(
    ("output", "dataset", "schemes"),
    [
        ("s3://bucket/run", None, ["s3"]),
        ("gs://bucket/run", None, ["gs"]),
        ("pvc://claim/run", "gs://bucket/rows.jsonl", ["gs"]),
        ("s3://bucket/run", "gs://bucket/rows.jsonl", ["gs", "s3"]),
        ("abfs://container@account.dfs.core.windows.net/run", None, []),
        ("pvc://claim/run", None, []),
    ],
)
def test_workers_get_the_identity_that_opens_their_stores_and_no_other(
    output: str, dataset: str | None, schemes: list[str]
) -> None:
    source = {"generator": {"count": 8}} if dataset is None else {"generator": None, "uri": dataset}
    found = context(output={"uri": output}, dataset={"source": source})
    policy = render.build_network_policies(found)[0]
    link_local = [
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        for port in rule["ports"]
        if peer.get("ipBlock", {}).get("cidr", "").startswith(("169.254.1", "fd00"))
    ]
    assert link_local == [place for scheme in schemes for place in IDENTITIES[scheme]]
    validate(policy)
    closed = dataclasses.replace(found, settings=support.SETTINGS.model_copy(update={"workload_identity": False}))
    without = render.build_network_policies(closed)[0]
    dns, *others = policy["spec"]["egress"]
    assert without["spec"]["egress"] == [dns, *others[len(link_local) :]]


def test_workers_reach_the_server_of_an_environment() -> None:
    judge = {"name": "judge", "type": "judge", "config": {"url": "http://judge:8123/v1"}}
    other = {"name": "other", "entrypoint": "a:B", "config": {"url": 5}}
    policy = render.build_network_policies(context(environments=[judge, other]))[0]
    assert {"protocol": "TCP", "port": 8123} in policy["spec"]["egress"][-1]["ports"]
    validate(policy)


def test_workers_reach_the_agent_servers_that_the_job_names() -> None:
    servers = {"url": "http://gym:11000", "agents": {"other": "http://gym:8124"}}
    policy = render.build_network_policies(context(environments=[{"name": "gym", "agent": {"nemoGym": servers}}]))[0]
    for port in (11000, 8124):
        assert {"protocol": "TCP", "port": port} in policy["spec"]["egress"][-1]["ports"]
    validate(policy)


def test_other_tokens_have_another_secret() -> None:
    other = dataclasses.replace(context(), tokens=dict.fromkeys(contract.SCOPES, "x"))
    [one], [another] = render.build_token_secrets(context()), render.build_token_secrets(other)
    assert one["metadata"]["name"] != another["metadata"]["name"]


def test_what_is_printed_without_a_cluster_is_no_token() -> None:
    [secret] = [child for child in children("native") if child["kind"] == "Secret"]
    assert set(secret["stringData"].values()) == {TOKEN}


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, None),
        ({"requests": {"cpu": 32, "memory": "64Gi"}}, {"requests": {"cpu": "1", "memory": "1Gi"}}),
        ({"requests": {"cpu": "250m", "memory": "512M"}}, {"requests": {"cpu": "250m", "memory": "512M"}}),
        # A limit without a request is requested, and stays the limit.
        (
            {"limits": {"cpu": "32", "memory": "0.5Gi", "nvidia.com/gpu": "1"}},
            {"limits": {"cpu": "32", "memory": "0.5Gi"}, "requests": {"cpu": "1", "memory": "0.5Gi"}},
        ),
        ({"requests": {"hugepages-2Mi": "1Gi", "example.org/device": 4}}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["workers.resources", "workers.podTemplate"])
def test_who_aggregates_requests_little(resources: Object, expected: Object | None, by: str) -> None:
    container = {"name": "worker", "resources": resources}
    template = {"podTemplate": {"spec": {"containers": [container]}}}
    found = context(workers={"resources": resources} if by == "workers.resources" else template)
    [finish] = render.build_finish_job(found)["spec"]["template"]["spec"]["containers"]
    assert (finish.get("resources") or None) == (expected or None)
    [worker] = render.build_workers_job(found, suspend=False)["spec"]["template"]["spec"]["containers"]
    assert (worker.get("resources") or {}) == resources


def test_what_is_no_quantity_is_left_to_the_api_server() -> None:
    container = {"name": "worker", "resources": {"requests": {"cpu": "many"}}}
    found = context(workers={"podTemplate": {"spec": {"containers": [container]}}})
    [finish] = render.build_finish_job(found)["spec"]["template"]["spec"]["containers"]
    assert finish["resources"] == {"requests": {"cpu": "many"}}


HARD = {"whenUnsatisfiable": "DoNotSchedule"}


def with_template(found: RenderContext, part: str, template: Object) -> RenderContext:
    """The context with a podTemplate of `generation` or `workers`, in which null is a value."""
    spec = found.job.spec
    options = getattr(spec, part).model_copy(update={"pod_template": template})
    job = found.job.model_copy(update={"spec": spec.model_copy(update={part: options})})
    return dataclasses.replace(found, job=job)


def engines_of(backend: str, template: Object | None = None, **generation: Any) -> list[Object]:
    """Pod templates of engines, the last of one that answers."""
    made = context(backend, generation=generation)
    made = made if template is None else with_template(made, "generation", template)
    found = BACKENDS[backend].engines(made, Observed(), support.START)
    return [item for child in found for item in templates(child) if item["metadata"]["labels"].get("kuberoll.io/job")]


@pytest.mark.parametrize("backend", ["Native", "KubeRay"])
def test_a_lost_node_takes_as_few_pods_as_may_be(backend: str) -> None:
    engine = engines_of(backend)[-1]
    [wish] = engine["spec"]["topologySpreadConstraints"]
    assert (wish["topologyKey"], wish["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    # Those that KubeRay or LeaderWorkerSet adds apart.
    labels = wish["labelSelector"]["matchLabels"]
    own = {key: value for key, value in labels.items() if key != "ray.io/group"}
    assert own.items() <= engine["metadata"]["labels"].items()
    # A user has the last word.
    for change, expected in (
        (None, None),
        ([{"topologyKey": wish["topologyKey"], **HARD}], [{**wish, **HARD}]),
    ):
        mine = engines_of(backend, {"spec": {"topologySpreadConstraints": change}})[-1]
        assert mine["spec"].get("topologySpreadConstraints") == expected


def test_workers_are_apart_unless_they_must_be_together() -> None:
    found = context()

    def spec(made: RenderContext) -> Object:
        return dict(render.build_workers_job(made, suspend=False)["spec"]["template"]["spec"])

    [wish] = spec(found)["topologySpreadConstraints"]
    assert wish["labelSelector"]["matchLabels"] == names.selector("puzzle", names.WORKERS)
    assert wish["whenUnsatisfiable"] == "ScheduleAnyway"
    together = spec(dataclasses.replace(found, together=True))
    assert "topologySpreadConstraints" not in together
    assert "podAffinity" in together["affinity"]
    mine = with_template(found, "workers", {"spec": {"topologySpreadConstraints": None}})
    assert "topologySpreadConstraints" not in spec(mine)


@pytest.mark.parametrize("backend", ["Native", "KubeRay"])
def test_autoscalers_of_nodes_leave_engines_where_they_are(backend: str) -> None:
    evict, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
    for item in engines_of(backend):
        assert item["metadata"]["annotations"] == {evict: "false", disrupt: "true"}
    mine = engines_of(backend, {"metadata": {"annotations": {disrupt: None, evict: "true"}}})
    assert mine[-1]["metadata"]["annotations"] == {evict: "true"}


def test_what_workers_keep_on_their_node_does_not_hold_it() -> None:
    for made in (render.build_workers_job(context(), suspend=False), render.build_finish_job(context())):
        template = made["spec"]["template"]
        value = template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"]
        local = [item["name"] for item in template["spec"]["volumes"] if "emptyDir" in item]
        assert value.split(",") == local
        assert "cluster-autoscaler.kubernetes.io/safe-to-evict" not in template["metadata"]["annotations"]


def test_scaling_does_not_change_the_shape() -> None:
    first = render.build_workers_job(context(), suspend=False)
    assert not has_other_shape(first, seal(render.build_workers_job(context(workers={"replicas": 1}), suspend=True)))


def test_pods_know_how_long_the_policy_may_take_to_start() -> None:
    told = json.loads(render.build_config(context(startupDeadlineSeconds=7))["data"]["job.json"])
    assert told["job"]["spec"]["startupDeadlineSeconds"] == 7


def test_a_pods_startup_may_take_as_long_as_the_job_allows() -> None:
    made = render.build_generation_deployment(context(startupDeadlineSeconds=1801), replicas=2)
    probe = made["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 1810


def _update() -> None:
    for case in CASES:
        wanted = rendered(case)
        for path in (GOLDEN / case).glob("*.yaml"):
            if path.name not in {"input.yaml", *wanted}:
                path.unlink()
        for name, text in wanted.items():
            (GOLDEN / case / name).write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--update-golden"]:
        sys.exit("usage: python -m tests.operator.test_render --update-golden")
    _update()
