"""Data that the parts of a reconcile exchange: observations and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_api.contract import PodProgress
from kuberoll_operator.signs import NO_SIGNS, Signs

Object = dict[str, Any]
"""A Kubernetes object, as JSON."""


class Key(NamedTuple):
    """Namespace and name of a RolloutJob."""

    namespace: str
    name: str


class Ref(NamedTuple):
    """Reference to a child of a job, in the job's namespace."""

    api_version: str
    kind: str
    name: str


class WriteError(NamedTuple):
    """Error of a child that the API server rejected.

    Attributes:
        reason: One of `conditions.Reason`: FORBIDDEN, INVALID_TEMPLATE, FIELD_CONFLICT, QUOTA.
        message: The API server's message, at most 1,000 characters.
    """

    reason: str
    message: str


class ServedWeights(NamedTuple):
    """Weights that one replica of the policy serves.

    Attributes:
        version: None if the replica does not report it.
        problem: Why it does not serve the wanted weights; None if it does, or is loading them.
    """

    version: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReports:
    """Reports of a job's pods, of those that answered.

    Attributes:
        progress: Progress of workers, by shard.
        counted: The newest counts of each shard, also of pods that are gone, until a successor has counted as much.
        served: Weights of the policy's replicas, by replica id.
    """

    progress: Mapping[int, PodProgress] = field(default_factory=dict)
    counted: Mapping[int, PodProgress] = field(default_factory=dict)
    served: Mapping[str, ServedWeights] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuota:
    """Cluster-wide objects that a job's Workload refers to.

    Attributes:
        flavors: `spec` of the ResourceFlavors that are assigned to it and exist, by name.
        priority: Value of the job's WorkloadPriorityClass; None if it names none, or one that does not exist.
    """

    flavors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Children and pods of a job, as they were observed.

    Attributes:
        children: By kind and name.
        pods: All pods of the job.
        departed: Deleted pods of a shard that had ended or that the cluster removed, the latest of each shard; and the
            latest of each other component that the cluster removed.
        progress: Progress of worker pods that answered, by shard.
        counted: As in `PodReports`.
        served: Weights of replicas that answered, by replica id.
        errors: Failed writes of this reconcile, by kind and name.
        quota: Cluster-wide objects that its Workload refers to.
        unmountable: What is missing of the ConfigMaps that pods wait for; empty while no pod waits for volumes.
        signs: What was read about what waits.
        output_claim: The PersistentVolumeClaim of the output, while there are no workers; None if it is not known.
        first: The older job whose turn it is to get the room that both lack; None if this job may go on.
    """

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    departed: Sequence[Object] = ()
    progress: Mapping[int, PodProgress] = field(default_factory=dict)
    counted: Mapping[int, PodProgress] = field(default_factory=dict)
    served: Mapping[str, ServedWeights] = field(default_factory=dict)
    errors: Mapping[tuple[str, str], WriteError] = field(default_factory=dict)
    quota: ClusterQuota = field(default_factory=ClusterQuota)
    unmountable: Sequence[str] = ()
    signs: Signs = NO_SIGNS
    output_claim: Object | None = None
    first: Key | None = None

    def get(self, kind: str, name: str) -> Object | None:
        """The child of this kind and name; None if it does not exist."""
        return self.children.get((kind, name))


class StatusPatch(NamedTuple):
    """Change of the status of an object that others write, too.

    Attributes:
        version: Resource version that the decision was based on; the API server rejects the patch at any other.
        status: A JSON merge patch of the status.
    """

    ref: Ref
    version: str
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Writes and deletions of one reconcile, in this order: `apply`, then `patch`, then `delete`.

    Attributes:
        apply: Whole objects for server-side apply, with owner references and digests.
        patch: Status patches.
        delete: Children to delete, with propagation policy `Background`.
        delete_job: True if the RolloutJob itself is to be deleted, because its time to live has passed.
    """

    apply: Sequence[Object] = ()
    patch: Sequence[StatusPatch] = ()
    delete: Sequence[Ref] = ()
    delete_job: bool = False


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status, by type; empty if it was never set."""
    for item in status.get("conditions") or ():
        if item.get("type") == kind:
            return item  # type: ignore[no-any-return]
    return {}


def is_true(status: Mapping[str, Any], kind: str) -> bool:
    """True if the condition is True."""
    return condition(status, kind).get("status") == "True"


def was_ready(status: Mapping[str, Any]) -> bool:
    """True if generation has become ready and Kubernetes has not seen it end since, whether it answers or not."""
    found = condition(status, conditions.GENERATION_READY)
    return found.get("status") == "True" or found.get("reason") == Reason.NOT_ANSWERING


def status_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of an object; empty if it has none."""
    return raw.get("status") or {}


def indexes(text: str) -> list[int]:
    """Kubernetes' "1,3-5" as a list of numbers."""
    return list(_indexes(text))


def _indexes(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
