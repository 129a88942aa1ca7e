"""The job that is rendered, and what has been settled about it."""

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
    """What the pods of a pod set are given when their quota is admitted.

    Attributes:
        count: The most pods that are paid for; None: as many as are wanted.
        node_selector: Labels of the nodes that the quota is for.
        tolerations: Of those nodes' taints.
        labels: Of the pods.
        annotations: Of the pods.
    """

    count: int | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderContext:
    """What children are rendered from.

    Attributes:
        uid: Of the RolloutJob, for owner references.
        hosting: Of the policy.
        shards: Parts of the dataset.
        tokens: Of the policy, by scope.
        assignments: What the quota gives to pods, by pod set; empty where there is none.
    """

    job: RolloutJob
    namespace: str
    uid: str
    settings: Settings
    hosting: Hosting
    shards: int
    tokens: Mapping[str, str]
    assignments: Mapping[str, Assignment] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the job."""
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
        """A child without its substance."""
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
