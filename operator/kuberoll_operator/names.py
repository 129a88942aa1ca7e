"""Names, labels and annotations of a job's objects. They are fixed, so that a restarted operator finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kuberoll_api.contract import ENVIRONMENT_PORT, GENERATION_PORT, SERVICE_PORT

MANAGED_BY: Final = "kuberoll.io/operator"
"""Value of `spec.managedBy` that means this operator, as does its absence."""

MANAGER: Final = "kuberoll-operator"
"""Field manager of children, and `app.kubernetes.io/managed-by` of all objects."""

STATUS_MANAGER: Final = "kuberoll-operator-status"

JOB_LABEL: Final = "kuberoll.io/job"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's label on a RolloutJob: the LocalQueue of its namespace that it waits in for quota."""

WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's label on a pod: its index within the replica; the leader is 0."""

PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""Kueue's label on a RolloutJob: its WorkloadPriorityClass."""

ENVIRONMENT_LABEL: Final = "kuberoll.io/environment"
"""Label of an environment's server pods: the environment's name."""

SERVICE_LABEL: Final = "kuberoll.io/service"
"""Label of a service's pods: the service's name."""

# agent-sandbox takes labels of a claim's pod in domains that its administrator allows: by default in this one.
CLAIMED_JOB_LABEL: Final = "sandbox.users.io/kuberoll-job"
"""Label of the pods of claimed sandboxes: the job's name."""

CLAIMED_ENVIRONMENT_LABEL: Final = "sandbox.users.io/kuberoll-environment"
"""Label of the pods of claimed sandboxes: the environment's name."""

SANDBOX: Final = "sandbox"
"""Component of the pods of trajectories' sandboxes, which the broker makes."""

# Not `JOB_LABEL`: the operator watches what has that, and there may be thousands of these.
SANDBOX_JOB_LABEL: Final = "kuberoll.io/sandbox-of"
"""Label of a sandbox's pod: the job's name."""

SANDBOX_WORKER_LABEL: Final = "kuberoll.io/sandbox-worker"
"""Label of a sandbox's pod: the worker that has it."""

SANDBOX_NETWORK_LABEL: Final = "kuberoll.io/sandbox-network"
"""Label of a sandbox's pod: what it reaches, `None` or `All`."""

BROKER: Final = "kuberoll-broker"
"""Field manager of sandboxes' pods, and their `app.kubernetes.io/managed-by`."""

# Not the name, which an installation may change.
BROKER_SELECTOR: Final[Mapping[str, str]] = {
    "app.kubernetes.io/component": "broker",
    "app.kubernetes.io/part-of": "kuberoll",
}
"""Labels that select the broker's pods, in the namespace of the installation."""

DIGEST: Final = "kuberoll.io/digest"
"""Annotation of a child: digest of the object as it was rendered."""

SHAPE_DIGEST: Final = "kuberoll.io/template-digest"
"""Annotation of a child: digest of the part that cannot change while it runs, mainly its pod template."""

AUTOSCALING: Final = "kuberoll.io/autoscaling"
"""Annotation of the Deployment: the number of replicas called for and since when, while it has another number."""

CONFIG: Final = "config"
FILES: Final = "files"
"""Component of the ConfigMap that `kuberoll apply` creates."""

TOKENS: Final = "tokens"
ACCESS: Final = "access"
"""Component of the Secrets for pods outside the job that may use its policy. Their names have no digest."""
GENERATION: Final = "generation"
WORKERS: Final = "workers"
CHECK: Final = "check"
ENVIRONMENT: Final = "environment"
"""Component of the server pods of environments with isolation Remote, and of what belongs to them."""
SERVICE: Final = "service"
"""Component of the pods of services, further served models, and of what belongs to them."""
READER: Final = "reader"
"""Component of the pods that `kuberoll get` creates."""
FINISH: Final = "finish"
QUOTA: Final = "quota"

HEAD: Final = "head"
"""Pod set of Ray's head in a Workload, with backend KubeRay; the other pod sets are named after their components."""

CONFIG_KEY: Final = "job.json"

REPLICA_PORTS: Final = (30000, 31000)
"""First and last of the ports on which Serve's replicas listen, with backend KubeRay."""

RAY_DASHBOARD_PORT: Final = 8265


def config(job: str) -> str:
    """Name of the ConfigMap that all pods read."""
    return f"{job}-config"


def files(job: str, digest: str) -> str:
    """Name of the ConfigMap with the files beside a manifest; it contains a digest of them."""
    return f"{job}-files-{digest}"


def tokens(job: str, digest: str) -> str:
    """Name of the Secret with the policy's tokens; it contains a digest of them."""
    return f"{job}-tokens-{digest[:10]}"


def environment(job: str, number: int) -> str:
    """Name of the Deployment of an environment's servers, and of its ConfigMap, Service and NetworkPolicy.

    The number is the environment's in the job: its name may have characters that names of objects must not have.
    """
    return f"{job}-env-{number}"


def environment_tokens(job: str, digest: str) -> str:
    """Name of the Secret with the tokens of the environments' servers; it contains a digest of them."""
    return f"{job}-env-tokens-{digest[:10]}"


def policy_access(job: str, digest: str) -> str:
    """Name of the Secret with the policy's address and token for environments' servers, with a digest of both."""
    return f"{job}-env-policy-{digest[:10]}"


def access(job: str, name: str) -> str:
    """Name of the Secret with the policy's address and a token, for pods outside the job."""
    return f"{job}-access-{name}"


def access_tokens(job: str, digest: str) -> str:
    """Name of the Secret with the tokens of all pods outside the job, with a digest of them: what replicas accept."""
    return f"{job}-tokens-access-{digest[:10]}"


def sandbox_token(job: str, digest: str) -> str:
    """Name of the Secret with the workers' token at the broker; it contains a digest of it."""
    return f"{job}-sandbox-token-{digest[:10]}"


def environment_selector(job: str, name: str) -> dict[str, str]:
    """Labels that select an environment's server pods."""
    return {**selector(job, ENVIRONMENT), ENVIRONMENT_LABEL: name}


def claim(job: str, number: int, index: int) -> str:
    """Name of a SandboxClaim of an environment; a sandbox that is made for it has the same."""
    return f"{environment(job, number)}-{index}"


def claimed_selector(job: str, name: str) -> dict[str, str]:
    """Labels that select the pods of an environment's claimed sandboxes."""
    return {CLAIMED_ENVIRONMENT_LABEL: name, CLAIMED_JOB_LABEL: job}


def environment_url(job: str, number: int, namespace: str) -> str:
    """URL of an environment's servers: each address of its host is one of them."""
    return f"http://{environment(job, number)}.{namespace}.svc:{ENVIRONMENT_PORT}"


def service(job: str, number: int) -> str:
    """Name of the Deployment of a service, a further served model, and of its Service and NetworkPolicy.

    The number is the service's in the job: a longer name would not fit beside the job's.
    """
    return f"{job}-service-{number}"


def service_tokens(job: str, digest: str) -> str:
    """Name of the Secret with the API keys of the services; it contains a digest of them."""
    return f"{job}-service-tokens-{digest[:10]}"


def service_selector(job: str, name: str) -> dict[str, str]:
    """Labels that select a service's pods."""
    return {**selector(job, SERVICE), SERVICE_LABEL: name}


def service_url(job: str, number: int, namespace: str) -> str:
    """Base URL of a service's OpenAI-compatible API."""
    return f"http://{service(job, number)}.{namespace}.svc:{SERVICE_PORT}/v1"


def generation(job: str) -> str:
    """Name of the Deployment of backend Native, and of generation's Service and NetworkPolicy."""
    return f"{job}-generation"


def leader_worker_set(job: str) -> str:
    """Name of the LeaderWorkerSet of backend Native, and of its headless Service."""
    return f"{job}-replicas"


def generation_url(job: str, namespace: str) -> str:
    """URL of the policy, for backends whose Service the operator creates."""
    return f"http://{generation(job)}.{namespace}.svc:{GENERATION_PORT}"


def ray_service(job: str) -> str:
    """Name of the RayService. KubeRay derives longer names from it, which leaves 47 characters."""
    return f"{job}-gen"


def generation_pods(job: str) -> str:
    """Name of the headless Service of generation pods."""
    return f"{job}-generation-pods"


def workers(job: str) -> str:
    """Name of the workers' Indexed Job, its headless Service and its NetworkPolicy."""
    return f"{job}-workers"


def check(job: str) -> str:
    """Name of the Job that checks the workers' inputs before an engine is started."""
    return f"{job}-check"


def finish(job: str) -> str:
    """Name of the Job that aggregates."""
    return f"{job}-finish"


def workload(job: str) -> str:
    """Name of Kueue's Workload."""
    return f"{job}-workload"


def labels(job: str, component: str) -> dict[str, str]:
    """Labels of all children and pods of a job."""
    return {
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/name": "kuberoll",
        "app.kubernetes.io/part-of": "kuberoll",
        JOB_LABEL: job,
    }


def selector(job: str, component: str) -> dict[str, str]:
    """Labels that select the pods of a component."""
    return {COMPONENT_LABEL: component, JOB_LABEL: job}


def selector_text(job: str, component: str) -> str:
    """The selector as text, for `kubectl get pods --selector`."""
    return ",".join(f"{key}={value}" for key, value in selector(job, component).items())


def sandboxes(job: str) -> str:
    """Name of the NetworkPolicy of the job's sandboxes."""
    return f"{job}-sandboxes"


def sandboxes_with_network(job: str) -> str:
    """Name of the NetworkPolicy of those that reach everything."""
    return f"{job}-sandboxes-all"


def sandbox_selector(job: str) -> dict[str, str]:
    """Labels that select the pods of a job's sandboxes."""
    return {COMPONENT_LABEL: SANDBOX, SANDBOX_JOB_LABEL: job}


def sandbox_labels(job: str, environment: str, worker: str, network: str) -> dict[str, str]:
    """Labels of a sandbox's pod."""
    return {
        "app.kubernetes.io/component": SANDBOX,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": BROKER,
        "app.kubernetes.io/name": "kuberoll",
        "app.kubernetes.io/part-of": "kuberoll",
        ENVIRONMENT_LABEL: environment,
        SANDBOX_JOB_LABEL: job,
        SANDBOX_NETWORK_LABEL: network,
        SANDBOX_WORKER_LABEL: worker,
    }
