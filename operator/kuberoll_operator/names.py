"""Names, labels and annotations of what belongs to a RolloutJob; fixed, so that a restarted operator finds it."""

from __future__ import annotations

from typing import Final

from kuberoll_api.contract import GENERATION_PORT

MANAGED_BY: Final = "kuberoll.io/operator"
"""The value of `spec.managedBy` that means this operator, as does its absence."""

MANAGER: Final = "kuberoll-operator"
"""Field manager of children; `app.kubernetes.io/managed-by` of everything."""

STATUS_MANAGER: Final = "kuberoll-operator-status"

JOB_LABEL: Final = "kuberoll.io/job"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's label: of a RolloutJob, the LocalQueue of its namespace that it waits in for quota."""

WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's label: of a pod, which part of its replica it is; the leader is 0."""

PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""Kueue's label: of a RolloutJob, the WorkloadPriorityClass that it has in its queue."""

DIGEST: Final = "kuberoll.io/digest"
"""Annotation: of a child as it was rendered."""

SHAPE_DIGEST: Final = "kuberoll.io/template-digest"
"""Annotation: of the part of a child that cannot change while it runs, its pod template first of all."""

AUTOSCALING: Final = "kuberoll.io/autoscaling"
"""Annotation: of the Deployment, how many replicas are called for and since when, while it has another number."""

CONFIG: Final = "config"
TOKENS: Final = "tokens"
GENERATION: Final = "generation"
WORKERS: Final = "workers"
CHECK: Final = "check"
READER: Final = "reader"
"""Of pods that `kuberoll get` makes."""
FINISH: Final = "finish"
QUOTA: Final = "quota"

HEAD: Final = "head"
"""The pod set of Ray's head in a Workload, with backend KubeRay; the others are called like their component."""

CONFIG_KEY: Final = "job.json"

REPLICA_PORTS: Final = (30000, 31000)
"""Where Serve's replicas listen themselves, the first and the last, with backend KubeRay."""

RAY_DASHBOARD_PORT: Final = 8265


def config(job: str) -> str:
    """The ConfigMap that all pods read."""
    return f"{job}-config"


def tokens(job: str, digest: str) -> str:
    """The Secret of the policy's tokens; other tokens make another digest."""
    return f"{job}-tokens-{digest[:10]}"


def generation(job: str) -> str:
    """The Deployment of backend Native; generation's Service and NetworkPolicy."""
    return f"{job}-generation"


def leader_worker_set(job: str) -> str:
    """The LeaderWorkerSet of backend Native, and the headless Service that is made for it under the same name."""
    return f"{job}-replicas"


def generation_url(job: str, namespace: str) -> str:
    """Where the policy is, of backends whose Service is ours."""
    return f"http://{generation(job)}.{namespace}.svc:{GENERATION_PORT}"


def ray_service(job: str) -> str:
    """The RayService; KubeRay's own names begin with it, and leave it 47 characters."""
    return f"{job}-gen"


def generation_pods(job: str) -> str:
    """The headless Service of generation pods."""
    return f"{job}-generation-pods"


def workers(job: str) -> str:
    """The Indexed Job, its headless Service and its NetworkPolicy."""
    return f"{job}-workers"


def check(job: str) -> str:
    """The Job that looks at what workers need, before an engine is started."""
    return f"{job}-check"


def finish(job: str) -> str:
    """The Job that aggregates."""
    return f"{job}-finish"


def workload(job: str) -> str:
    """Kueue's Workload."""
    return f"{job}-workload"


def labels(job: str, component: str) -> dict[str, str]:
    """What every child and pod of a job is labelled with."""
    return {
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/name": "kuberoll",
        "app.kubernetes.io/part-of": "kuberoll",
        JOB_LABEL: job,
    }


def selector(job: str, component: str) -> dict[str, str]:
    """The labels that pods of a component are selected by."""
    return {COMPONENT_LABEL: component, JOB_LABEL: job}


def selector_text(job: str, component: str) -> str:
    """The same as text, as `kubectl get pods --selector` takes it."""
    return ",".join(f"{key}={value}" for key, value in selector(job, component).items())
