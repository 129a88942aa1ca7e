"""What a reconcile looks at and what it decides: the data between its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kuberoll_api.contract import PodProgress

Object = dict[str, Any]
"""A Kubernetes object, as JSON."""


class Key(NamedTuple):
    """A RolloutJob."""

    namespace: str
    name: str


class Ref(NamedTuple):
    """A child, without its namespace: it is the job's."""

    api_version: str
    kind: str
    name: str


class WriteError(NamedTuple):
    """A child that the API server did not take.

    Attributes:
        reason: One of `conditions.Reason`: FORBIDDEN, INVALID_TEMPLATE, FIELD_CONFLICT, QUOTA.
        message: The API server's own words, at most 1,000 characters.
    """

    reason: str
    message: str


class ServedWeights(NamedTuple):
    """The weights of one replica of the policy.

    Attributes:
        version: None: it does not say.
        problem: Why it has not those that are wanted; None: it has, or loads them.
    """

    version: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReports:
    """What pods of a job have said of themselves, those that answered.

    Attributes:
        progress: Of workers, by shard.
        served: By replicas of the policy, which are called by their own ids.
    """

    progress: Mapping[int, PodProgress] = field(default_factory=dict)
    served: Mapping[str, ServedWeights] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuota:
    """What a job's Workload refers to, of the whole cluster.

    Attributes:
        flavors: `spec` of the ResourceFlavors that are assigned to it, by name; of those that are there.
        priority: Value of the job's WorkloadPriorityClass; None: it names none, or one that is not there.
    """

    flavors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The children of a job as they are.

    Attributes:
        children: By kind and name.
        pods: All pods of the job.
        departed: Worker pods that have ended and are gone, the last of each shard.
        progress: Of worker pods that answered, by shard.
        served: Weights of replicas that answered, by replica.
        errors: What could not be written in this reconcile, by kind and name.
        quota: What its Workload refers to.
    """

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    departed: Sequence[Object] = ()
    progress: Mapping[int, PodProgress] = field(default_factory=dict)
    served: Mapping[str, ServedWeights] = field(default_factory=dict)
    errors: Mapping[tuple[str, str], WriteError] = field(default_factory=dict)
    quota: ClusterQuota = field(default_factory=ClusterQuota)

    def get(self, kind: str, name: str) -> Object | None:
        """A child, if it is there."""
        return self.children.get((kind, name))


class StatusPatch(NamedTuple):
    """What is to be changed in the status of an object that others write, too.

    Attributes:
        version: The resource version that it was decided by; of another one the patch is refused.
        status: A JSON merge patch of the status.
    """

    ref: Ref
    version: str
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written and removed, in this order: `apply`, then `patch`, then `delete`.

    Attributes:
        apply: Whole objects for server-side apply, with owner references and digests.
        patch: Changes of statuses.
        delete: Children that must not be there; deletion is in the foreground of their pods (`Background` policy).
        delete_job: The RolloutJob itself, whose time to live is over.
    """

    apply: Sequence[Object] = ()
    patch: Sequence[StatusPatch] = ()
    delete: Sequence[Ref] = ()
    delete_job: bool = False


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status; empty if it was never set."""
    for item in status.get("conditions") or ():
        if item.get("type") == kind:
            return item  # type: ignore[no-any-return]
    return {}


def is_true(status: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition is True."""
    return condition(status, kind).get("status") == "True"


def status_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of an object that may have none."""
    return raw.get("status") or {}
