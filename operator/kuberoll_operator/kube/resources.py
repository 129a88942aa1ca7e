"""Kinds that the operator reads and writes, with their API paths."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kuberoll_api.model.rolloutjob import API_VERSION, GROUP, KIND, VERSION


class Resource(NamedTuple):
    """A kind and its API path.

    Attributes:
        group: Empty for the core group.
        plural: Its name in paths.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object, or of a list; namespace None: of all namespaces, or cluster-scoped."""
        parts = ["/apis", self.group] if self.group else ["/api"]
        parts.append(self.version)
        if namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *filter(None, (name, subresource))])


ROLLOUT_JOBS: Final = Resource(GROUP, VERSION, "rolloutjobs", KIND)
PODS: Final = Resource("", "v1", "pods", "Pod")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
"""Only ever created: the operator has no other permission for them."""

EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")

CLUSTER_EVENTS: Final = Resource("", "v1", "events", "Event")
"""Those of others, about what jobs need; only read. The core group's select by the object that they are about."""

PERSISTENT_VOLUME_CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
"""Those that pods mount; only read."""

CHILDREN: Final = (
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "services", "Service"),
    Resource("apps", "v1", "deployments", "Deployment"),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
)
"""Kinds of children in every cluster; all of them are watched."""

RAY_SERVICES: Final = Resource("ray.io", "v1", "rayservices", "RayService")
"""Created with backend KubeRay; watched if the cluster serves them."""

LEADER_WORKER_SETS: Final = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
"""Created with backend Native for replicas that span pods; watched if the cluster serves them."""

SANDBOX_CLAIMS: Final = Resource("extensions.agents.x-k8s.io", "v1beta1", "sandboxclaims", "SandboxClaim")
"""Claims of agent-sandbox, for environments with `remote.sandbox`; watched if the cluster serves them."""

WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
"""Kueue's requests for quota, one for each job in a queue; watched if the cluster serves them."""

RESOURCE_FLAVORS: Final = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor")
"""Kueue's description of the nodes that a quota is for; cluster-scoped, and only read."""

WORKLOAD_PRIORITY_CLASSES: Final = Resource(
    "kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", "WorkloadPriorityClass"
)
"""Kueue's priorities; cluster-scoped, and only read."""

_BY_KIND = {
    (item.api_version, item.kind): item
    for item in (
        *(ROLLOUT_JOBS, PODS, LEASES, SECRETS, EVENTS, *CHILDREN),
        *(RAY_SERVICES, LEADER_WORKER_SETS, SANDBOX_CLAIMS, WORKLOADS),
    )
}


def resource_of(api_version: str, kind: str) -> Resource:
    """The resource of a kind.

    Raises:
        KeyError: The operator does not use this kind.
    """
    return _BY_KIND[api_version, kind]


def resource_of_object(item: dict[str, Any]) -> Resource:
    """The resource of an object's kind.

    Raises:
        KeyError: The operator does not use its kind.
    """
    return resource_of(item["apiVersion"], item["kind"])


assert ROLLOUT_JOBS.api_version == API_VERSION
