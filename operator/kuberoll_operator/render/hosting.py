"""What the rest of a job's children need to know of its policy, whichever backend runs that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kuberoll_operator.model import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How a policy is run, found and entered.

    Attributes:
        endpoint: Base URL of the policy.
        in_job: Whether the policy runs in pods of the job.
        discovery: How workers find the replicas, which they talk to one by one; as in `PodConfig`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
        replicas: Base URLs of the replicas, with discovery `Static`.
        replica_ports: First and last port of replicas, where they have others than the endpoint.
        service_labels: Labels of the pods that the endpoint leads to, beside those of all generation pods.
        visitors: Ingress rules for those who may enter generation pods beside the job's own pods.
    """

    endpoint: str
    in_job: bool = True
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas_host: str | None = None
    replicas: Sequence[str] = ()
    replica_ports: tuple[int, int] | None = None
    service_labels: Mapping[str, str] = field(default_factory=dict)
    visitors: Sequence[Object] = ()


def namespaced(name: str | None) -> dict[str, Any]:
    """A peer of a NetworkPolicy: all pods of a namespace; None: of any."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}} if name else {}}


def tcp(port: int, last: int | None = None) -> dict[str, Any]:
    """A port of a NetworkPolicy, or all from one to the last."""
    return {"protocol": "TCP", "port": port, **({} if last is None else {"endPort": last})}
