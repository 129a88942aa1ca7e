"""Pod that reads a job's output: the job's own worker pod with another program, and read-only volumes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api.model.rolloutjob import API_VERSION, KIND
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.config import CONFIG_FILE

COMPONENT: Final = names.READER
CONTAINER: Final = "reader"
COMMAND: Final = ("python", "-m", "kuberoll_workers.pods.reader", "--config", CONFIG_FILE)
DEADLINE_SECONDS: Final = 3600

_RESOURCES: Final[Mapping[str, Any]] = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
# Fields of a worker's container that belong to its own program.
_OF_THE_WORKER: Final = frozenset(
    {"args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "resizePolicy", "startupProbe", "workingDir"}
)
# Fields of a pod's spec that tell where, as which user and with which volumes it runs.
_KEPT: Final = frozenset(
    {
        "automountServiceAccountToken",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "hostAliases",
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "runtimeClassName",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "tolerations",
        "volumes",
    }
)
# With these labels, controllers would adopt the pod, and queues would hold it back.
_FOREIGN_LABELS: Final = ("batch.kubernetes.io/", "kueue.x-k8s.io/", "controller-uid", "job-name")
_TOKENS: Final = "KUBEROLL_TOKEN_"


def reader_pod(job: Object, template: Mapping[str, Any], name: str) -> Object:
    """The reader pod, owned by the job.

    Args:
        job: The RolloutJob, live.
        template: Template of the job's worker or finish pods; its first container is used.
    """
    given, metadata = template["spec"], template.get("metadata") or {}
    labels = {
        key: value for key, value in (metadata.get("labels") or {}).items() if not key.startswith(_FOREIGN_LABELS)
    }
    spec = {key: value for key, value in given.items() if key in _KEPT}
    affinity = {"podAffinity": _near_the_workers(job["metadata"]["name"])}
    if node := (given.get("affinity") or {}).get("nodeAffinity"):
        affinity["nodeAffinity"] = node
    owner = job["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner["namespace"],
            "labels": {**labels, **names.labels(owner["name"], COMPONENT)},
            **({"annotations": dict(found)} if (found := _annotations(metadata)) else {}),
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": KIND, "name": owner["name"], "uid": owner["uid"]},
            ],
        },
        "spec": {
            **spec,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "affinity": affinity,
            "containers": [_container(_main(given["containers"]), _writable(given.get("volumes") or ()))],
            "restartPolicy": "Never",
            # There is nothing to finish.
            "terminationGracePeriodSeconds": 1,
        },
    }


def pod_name(job: str) -> str:
    """A unique name for a reader pod."""
    return f"{job}-{COMPONENT}-{secrets.token_hex(3)}"


def _main(containers: list[Object]) -> Object:
    wanted = [item for item in containers if item["name"] in ("worker", "finish", "check")]
    return (wanted or containers)[0]


def _container(worker: Object, writable: frozenset[str]) -> Object:
    kept = {key: value for key, value in worker.items() if key not in _OF_THE_WORKER}
    security = {
        key: value
        for key, value in (worker.get("securityContext") or {}).items()
        if key in {"runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions"}
    }
    return {
        **kept,
        "name": CONTAINER,
        "command": list(COMMAND),
        "env": [item for item in worker.get("env") or () if not str(item["name"]).startswith(_TOKENS)],
        "resources": dict(_RESOURCES),
        "volumeMounts": [_mount(item, writable) for item in worker.get("volumeMounts") or ()],
        "securityContext": {
            **security,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _writable(volumes: Any) -> frozenset[str]:
    """Volumes that live as long as the pod; all others are mounted read-only."""
    return frozenset(item["name"] for item in volumes if "emptyDir" in item)


def _mount(mount: Object, writable: frozenset[str]) -> Object:
    return dict(mount) if mount["name"] in writable else {**mount, "readOnly": True}


def _annotations(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The job's own annotations, without those of the operator and the Job controller."""
    found = metadata.get("annotations") or {}
    return {key: value for key, value in found.items() if not key.startswith(("batch.", "kuberoll.io/"))}


def _near_the_workers(job: str) -> Object:
    """Affinity to the job's pods: a ReadWriteOnce claim is on one node at a time."""
    selector = {
        "matchExpressions": [
            {"key": names.COMPONENT_LABEL, "operator": "In", "values": [names.FINISH, names.WORKERS]},
        ],
        "matchLabels": {names.JOB_LABEL: job},
    }
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
