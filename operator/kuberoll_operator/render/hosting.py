"""Hosting of a job's policy, as the job's other children need to know it, whatever the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kuberoll_operator.model import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Operation of a policy: its endpoint, the discovery of its replicas, and access to its pods.

    Attributes:
        endpoint: Base URL of the policy.
        in_job: True if the policy runs in pods of the job.
        discovery: How workers find the replicas, which they call one by one; as in `PodConfig`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
        replicas: Base URLs of the replicas, with discovery `Static`.
        replica_ports: First and last port of replicas; None if they use the endpoint's.
        service_labels: Labels of the pods behind the endpoint, in addition to those of all generation pods.
        visitors: Additional ingress rules of generation pods, for clients outside the job.
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
    """Peer of a NetworkPolicy: all pods of a namespace; None: of any namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}} if name else {}}


def tcp(port: int, last: int | None = None) -> dict[str, Any]:
    """Port of a NetworkPolicy, or a range of ports up to `last`."""
    return {"protocol": "TCP", "port": port, **({} if last is None else {"endPort": last})}
