"""NetworkPolicies of a job's pods. Environments run code that nobody vouches for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.hosting import tcp

_ANYWHERE_INSIDE: Final[list[Object]] = [{"namespaceSelector": {}}]
# Link-local addresses: a cloud's credentials are served there.
_NOWHERE: Final = {"0.0.0.0/0": ("169.254.0.0/16",), "::/0": ("fe80::/10", "fd00:ec2::/32")}
# Pods of a cluster's DNS, which some clusters have at 5353, and the nodes' own caches.
_DNS: Final[Object] = {
    "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")],
    "to": [*_ANYWHERE_INSIDE, {"ipBlock": {"cidr": "169.254.20.10/32"}}],
}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_OF_THE_WORKERS: Final = [names.CHECK, names.FINISH, names.READER, names.WORKERS]


def build_network_policies(context: RenderContext) -> list[Object]:
    """NetworkPolicy <job>-workers for all pods with the workers' options, and <job>-generation for our own policy."""
    return [_workers(context), *([_generation(context)] if context.hosting.in_job else [])]


def _workers(context: RenderContext) -> Object:
    egress: list[Object] = [_DNS]
    if context.hosting.in_job:
        pods = {"podSelector": {"matchLabels": names.selector(context.name, names.GENERATION)}}
        egress.append({"ports": _policy_ports(context), "to": [pods]})
    ports, named = {*context.settings.egress_ports}, _ports_of(context)
    without = context.settings.egress_except
    if without:
        egress.append({"ports": [tcp(port) for port in sorted(ports)], "to": _anywhere(without)})
        # Addresses that the job names may be in the cluster: an object store, a tracker, an endpoint.
        ports = named
    else:
        ports |= named
    if ports:
        egress.append({"ports": [tcp(port) for port in sorted(ports)], "to": [*_ANYWHERE_INSIDE, *_anywhere(())]})
    spec = {
        "podSelector": {
            "matchExpressions": [{"key": names.COMPONENT_LABEL, "operator": "In", "values": _OF_THE_WORKERS}],
            "matchLabels": {names.JOB_LABEL: context.name},
        },
        "policyTypes": ["Egress", "Ingress"],
        "egress": egress,
        "ingress": [{"ports": [tcp(contract.PROGRESS_PORT)], "from": _ANYWHERE_INSIDE}],
    }
    return _policy(context, names.workers(context.name), names.WORKERS, spec)


def _generation(context: RenderContext) -> Object:
    own = {"podSelector": {"matchLabels": names.selector(context.name, names.GENERATION)}}
    workers = {"podSelector": {"matchLabels": names.selector(context.name, names.WORKERS)}}
    spec = {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": _policy_ports(context), "from": [workers]},
            {"ports": [tcp(contract.STATUS_PORT)], "from": _ANYWHERE_INSIDE},
            {"from": [own]},
            *context.hosting.visitors,
        ],
    }
    return _policy(context, names.generation(context.name), names.GENERATION, spec)


def _anywhere(without: Collection[str]) -> list[Object]:
    """All addresses but link-local ones and these networks."""
    return [
        {"ipBlock": {"cidr": cidr, "except": [*link_local, *(net for net in without if (":" in net) == (":" in cidr))]}}
        for cidr, link_local in _NOWHERE.items()
    ]


def _policy_ports(context: RenderContext) -> list[Object]:
    """Ports on which workers reach the policy."""
    ports = context.hosting.replica_ports
    return [tcp(contract.GENERATION_PORT), *([] if ports is None else [tcp(*ports)])]


def _policy(context: RenderContext, name: str, component: str, spec: dict[str, Any]) -> Object:
    return {**context.child("networking.k8s.io/v1", "NetworkPolicy", name, component), "spec": spec}


def _ports_of(context: RenderContext) -> set[int]:
    """Ports that the job itself names: of its dataset, trackers, endpoint and object store."""
    spec = context.job.spec
    tracking, external = spec.output.tracking, spec.generation.external
    urls = [
        *((external.url, *external.urls) if external else ()),
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
