"""The Helm chart over a matrix of values, rendered by Helm itself."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from helm_python import HelmError, chart
from ruamel.yaml import YAML

from kuberoll_api import contract
from kuberoll_api.sandboxes import BROKER_PORT
from kuberoll_api.schema import crd
from kuberoll_operator import names
from kuberoll_operator.broker.settings import BrokerSettings
from kuberoll_operator.settings import Settings
from tests.charts.rendering import CHART, NAMESPACE, RELEASE, ROOT, notes, of_kind, one, rendered
from tests.schemas import validate

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MONITORED = {
    "operator": {"serviceMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}}},
    "workers": {"podMonitor": {"enabled": True}},
    "generation": {"podMonitor": {"enabled": True, "interval": ""}},
    "prometheusRule": {"enabled": True, "alertLabels": {"team": "post-training"}},
    "dashboards": {"enabled": True, "namespace": "grafana", "annotations": {"grafana_folder": "KubeRoll"}},
}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaces": {"watch": {"namespaces": ["team-a", "team-b"]}},
    "replicas": {"operator": {"replicas": 3}},
    "monitored": {"monitoring": MONITORED},
    "monitored namespaces": {"monitoring": MONITORED, "watch": {"namespaces": ["team-a"]}},
    "locked down": {"networkPolicy": {"enabled": True, "apiServerPorts": [6443]}, "operator": {"hostUsers": False}},
    "OpenShift": {
        "jobs": {"fsGroup": None, "runAsUser": None, "runAsGroup": None},
        "operator": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    },
    "images": {
        "image": {
            "registry": "registry.example.com",
            "digest": f"sha256:{'0' * 64}",
            "pullSecrets": [{"name": "pull"}],
        },
        "jobs": {
            "imagePullPolicy": "Always",
            "defaultOutput": "s3://bucket/rollouts",
            "generationImage": "mine/engine:1",
            "tokenKey": {"existingSecret": "token"},
            "kuberayNamespace": "ray-system",
            "rayVersion": "2.60.1",
        },
    },
    "models of nodes": {
        "jobs": {"modelCache": {"hostPath": "/var/lib/kuberoll/models", "size": "500Gi", "acrossNamespaces": True}}
    },
    "models of a claim": {"jobs": {"modelCache": {"claim": "models", "size": "500Gi", "digests": True}}},
    "without": {
        "crds": {"enabled": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
    },
    "everything of a pod": {
        "operator": {
            "extraArgs": ["--no-leader-election"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "annotations": {"a": "b"},
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ],
            "priorityClassName": "high",
            "runtimeClassName": "gvisor",
        },
        "commonLabels": {"owner": "me"},
        "service": {"annotations": {"a": "b"}, "port": 80},
        "serviceAccount": {"annotations": {"a": "b"}},
        "nameOverride": "rolls",
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
        ],
    },
}
MATRIX |= {
    "sandboxes": {"sandboxes": {"enabled": True}},
    "sandboxes of namespaces": {
        "sandboxes": {
            "enabled": True,
            "extraEnv": [{"name": "A", "value": "b"}],
            "annotations": {"a": "b"},
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "priorityClassName": "high",
        },
        **{name: value for case in ("namespaces", "locked down", "images") for name, value in MATRIX[case].items()},
        "monitoring": MONITORED,
        "fullnameOverride": "rolls",
    },
    "sandboxes without rights": {**MATRIX["without"], "sandboxes": {"enabled": True, "serviceAccountName": "mine"}},
}
FOREIGN_GROUPS = ("monitoring.coreos.com/", "apiextensions.k8s.io/")


def part(objects: list[dict[str, Any]], kind: str, component: str) -> dict[str, Any]:
    """The only object of a kind that is of the operator or of the broker."""
    [found] = [
        item
        for item in of_kind(objects, kind)
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    return found


def container_of(objects: list[dict[str, Any]], component: str = "operator") -> dict[str, Any]:
    """The container of the operator's Deployment, or of the broker's."""
    [found] = part(objects, "Deployment", component)["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture(params=list(MATRIX.values()), ids=list(MATRIX))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.mark.parametrize("script", ["scripts.chart", "scripts.dashboards"])
def test_what_is_made_is_there(script: str) -> None:
    done = subprocess.run([sys.executable, "-m", script, "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")


def test_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = chart.lint(CHART, values, strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def test_kubernetes_schemas_know_all_of_it(values: dict[str, Any]) -> None:
    objects = rendered(values)
    assert objects
    for item in objects:
        if not item["apiVersion"].startswith(FOREIGN_GROUPS):
            validate(item)


def test_every_object_is_named_and_labelled_once(values: dict[str, Any]) -> None:
    objects = rendered(values)
    places = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(places) == len(set(places))
    for item in objects:
        if item["metadata"]["name"] == f"{RELEASE}-more":
            continue
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert labels["helm.sh/chart"] == f"kuberoll-{VERSION}"
        if "commonLabels" in values:
            assert labels["owner"] == "me"


def test_pods_are_restricted(values: dict[str, Any]) -> None:
    objects = rendered(values)
    pods = [item["spec"]["template"]["spec"] for item in of_kind(objects, "Deployment")]
    pods.append(one(objects, "Pod")["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not set(pod) & {"hostNetwork", "hostPID", "hostIPC"}
        assert {next(iter(set(volume) - {"name"})) for volume in pod.get("volumes", [])} <= {"emptyDir"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["limits"]["memory"]


def test_the_operator_understands_its_environment(values: dict[str, Any]) -> None:
    container = container_of(rendered(values))
    given = {item["name"]: item.get("value", "from the pod") for item in container["env"]}
    known = {f"KUBEROLL_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in given if name.startswith("KUBEROLL_")} <= known
    settings = Settings.from_environment(given)
    assert list(settings.namespaces) == values.get("watch", {}).get("namespaces", [])
    for name, found in (
        ("fsGroup", settings.fs_group),
        ("runAsUser", settings.run_as_user),
        ("runAsGroup", settings.run_as_group),
    ):
        assert found == values.get("jobs", {}).get(name, 65532)
    assert settings.egress_ports == (443,)
    assert settings.workload_identity == values.get("jobs", {}).get("workloadIdentity", True)
    assert settings.replace_lost_workers == values.get("jobs", {}).get("replaceLostWorkers", True)
    assert settings.default_output == (values.get("jobs", {}).get("defaultOutput") or None)
    models = values.get("jobs", {}).get("modelCache", {})
    assert settings.model_cache_host_path == models.get("hostPath")
    assert settings.model_cache_claim == models.get("claim")
    assert settings.model_cache_size == (500 << 30 if models else None)
    assert settings.model_cache_across_namespaces == models.get("acrossNamespaces", False)
    assert settings.model_cache_digests == models.get("digests", False)


LOST = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for key in ("not-ready", "unreachable")
]
FOREVER = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
ALL = {"operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], LOST),
        ([{"key": "a", "operator": "Exists"}], [{"key": "a", "operator": "Exists"}, *LOST]),
        ([FOREVER], [FOREVER, LOST[0]]),
        ([ALL], [ALL]),
    ],
    ids=["none", "others", "their own", "all"],
)
def test_the_operator_leaves_a_lost_node_soon(given: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    found = one(rendered({"operator": {"tolerations": given}}), "Deployment")["spec"]["template"]["spec"]
    assert found["tolerations"] == expected


def test_the_operator_s_policy_lets_it_ask_what_it_asks() -> None:
    """Progress of workers, weights of generation pods, and with KubeRay those of Serve."""
    policy = one(rendered(MATRIX["locked down"]), "NetworkPolicy")
    [jobs] = [rule for rule in policy["spec"]["egress"] if "to" in rule]
    asked = {contract.PROGRESS_PORT, contract.STATUS_PORT, contract.GENERATION_PORT}
    assert {item["port"] for item in jobs["ports"]} == asked


def test_images() -> None:
    def images(values: dict[str, Any]) -> tuple[str, str, str]:
        container = one(rendered(values), "Deployment")["spec"]["template"]["spec"]["containers"][0]
        settings = Settings.from_environment({item["name"]: item.get("value", "") for item in container["env"]})
        return container["image"], settings.generation_image, settings.worker_image

    assert images({}) == (
        f"kuberoll/operator:{VERSION}",
        f"kuberoll/generation:{VERSION}",
        f"kuberoll/worker:{VERSION}",
    )
    assert images(MATRIX["images"]) == (
        f"registry.example.com/kuberoll/operator:{VERSION}@sha256:{'0' * 64}",
        "mine/engine:1",
        f"registry.example.com/kuberoll/worker:{VERSION}",
    )


def test_one_replica_is_replaced_and_several_take_turns() -> None:
    assert one(rendered(), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert of_kind(rendered(), "PodDisruptionBudget") == []
    several = rendered({"operator": {"replicas": 2}})
    assert one(several, "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"
    assert one(several, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    with pytest.raises(HelmError, match=r"operator\.leaderElection\.enabled"):
        rendered({"operator": {"replicas": 2, "leaderElection": {"enabled": False}}})


def test_the_crd_is_the_generated_one() -> None:
    found = one(rendered(), "CustomResourceDefinition")
    assert found["spec"] == json.loads(json.dumps(crd.definition()["spec"]))
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in one(rendered({"crds": {"keep": False}}), "CustomResourceDefinition")["metadata"]


def rules(*files: str) -> list[dict[str, Any]]:
    return [
        rule
        for name in files
        for rule in YAML(typ="safe").load((CHART / "files" / "rules" / f"{name}.yaml").read_text())
    ]


def of_broker(values: dict[str, Any]) -> tuple[list[dict[str, Any]], BrokerSettings]:
    """The objects, and the broker's settings as it reads them."""
    objects = rendered(values)
    given = {item["name"]: item.get("value", "from a Secret") for item in container_of(objects, "broker")["env"]}
    known = {f"KUBEROLL_{name.upper()}" for name in BrokerSettings.model_fields}
    assert {name for name in given if name.startswith("KUBEROLL_")} <= known
    return objects, BrokerSettings.from_environment(given)


@pytest.mark.parametrize("case", [name for name in MATRIX if name.startswith("sandboxes")])
def test_the_operator_and_the_broker_agree(case: str) -> None:
    objects, broker = of_broker(MATRIX[case])
    environment = {item["name"]: item.get("value", "from a Secret") for item in container_of(objects)["env"]}
    operator = Settings.from_environment(environment)
    service = part(objects, "Service", "broker")
    [port] = service["spec"]["ports"]
    place = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    assert operator.sandbox_broker == f"http://{place}"
    assert port["port"] == broker.http_port == BROKER_PORT
    pod = part(objects, "Deployment", "broker")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    # By these jobs' network policies find it, whatever the release is called.
    assert names.BROKER_SELECTOR.items() <= pod["metadata"]["labels"].items()
    for name in ("worker_image", "image_pull_policy", "run_as_user", "run_as_group", "namespaces"):
        assert getattr(operator, name) == getattr(broker, name)
    keys = [
        next(
            item["valueFrom"] for item in container_of(objects, component)["env"] if item["name"].endswith("_TOKEN_KEY")
        )
        for component in ("operator", "broker")
    ]
    assert keys[0] == keys[1]
    assert (broker.starts, broker.starts_per_job) == (128, 32)


def test_the_broker_s_rights_are_exactly_these() -> None:
    expected = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": ["kuberoll.io"], "resources": ["rolloutjobs"], "verbs": ["get"]},
    ]
    everywhere = rendered(MATRIX["sandboxes"])
    account = part(everywhere, "ServiceAccount", "broker")
    subject = {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": NAMESPACE}
    assert account["metadata"]["name"] == "kuberoll-broker"
    pod = part(everywhere, "Deployment", "broker")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "kuberoll-broker"
    assert part(everywhere, "ClusterRole", "broker")["rules"] == expected
    assert part(everywhere, "ClusterRoleBinding", "broker")["subjects"] == [subject]
    bound = [
        item
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for item in of_kind(everywhere, kind)
        if subject in item["subjects"]
    ]
    assert len(bound) == 1
    some = rendered({**MATRIX["sandboxes"], **MATRIX["namespaces"]})
    roles = [item for item in of_kind(some, "Role") if item["metadata"]["name"] == "kuberoll-broker"]
    assert [(item["metadata"]["namespace"], item["rules"]) for item in roles] == [
        ("team-a", expected),
        ("team-b", expected),
    ]
    assert not [item for item in of_kind(some, "ClusterRole") if item["metadata"]["name"] == "kuberoll-broker"]


def test_there_is_no_broker_unless_it_is_wanted() -> None:
    objects = rendered()
    assert not [item for item in objects if "broker" in item["metadata"]["name"]]
    assert "KUBEROLL_SANDBOX_BROKER" not in {item["name"] for item in container_of(objects)["env"]}
    assert "sandboxes.enabled is false" in notes()
    assert "sandboxes.enabled" not in notes(MATRIX["sandboxes"])


def test_the_broker_is_reached_at_its_port_and_reaches_the_api_server() -> None:
    policy = part(rendered(MATRIX["sandboxes of namespaces"]), "NetworkPolicy", "broker")
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53, 6443]


NAMESPACED = ("operator", "lost-workers", "leaderworkersets", "sandboxclaims", "queues")
RULES = rules(*NAMESPACED, "queues-cluster")


def test_rights_are_exactly_these() -> None:
    verbs = {(group, resource): set(rule["verbs"]) for rule in RULES for group in rule["apiGroups"]
             for resource in rule["resources"]}  # fmt: skip
    children = {"get", "list", "watch", "create", "patch", "delete"}
    assert verbs == {
        ("kuberoll.io", "rolloutjobs"): {"get", "list", "watch", "delete"},
        ("kuberoll.io", "rolloutjobs/status"): {"get", "patch"},
        ("kuberoll.io", "rolloutjobs/finalizers"): {"update"},
        ("batch", "jobs"): children,
        ("apps", "deployments"): children,
        ("", "services"): children,
        ("", "configmaps"): children,
        ("networking.k8s.io", "networkpolicies"): children,
        ("policy", "poddisruptionbudgets"): children,
        ("ray.io", "rayservices"): children,
        ("leaderworkerset.x-k8s.io", "leaderworkersets"): children,
        ("extensions.agents.x-k8s.io", "sandboxclaims"): children,
        ("kueue.x-k8s.io", "workloads"): children,
        ("kueue.x-k8s.io", "workloads/status"): {"get", "patch"},
        ("kueue.x-k8s.io", "resourceflavors"): {"get"},
        ("kueue.x-k8s.io", "workloadpriorityclasses"): {"get"},
        ("", "pods"): {"get", "list", "watch"},
        ("", "pods/status"): {"patch"},
        ("", "events"): {"list"},
        ("", "persistentvolumeclaims"): {"get"},
        ("", "secrets"): {"create"},
        ("events.k8s.io", "events"): {"create", "patch"},
    }


def test_who_wants_neither_queues_nor_sets_nor_sandboxes_gives_no_rights_for_them() -> None:
    values = {"queues": {"enabled": False}, "leaderWorkerSet": {"enabled": False}, "agentSandbox": {"enabled": False}}
    values["jobs"] = {"replaceLostWorkers": False}
    plain = rendered(values)
    assert one(plain, "ClusterRole", "kuberoll-operator")["rules"] == rules("operator")
    [container] = one(plain, "Deployment")["spec"]["template"]["spec"]["containers"]
    given = {item["name"]: item.get("value") for item in container["env"]}
    off = {"KUBEROLL_QUEUES": "false", "KUBEROLL_KUEUE": "false", "KUBEROLL_LEADER_WORKER_SET": "false"}
    off["KUBEROLL_AGENT_SANDBOX"] = off["KUBEROLL_REPLACE_LOST_WORKERS"] = "false"
    assert off.items() <= given.items()
    some = rendered({**values, "watch": {"namespaces": ["team-a"]}})
    assert of_kind(some, "ClusterRoleBinding") == []


def test_rights_are_for_the_watched_namespaces_only() -> None:
    everywhere = rendered()
    assert one(everywhere, "ClusterRole", "kuberoll-operator")["rules"] == RULES
    assert one(everywhere, "ClusterRoleBinding")["subjects"] == [
        {"kind": "ServiceAccount", "name": "kuberoll-operator", "namespace": NAMESPACE}
    ]
    some = rendered(MATRIX["namespaces"])
    # What has no namespace: to be read only.
    assert one(some, "ClusterRole", "kuberoll-operator")["rules"] == rules("queues-cluster")
    assert one(some, "ClusterRoleBinding")["roleRef"]["name"] == "kuberoll-operator"
    for namespace in ("team-a", "team-b"):
        [role] = [item for item in of_kind(some, "Role") if item["metadata"]["namespace"] == namespace]
        assert role["rules"] == rules(*NAMESPACED)
    lease = one(some, "Role", "kuberoll-operator-lease")
    assert lease["metadata"]["namespace"] == NAMESPACE
    assert lease["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "create", "update"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
    ]


def test_nothing_reads_secrets_or_runs_in_pods() -> None:
    objects = rendered(MATRIX["sandboxes"])
    for item in [*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role")]:
        for rule in item["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            assert not set(rule["resources"]) & {"pods/exec", "pods/attach", "nodes", "roles"}
            if "secrets" in rule["resources"]:
                assert (rule["resources"], rule["verbs"]) == (["secrets"], ["create"])


def _token_key(objects: list[dict[str, Any]]) -> dict[str, Any]:
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    [variable] = [item for item in container["env"] if item["name"] == "KUBEROLL_TOKEN_KEY"]
    return dict(variable["valueFrom"]["secretKeyRef"])


def test_there_is_always_a_key_for_tokens() -> None:
    objects = rendered()
    secret = one(objects, "Secret")
    assert _token_key(objects) == {"name": secret["metadata"]["name"], "key": "key"}
    # Random: another rendering, which cannot look into a cluster, has another one.
    again = one(rendered({"commonLabels": {"a": "b"}}), "Secret")
    keys = [base64.b64decode(item["data"]["key"]) for item in (secret, again)]
    assert [len(key) for key in keys] == [64, 64]
    assert keys[0] != keys[1]
    # Or a job that runs on while nothing is installed would lose its policy.
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_key_of_ones_own_is_not_the_chart_s_to_make() -> None:
    objects = rendered({"jobs": {"tokenKey": {"existingSecret": "mine", "secretKey": "other"}}})
    assert of_kind(objects, "Secret") == []
    assert _token_key(objects) == {"name": "mine", "key": "other"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"operator": {"replicaz": 2}}, "replicaz"),
        ({"watch": {"namespaces": "team-a"}}, "/watch/namespaces"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"monitoring": {"workers": {"podMonitor": {"interval": "15"}}}}, "/monitoring/workers/podMonitor/interval"),
    ],
)
def test_mistakes_in_values_are_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(HelmError, match=field):
        rendered(values)


def test_the_chart_is_whole_without_a_network() -> None:
    chart = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())
    assert "dependencies" not in chart


def test_monitors_find_what_they_scrape() -> None:
    objects = rendered(MATRIX["monitored namespaces"])
    service = one(objects, "Service")
    monitor = one(objects, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    for item in of_kind(objects, "PodMonitor"):
        assert item["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert one(rendered(MATRIX["monitored"]), "PodMonitor", "kuberoll-workers")["spec"]["namespaceSelector"] == {
        "any": True
    }


def test_alerts_have_your_labels_and_a_runbook() -> None:
    rule = one(rendered(MATRIX["monitored"]), "PrometheusRule")
    page = (ROOT / "docs" / "reference" / "alerts.md").read_text().lower()
    found = [item for group in rule["spec"]["groups"] for item in group["rules"]]
    assert len(found) == 10
    [operator] = [item for item in found if item["alert"] == "KuberollOperatorNotReconciling"]
    assert operator["expr"].endswith("or absent(kuberoll_operator_leader)")
    for item in found:
        assert item["labels"]["team"] == "post-training"
        assert item["labels"]["severity"] in {"warning", "critical"}
        assert "{{ $" in item["annotations"]["summary"] or item["alert"].startswith("KuberollOperator")
        url, _, anchor = item["annotations"]["runbook_url"].partition("#")
        assert url.endswith("docs/reference/alerts.md")
        assert f"## {anchor}\n" in page


def test_dashboards_are_found_by_the_sidecar() -> None:
    found = [
        item for item in of_kind(rendered(MATRIX["monitored"]), "ConfigMap") if "dashboard" in item["metadata"]["name"]
    ]
    assert len(found) == 3
    for item in found:
        assert item["metadata"]["namespace"] == "grafana"
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        [text] = item["data"].values()
        assert json.loads(text)["uid"].startswith("kuberoll-")
        # Of one object, which an API server takes up to 1 MiB.
        assert len(text) < 500_000


def test_the_notes_say_what_is_next() -> None:
    text = notes(MATRIX["namespaces"])
    assert "kubectl -n kuberoll-system rollout status deployment/kuberoll-operator" in text
    assert "kubectl -n team-a get rlj -w" in text
    for name in [word for word in text.split() if word.startswith("examples/")]:
        assert (ROOT / name).is_file()
