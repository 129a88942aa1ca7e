"""The job that is rendered, and what has been settled about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kuberoll_api.rolloutjob import API_VERSION, KIND, RolloutJob
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What children are rendered from.

    Attributes:
        uid: Of the RolloutJob, for owner references.
        endpoint: Base URL of the policy.
        backend: Who runs it.
        shards: Parts of the dataset.
    """

    job: RolloutJob
    namespace: str
    uid: str
    settings: Settings
    endpoint: str
    backend: str
    shards: int

    @property
    def token(self) -> str:
        """What callers of the policy must show; None: nothing."""
        return self.settings.token_of(self.uid)

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
