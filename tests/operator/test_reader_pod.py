"""The pod that reads a job's output."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kuberoll_api.contract import PodConfig
from kuberoll_operator import names
from kuberoll_operator.commands.get import rendered_template
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.reader_pod import pod_name, reader_pod
from kuberoll_operator.model import Object
from kuberoll_operator.render.pods import DRAINS
from tests.operator.support import NAMESPACE, SETTINGS, UID, job, manifest

ESCALATING = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def live(**spec: Any) -> Object:
    found = manifest(**spec)
    return {**found, "metadata": {**found["metadata"], "uid": UID}}


def workers_template(**spec: Any) -> Object:
    """As it is in a cluster, where the Job controller has added its labels."""
    children = children_of(job(**spec), NAMESPACE, SETTINGS)
    found = next(item for _, item in children if item["metadata"]["name"] == "puzzle-workers" and item["kind"] == "Job")
    template: Object = copy.deepcopy(found["spec"]["template"])
    template["metadata"]["labels"] |= {
        "batch.kubernetes.io/controller-uid": "u",
        "batch.kubernetes.io/job-name": "puzzle-workers",
        "controller-uid": "u",
        "job-name": "puzzle-workers",
    }
    return template


def made(**spec: Any) -> Object:
    return reader_pod(live(**spec), workers_template(**spec), "puzzle-reader-1")


CLAIM = {"output": {"uri": "pvc://store/run"}}


def test_it_belongs_to_the_job_and_to_no_controller() -> None:
    metadata = made(**CLAIM)["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("puzzle-reader-1", NAMESPACE)
    assert metadata["labels"] == names.labels("puzzle", "reader")
    owner = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "name": "puzzle", "uid": UID}
    # Neither controller nor blockOwnerDeletion: those take rights that people who read do not have.
    assert metadata["ownerReferences"] == [owner]


def test_it_is_the_worker_with_another_program() -> None:
    environment = [{"name": "AWS_REGION", "value": "eu"}, {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s"}}}]
    options: Object = {
        "image": "example.org/mine:2",
        "env": environment,
        "nodeSelector": {"pool": "cpu"},
        "resources": {"limits": {"cpu": "32", "memory": "128Gi"}},
    }
    metadata: Object = {
        "labels": {"azure.workload.identity/use": "true", "kueue.x-k8s.io/queue-name": "team"},
        "annotations": {"iam": "role"},
    }
    fields: Object = {
        "serviceAccountName": "writer",
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "pull"}],
        "runtimeClassName": "gvisor",
    }
    container = {"name": "worker", "envFrom": [{"secretRef": {"name": "store"}}]}
    options["podTemplate"] = {"metadata": metadata, "spec": {**fields, "containers": [container]}}
    pod = made(workers=options)
    spec, main = pod["spec"], pod["spec"]["containers"][0]
    assert [item["name"] for item in spec["containers"]] == ["reader"]
    assert main["image"] == "example.org/mine:2"
    assert main["command"][:3] == ["python", "-m", "kuberoll_workers.pods.reader"]
    assert all(item in main["env"] for item in environment)
    assert main["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert spec["nodeSelector"] == options["nodeSelector"]
    assert {name: spec[name] for name in fields} == fields
    assert main["resources"]["limits"]["memory"] == "1Gi"
    assert not {"ports", "readinessProbe", "livenessProbe", "args"} & main.keys()
    labels = pod["metadata"]["labels"]
    assert labels["azure.workload.identity/use"] == "true"
    assert not any(key.startswith(("kueue", "batch.", "controller-uid", "job-name")) for key in labels)
    assert pod["metadata"]["annotations"] == {"iam": "role", **DRAINS}


def test_it_writes_nowhere_but_to_its_own_scratch() -> None:
    source = {"pvc": {"claimName": "rows", "path": "train.jsonl"}}
    pod = made(**CLAIM, dataset={"source": {"generator": None, **source}})
    writable = {item["name"] for item in pod["spec"]["containers"][0]["volumeMounts"] if not item.get("readOnly")}
    scratch = {item["name"] for item in pod["spec"]["volumes"] if "emptyDir" in item}
    assert writable == scratch
    assert "output" not in writable
    mounts = {item["name"]: item for item in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["output"]["readOnly"] is True


def test_it_is_restricted_whatever_the_workers_may_do() -> None:
    loose = {"privileged": True, "allowPrivilegeEscalation": True, "capabilities": {"add": ["SYS_ADMIN"]}}
    container = {"name": "worker", "securityContext": {**loose, "runAsUser": 1234}}
    sidecar = {"name": "agent", "image": "agent"}
    template = {"spec": {"containers": [container, sidecar], "initContainers": [sidecar], "hostNetwork": True}}
    spec = made(workers={"podTemplate": template})["spec"]
    (main,) = spec["containers"]
    assert main["securityContext"] == {**ESCALATING, "runAsUser": 1234}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"initContainers", "hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_it_ends_by_itself() -> None:
    spec = made()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["terminationGracePeriodSeconds"] == 1


def test_it_has_no_token_of_the_policy() -> None:
    template = workers_template()
    token = {"name": "KUBEROLL_TOKEN_GENERATE", "valueFrom": {"secretKeyRef": {"name": "t", "key": "generate"}}}
    template["spec"]["containers"][0]["env"].append(token)
    pod = reader_pod(live(), template, "x")
    assert not [item for item in pod["spec"]["containers"][0]["env"] if "TOKEN" in item["name"]]


def test_it_goes_where_the_workers_are() -> None:
    node: Object = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
    template = {"spec": {"affinity": {"nodeAffinity": node, "podAntiAffinity": apart}}}
    affinity = made(workers={"podTemplate": template})["spec"]["affinity"]
    assert affinity["nodeAffinity"] == node
    assert affinity.keys() == {"nodeAffinity", "podAffinity"}
    (term,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    selector = term["podAffinityTerm"]["labelSelector"]
    assert selector["matchLabels"] == {names.JOB_LABEL: "puzzle"}
    assert selector["matchExpressions"][0]["values"] == ["finish", "workers"]


def test_a_job_without_its_jobs_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEROLL_WORKER_IMAGE", "example.org/worker:9")
    pod = reader_pod(live(**CLAIM), rendered_template(live(**CLAIM)), "x")
    (main,) = pod["spec"]["containers"]
    assert main["image"] == "example.org/worker:9"
    assert "output" in {item["name"] for item in main["volumeMounts"]}
    named = live(workers={"image": "example.org/mine:2"})
    assert rendered_template(named)["spec"]["containers"][0]["image"] == "example.org/mine:2"


def test_a_job_that_has_no_pods_and_never_will_says_why() -> None:
    with pytest.raises(ConsoleError, match=r"cannot have any: spec\.output\.uri: found .runs/x."):
        rendered_template(live(output={"uri": "runs/x"}))


def test_its_name_is_its_own_and_a_name() -> None:
    first, second = pod_name("j" * 40), pod_name("j" * 40)
    assert first != second
    assert len(first) <= 63


def test_it_is_valid(tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = tmp_path / "pod.yaml"
    with text.open("w") as file:
        YAML().dump(made(**CLAIM), file)
    kubernetes_validate.validate(made(**CLAIM), "1.35", strict=True)


def test_the_reader_reads_the_configuration_that_pods_have() -> None:
    main = made(**CLAIM)["spec"]["containers"][0]
    assert main["command"][3:] == ["--config", "/etc/kuberoll/job.json"]
    assert "config" in {item["name"] for item in main["volumeMounts"]}
    assert "output" in {field.name for field in dataclasses.fields(PodConfig)}
