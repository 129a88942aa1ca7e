"""NetworkPolicies: what a job's pods may talk to. Environments run code that nobody vouches for."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.subject import Subject

_ANYWHERE_INSIDE: Final[list[Object]] = [{"namespaceSelector": {}}]
# Everything but link-local addresses: a cloud's credentials are served there.
_ANYWHERE: Final[list[Object]] = [
    *_ANYWHERE_INSIDE,
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
    {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::/32"]}},
]
# Pods of a cluster's DNS, which some clusters have at 5353, and the nodes' own caches.
_DNS: Final[Object] = {
    "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")],
    "to": [*_ANYWHERE_INSIDE, {"ipBlock": {"cidr": "169.254.20.10/32"}}],
}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def build_network_policies(subject: Subject, *, native: bool) -> list[Object]:
    """NetworkPolicy <job>-workers, of worker and finish pods, and <job>-generation where those pods are ours."""
    return [_workers(subject, native=native), *([_generation(subject)] if native else [])]


def _workers(subject: Subject, *, native: bool) -> Object:
    egress: list[Object] = [_DNS]
    if native:
        pods = {"podSelector": {"matchLabels": names.selector(subject.name, names.GENERATION)}}
        egress.append({"ports": [_tcp(names.GENERATION_PORT)], "to": [pods]})
    ports = sorted({*subject.settings.egress_ports, *_ports_of(subject, native=native)})
    egress.append({"ports": [_tcp(port) for port in ports], "to": _ANYWHERE})
    spec = {
        "podSelector": {
            "matchExpressions": [
                {"key": names.COMPONENT_LABEL, "operator": "In", "values": [names.FINISH, names.WORKERS]}
            ],
            "matchLabels": {names.JOB_LABEL: subject.name},
        },
        "policyTypes": ["Egress", "Ingress"],
        "egress": egress,
        "ingress": [{"ports": [_tcp(names.PROGRESS_PORT)], "from": _ANYWHERE_INSIDE}],
    }
    return _policy(subject, names.workers(subject.name), names.WORKERS, spec)


def _generation(subject: Subject) -> Object:
    own = {"podSelector": {"matchLabels": names.selector(subject.name, names.GENERATION)}}
    workers = {"podSelector": {"matchLabels": names.selector(subject.name, names.WORKERS)}}
    spec = {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [_tcp(names.GENERATION_PORT)], "from": [workers]},
            {"ports": [_tcp(names.RAY_METRICS_PORT)], "from": _ANYWHERE_INSIDE},
            {"from": [own]},
        ],
    }
    return _policy(subject, names.generation(subject.name), names.GENERATION, spec)


def _policy(subject: Subject, name: str, component: str, spec: dict[str, Any]) -> Object:
    return {**subject.child("networking.k8s.io/v1", "NetworkPolicy", name, component), "spec": spec}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def _ports_of(subject: Subject, *, native: bool) -> set[int]:
    """Ports of what the job itself names: its dataset, its trackers, its endpoint and its object store."""
    spec = subject.job.spec
    tracking = spec.output.tracking
    urls = [
        None if native else subject.endpoint,
        spec.dataset.source.uri,
        tracking.mlflow.tracking_uri if tracking and tracking.mlflow else None,
        *(str(item.get("value")) for item in spec.workers.env if str(item.get("name")).startswith("AWS_ENDPOINT_URL")),
    ]
    return {port for url in urls if url and (port := _port(url)) is not None}


def _port(url: str) -> int | None:
    try:
        parts = urlsplit(url)
        return (parts.port or _DEFAULT_PORTS[parts.scheme]) if parts.scheme in _DEFAULT_PORTS else None
    except ValueError:
        return None
