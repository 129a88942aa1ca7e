"""Jobs, and the objects of a cluster around them, as an API server returns them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import SecretStr

from kuberoll_api.contract import PodProgress
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.model import Object, Observed, ServedWeights, WriteError
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.settings import Settings

UID = "11111111-2222-3333-4444-555555555555"
NAMESPACE = "rollouts"
START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = Settings(
    generation_image="example.org/generation:1", worker_image="example.org/worker:1", token_key=SecretStr("a key")
)


def at(seconds: float) -> datetime:
    """So many seconds after the job was first seen."""
    return START + timedelta(seconds=seconds)


def stamp(seconds: float) -> str:
    """The same as a Kubernetes timestamp."""
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def manifest(name: str = "puzzle", **spec: Any) -> Object:
    """A small RolloutJob; `spec` is merged over its spec."""
    base: Object = {
        "generation": {"backend": "Native", "model": {"source": "org/model"}, "replicas": 2},
        "environments": [{"name": "sliding_puzzle", "type": "sliding_puzzle"}],
        "dataset": {"source": {"generator": {"count": 8}}},
        "workers": {"replicas": 2, "shards": 4},
        "output": {"uri": "s3://bucket/run"},
    }
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": merge(base, spec),
    }


def job(name: str = "puzzle", **spec: Any) -> RolloutJob:
    """The same, validated."""
    return RolloutJob.model_validate(manifest(name, **spec))


def checked_manifest(name: str = "puzzle", **spec: Any) -> Object:
    """The manifest of a job of which it is known that its workers will have what they need."""
    return {**manifest(name, **spec), "status": {"conditions": [condition("WorkersChecked", True, "Checked")]}}


def raw(status: Mapping[str, Any] | None = None, name: str = "puzzle", **metadata: Any) -> Object:
    """The live object of a job, less its spec."""
    found: Object = {"metadata": {"name": name, "namespace": NAMESPACE, "uid": UID, "generation": 1, **metadata}}
    return found if status is None else {**found, "status": dict(status)}


def condition(kind: str, status: bool, reason: str, message: str = "", seconds: float = 0) -> Object:
    """A condition that came to its status at a time."""
    return {
        "type": kind,
        "status": "True" if status else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp(seconds),
        "observedGeneration": 1,
    }


def child(kind: str, name: str, *, spec: Any = None, status: Any = None, uid: str = UID, **metadata: Any) -> Object:
    """A child of the job, by label and owner."""
    owner = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "name": "puzzle", "uid": uid}
    return {
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": {names.JOB_LABEL: "puzzle"},
            "ownerReferences": [owner],
            "generation": 1,
            **metadata,
        },
        "spec": spec or {},
        "status": status or {},
    }


def deployment(ready: int = 0, **status: Any) -> Object:
    """The generation Deployment."""
    return child("Deployment", "puzzle-generation", status={"observedGeneration": 1, "readyReplicas": ready, **status})


def workers_job(*, suspend: bool = False, completions: int = 4, **status: Any) -> Object:
    """The Indexed Job."""
    return child("Job", "puzzle-workers", spec={"suspend": suspend, "completions": completions}, status=status)


def check_job(**status: Any) -> Object:
    """The check Job."""
    return child("Job", "puzzle-check", spec={"suspend": False}, status=status)


def finish_job(**status: Any) -> Object:
    """The finish Job."""
    return child("Job", "puzzle-finish", spec={"suspend": False}, status=status)


def job_condition(kind: str, reason: str = "", message: str = "") -> list[Object]:
    """The conditions of a Job that has come to an end."""
    return [{"type": kind, "status": "True", "reason": reason, "message": message}]


def pod(
    component: str,
    suffix: str = "a",
    *,
    phase: str = "Running",
    shard: int | None = None,
    container: Mapping[str, Any] | None = None,
    init: Mapping[str, Any] | None = None,
    conditions: list[Object] | None = None,
) -> Object:
    """A pod of the job; `container` is the status of its one container."""
    main = {"generation": "generation", "workers": "worker", "check": "worker", "finish": "finish"}[component]
    labels = {names.JOB_LABEL: "puzzle", names.COMPONENT_LABEL: component}
    if shard is not None:
        labels["batch.kubernetes.io/job-completion-index"] = str(shard)
    status: Object = {"phase": phase}
    if container is not None:
        status["containerStatuses"] = [{"name": main, "ready": False, "restartCount": 0, **container}]
    if init is not None:
        status["initContainerStatuses"] = [{"name": "prepare", "ready": False, "restartCount": 0, **init}]
    if conditions is not None:
        status["conditions"] = conditions
    return {"metadata": {"name": f"puzzle-{component}-{suffix}", "labels": labels}, "status": status}


def waiting(reason: str, message: str = "", **more: Any) -> Object:
    """Of a container that is not started."""
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


def terminated(code: int, message: str = "", *, seconds: float = 0, reason: str = "Error") -> Object:
    """Of a container that has ended."""
    ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(seconds)}
    return {"state": {"terminated": ended}}


def unschedulable(message: str) -> list[Object]:
    """Conditions of a pod that has no node."""
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


def observed(
    *children: Object,
    pods: list[Object] | None = None,
    progress: Mapping[int, PodProgress] | None = None,
    served: Mapping[str, ServedWeights] | None = None,
    errors: Mapping[tuple[str, str], WriteError] | None = None,
) -> Observed:
    """What a reconcile sees."""
    return Observed(
        children={(item["kind"], item["metadata"]["name"]): item for item in children},
        pods=pods or [],
        progress=progress or {},
        served=served or {},
        errors=errors or {},
    )
