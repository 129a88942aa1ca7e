"""Jobs with sandboxes, and what their workers ask for."""

from __future__ import annotations

from typing import Any

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.sandboxes import SandboxRequest
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.sandbox_pod import PodContext
from tests.operator.support import NAMESPACE, UID

WORKER = "tasks-workers-0-abcde-0a1b2c3d"


def manifest(name: str = "tasks", **sandbox: Any) -> Object:
    """A RolloutJob with an environment `tasks` whose trajectories have sandboxes."""
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "generation": {"engine": "Simulated", "model": {"source": "/models/tiny"}},
            "environments": [
                {"name": "tasks", "agent": {"tools": {}}, "sandbox": merge({"network": {"mode": "All"}}, sandbox)},
                {"name": "puzzles", "type": "sliding_puzzle"},
            ],
            "dataset": {"source": {"uri": "rows.jsonl"}},
            "output": {"uri": "s3://bucket/run"},
        },
    }


def context(name: str = "tasks", *, uid: str = UID, namespace: str = NAMESPACE, **sandbox: Any) -> PodContext:
    """What the pods of that job are made of."""
    return PodContext(
        job=RolloutJob.model_validate(manifest(name, **sandbox)),
        uid=uid,
        namespace=namespace,
        worker_image="example.org/worker:1",
        run_as_user=65532,
        run_as_group=65532,
    )


def request(**fields: Any) -> SandboxRequest:
    """A sandbox that a worker wants."""
    given: dict[str, Any] = {
        "environment": "tasks",
        "worker": WORKER,
        "image": "example.org/task:1",
        "command": ["/.kuberoll/ld", "server"],
        "variables": {"KUBEROLL_SANDBOX": "{}"},
        "identify": ["/.kuberoll/ld", "identify", "/.kuberoll-user/user"],
    }
    return SandboxRequest.model_validate({**given, **fields})
