"""NetworkPolicies of a job's pods. Environments run code that nobody vouches for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

from kuberoll_api import contract, sandboxes
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.services import ModelService
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.access import access_rules, policy_ports
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.hosting import tcp
from kuberoll_operator.render.sandbox_pods import sandboxed
from kuberoll_operator.render.sandboxes import any_network
from kuberoll_operator.render.servers import claimed, deployed, served, servers_of

_ANYWHERE_INSIDE: Final[list[Object]] = [{"namespaceSelector": {}}]
# Metrics have no token, and what the policy runs has no business with them, whatever its sandbox may reach.
_ALL_BUT_SANDBOXES: Final[list[Object]] = [
    {
        "namespaceSelector": {},
        "podSelector": {"matchExpressions": [{"key": names.SANDBOX_JOB_LABEL, "operator": "DoesNotExist"}]},
    }
]
# Link-local addresses: a cloud's credentials are served there.
_NOWHERE: Final = {"0.0.0.0/0": ("169.254.0.0/16",), "::/0": ("fe80::/10", "fd00:ec2::/32")}
# Where clouds hand out the identity of a pod's service account, by the scheme of the stores that are opened with it:
# the agents of GKE (with Dataplane V2 at the metadata address itself) and of EKS Pod Identity. Identities that are
# files, as of IRSA and Azure, are exchanged at public addresses.
_IDENTITIES: Final = {
    "gs": (("169.254.169.252/32", 988), ("169.254.169.254/32", 80)),
    "s3": (("169.254.170.23/32", 80), ("fd00:ec2::23/128", 80)),
}
# Pods of a cluster's DNS, which some clusters have at 5353, and the nodes' own caches.
_DNS: Final[Object] = {
    "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")],
    "to": [*_ANYWHERE_INSIDE, {"ipBlock": {"cidr": "169.254.20.10/32"}}],
}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_WITH_ENVIRONMENTS: Final = [names.CHECK, names.FINISH, names.WORKERS]
_OF_THE_WORKERS: Final = [names.CHECK, names.FINISH, names.READER, names.WORKERS]


def build_network_policies(context: RenderContext) -> list[Object]:
    """The job's NetworkPolicies.

    <job>-workers for all pods with the workers' options, <job>-generation for our own policy, and <job>-env-<number>
    for the server pods of each environment that has some, <job>-service-<number> for each service, <job>-sandboxes for
    trajectories' sandboxes, and <job>-sandboxes-all for those of them that reach everything.
    """
    return [
        _workers(context),
        *([_generation(context)] if context.hosting.in_job else []),
        *(_environment(context, number, spec) for number, spec in served(context.job)),
        *(_service(context, number, service) for number, service in enumerate(context.job.spec.services)),
        *_sandboxes(context),
    ]


def _workers(context: RenderContext) -> Object:
    egress: list[Object] = [_DNS, *(_way_to_identity(context) if context.settings.workload_identity else [])]
    if context.hosting.in_job:
        pods = {"podSelector": {"matchLabels": names.selector(context.name, names.GENERATION)}}
        egress.append({"ports": policy_ports(context), "to": [pods]})
    if any(True for _ in served(context.job)):
        servers = {"podSelector": {"matchLabels": names.selector(context.name, names.ENVIRONMENT)}}
        claims = {"podSelector": {"matchLabels": {names.CLAIMED_JOB_LABEL: context.name}}}
        peers = [
            *([servers] if any(True for _ in deployed(context.job)) else []),
            *([claims] if any(True for _ in claimed(context.job)) else []),
        ]
        egress.append({"ports": [tcp(contract.ENVIRONMENT_PORT)], "to": peers})
    if context.job.spec.services:
        models = {"podSelector": {"matchLabels": names.selector(context.name, names.SERVICE)}}
        egress.append({"ports": [tcp(contract.SERVICE_PORT)], "to": [models]})
    if any(True for _ in sandboxed(context.job)):
        broker = {**_ANYWHERE_INSIDE[0], "podSelector": {"matchLabels": dict(names.BROKER_SELECTOR)}}
        machines = {"podSelector": {"matchLabels": names.sandbox_selector(context.name)}}
        egress.append({"ports": [tcp(sandboxes.BROKER_PORT)], "to": [broker]})
        egress.append({"ports": [tcp(sandboxes.SANDBOX_PORT)], "to": [machines]})
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
        "ingress": [{"ports": [tcp(contract.PROGRESS_PORT)], "from": _ALL_BUT_SANDBOXES}],
    }
    return _policy(context, names.workers(context.name), names.WORKERS, spec)


def _way_to_identity(context: RenderContext) -> list[Object]:
    """Egress of the workers to what gives them the identity with which they open the job's object stores."""
    spec = context.job.spec
    uris = [spec.output.uri, *(source.uri for _, source in spec.dataset.located_sources())]
    schemes = {urlsplit(uri).scheme for uri in uris if uri}
    return [
        {"ports": [tcp(port)], "to": [{"ipBlock": {"cidr": cidr}}]}
        for scheme, places in _IDENTITIES.items()
        if scheme in schemes
        for cidr, port in places
    ]


def _generation(context: RenderContext) -> Object:
    own = {"podSelector": {"matchLabels": names.selector(context.name, names.GENERATION)}}
    workers = {"podSelector": {"matchLabels": names.selector(context.name, names.WORKERS)}}
    spec = {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": policy_ports(context), "from": [workers]},
            *_servers_with_policy(context),
            *access_rules(context),
            {"ports": [tcp(contract.STATUS_PORT)], "from": _ALL_BUT_SANDBOXES},
            {"from": [own]},
            *context.hosting.visitors,
        ],
    }
    return _policy(context, names.generation(context.name), names.GENERATION, spec)


def _service(context: RenderContext, number: int, service: ModelService) -> Object:
    """Pods of a service: only the job's workers may enter. As engines do, they load models from anywhere."""
    workers = {"podSelector": {"matchLabels": names.selector(context.name, names.WORKERS)}}
    spec = {
        "podSelector": {"matchLabels": names.service_selector(context.name, service.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [tcp(contract.SERVICE_PORT)], "from": [workers]}],
    }
    return _policy(context, names.service(context.name, number), names.SERVICE, spec)


def _servers_with_policy(context: RenderContext) -> list[Object]:
    """Ingress from the server pods of environments that reach the policy; none without one.

    Sessions are in the memory of a replica, so their URLs lead to its own port.
    """
    users = sorted(spec.name for _, spec in deployed(context.job) if spec.reaches_policy)
    pods = {
        "matchExpressions": [{"key": names.ENVIRONMENT_LABEL, "operator": "In", "values": users}],
        "matchLabels": names.selector(context.name, names.ENVIRONMENT),
    }
    return [{"ports": policy_ports(context), "from": [{"podSelector": pods}]}] if users else []


def _way_to_policy(context: RenderContext, spec: Environment) -> list[Object]:
    """Egress of an environment's server pods to the policy and its replicas; none without access."""
    if not spec.reaches_policy:
        return []
    if context.hosting.in_job:
        pods = {"podSelector": {"matchLabels": names.selector(context.name, names.GENERATION)}}
        return [{"ports": policy_ports(context), "to": [pods]}]
    port = _port(context.hosting.endpoint)
    return [] if port is None else [{"ports": [tcp(port)], "to": [*_ANYWHERE_INSIDE, *_anywhere(())]}]


def _environment(context: RenderContext, number: int, spec: Environment) -> Object:
    """Server pods: only the job's workers may enter, and DNS is all that they reach by default.

    What claimed sandboxes reach is said by policies of their template; this one adds nothing to them.
    """
    peers = {
        "podSelector": {
            "matchExpressions": [{"key": names.COMPONENT_LABEL, "operator": "In", "values": _WITH_ENVIRONMENTS}],
            "matchLabels": {names.JOB_LABEL: context.name},
        }
    }
    if servers_of(spec).sandbox is not None:
        selector, egress = names.claimed_selector(context.name, spec.name), []
    else:
        selector, egress = names.environment_selector(context.name, spec.name), [_DNS, *_way_to_policy(context, spec)]
        egress += [{"to": [*_ANYWHERE_INSIDE, *_anywhere(())]}] if servers_of(spec).allow_egress else []
    return _policy(
        context,
        names.environment(context.name, number),
        names.ENVIRONMENT,
        {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Egress", "Ingress"],
            "egress": egress,
            "ingress": [{"ports": [tcp(contract.ENVIRONMENT_PORT)], "from": [peers]}],
        },
    )


def _sandboxes(context: RenderContext) -> list[Object]:
    """Trajectories' sandboxes: the job's workers enter, and nothing is reached but from those with network `All`.

    What workers tell the server inside to forward comes in by the same connections.
    """
    if not any(True for _ in sandboxed(context.job)):
        return []
    selector, name = names.sandbox_selector(context.name), names.sandboxes(context.name)
    workers = {"podSelector": {"matchLabels": names.selector(context.name, names.WORKERS)}}
    closed = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Egress", "Ingress"],
        "egress": [],
        "ingress": [{"ports": [tcp(sandboxes.SANDBOX_PORT)], "from": [workers]}],
    }
    found = [_policy(context, name, names.SANDBOX, closed)]
    if any_network(context.job):
        opened = {
            "podSelector": {"matchLabels": {**selector, names.SANDBOX_NETWORK_LABEL: "All"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": _anywhere(context.settings.egress_except)}],
        }
        found.append(_policy(context, names.sandboxes_with_network(context.name), names.SANDBOX, opened))
    return found


def _anywhere(without: Collection[str]) -> list[Object]:
    """All addresses but link-local ones and these networks."""
    return [
        {"ipBlock": {"cidr": cidr, "except": [*link_local, *(net for net in without if (":" in net) == (":" in cidr))]}}
        for cidr, link_local in _NOWHERE.items()
    ]


def _policy(context: RenderContext, name: str, component: str, spec: dict[str, Any]) -> Object:
    return {**context.child("networking.k8s.io/v1", "NetworkPolicy", name, component), "spec": spec}


def _ports_of(context: RenderContext) -> set[int]:
    """Ports that the job itself names: of its dataset, trackers, endpoint, object store, and environments' servers."""
    spec = context.job.spec
    tracking, external = spec.output.tracking, spec.generation.external
    urls = [
        *((external.url, *external.urls) if external else ()),
        *(url for item in spec.environments if item.remote is not None for url in item.remote.located),
        *(source.uri for _, source in spec.dataset.located_sources()),
        tracking.mlflow.tracking_uri if tracking and tracking.mlflow else None,
        *(url for item in spec.environments if isinstance(url := item.config.get("url"), str)),
        *(url for item in spec.environments for url in item.gym_urls),
        *(str(item.get("value")) for item in spec.workers.env if str(item.get("name")).startswith("AWS_ENDPOINT_URL")),
    ]
    return {port for url in urls if url and (port := _port(url)) is not None}


def _port(url: str) -> int | None:
    try:
        parts = urlsplit(url)
        return (parts.port or _DEFAULT_PORTS[parts.scheme]) if parts.scheme in _DEFAULT_PORTS else None
    except ValueError:
        return None
