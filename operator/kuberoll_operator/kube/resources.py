"""The kinds that the operator reads and writes, and where the API server has them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kuberoll_api.model.rolloutjob import API_VERSION, GROUP, KIND, VERSION


class Resource(NamedTuple):
    """A kind and its place.

    Attributes:
        group: Empty for the core group.
        plural: Its name in addresses.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As objects have it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object, or of a list; without a namespace: of all namespaces."""
        parts = ["/apis", self.group] if self.group else ["/api"]
        parts.append(self.version)
        if namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *filter(None, (name, subresource))])


ROLLOUT_JOBS: Final = Resource(GROUP, VERSION, "rolloutjobs", KIND)
PODS: Final = Resource("", "v1", "pods", "Pod")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
"""Created, and never read: the operator may do nothing else with them."""

EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")

CHILDREN: Final = (
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "services", "Service"),
    Resource("apps", "v1", "deployments", "Deployment"),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
)
"""What the operator makes; all of them are watched."""

RAY_SERVICES: Final = Resource("ray.io", "v1", "rayservices", "RayService")
"""Made with backend KubeRay; watched where the cluster serves them."""

LEADER_WORKER_SETS: Final = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
"""Made with backend Native for replicas that span pods; watched where the cluster serves them."""

WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
"""Kueue's requests for quota, one of every job in a queue; watched where the cluster serves them."""

RESOURCE_FLAVORS: Final = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor")
"""Which nodes a quota of Kueue's is for; of the whole cluster, and only read."""

WORKLOAD_PRIORITY_CLASSES: Final = Resource(
    "kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", "WorkloadPriorityClass"
)
"""Kueue's priorities; of the whole cluster, and only read."""

_BY_KIND = {
    (item.api_version, item.kind): item
    for item in (ROLLOUT_JOBS, PODS, LEASES, SECRETS, EVENTS, *CHILDREN, RAY_SERVICES, LEADER_WORKER_SETS, WORKLOADS)
}


def resource_of(api_version: str, kind: str) -> Resource:
    """Where a kind is.

    Raises:
        KeyError: The operator has nothing to do with it.
    """
    return _BY_KIND[api_version, kind]


def resource_of_object(item: dict[str, Any]) -> Resource:
    """Where an object is.

    Raises:
        KeyError: The operator has nothing to do with its kind.
    """
    return resource_of(item["apiVersion"], item["kind"])


assert ROLLOUT_JOBS.api_version == API_VERSION
