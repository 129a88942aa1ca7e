"""Context of rendering: the job, and the decisions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kuberoll_api.model.rolloutjob import API_VERSION, KIND, RolloutJob
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.hosting import Hosting
from kuberoll_operator.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Constraints on the pods of a pod set, from the admission of their quota.

    Attributes:
        count: Maximum number of pods; None for as many as are wanted.
        node_selector: Labels of the nodes that the quota is for.
        tolerations: Tolerations of those nodes' taints.
        labels: Labels of the pods.
        annotations: Annotations of the pods.
    """

    count: int | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderContext:
    """Everything that children are rendered from.

    Attributes:
        uid: Uid of the RolloutJob, for owner references.
        hosting: How the policy is hosted.
        shards: Number of shards of the dataset.
        tokens: Bearer tokens of the policy, by scope.
        environment_tokens: Bearer tokens of environments' servers, by the environment's name.
        service_tokens: API keys of services, by the service's name.
        servers_token: Bearer token of the policy for environments' servers; it can only generate.
        access_tokens: Bearer tokens of the policy for pods outside the job, by the name of their entry in `access`.
        sandboxes_token: Bearer token of the workers at the broker of sandboxes.
        assignments: Constraints from the admission, by pod set; empty without a queue.
        together: True if all workers have to be on one node, since the output's volume is.
    """

    job: RolloutJob
    namespace: str
    uid: str
    settings: Settings
    hosting: Hosting
    shards: int
    tokens: Mapping[str, str]
    environment_tokens: Mapping[str, str] = field(default_factory=dict)
    service_tokens: Mapping[str, str] = field(default_factory=dict)
    servers_token: str = field(default="", repr=False)
    access_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    sandboxes_token: str = field(default="", repr=False)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    together: bool = False

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.metadata.name

    def metadata(self, name: str, component: str) -> dict[str, Any]:
        """Metadata of a child."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": names.labels(self.name, component),
            "ownerReferences": [self._owner()],
        }

    def child(self, api_version: str, kind: str, name: str, component: str) -> Object:
        """A child without its spec or data."""
        return {"apiVersion": api_version, "kind": kind, "metadata": self.metadata(name, component)}

    def _owner(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
