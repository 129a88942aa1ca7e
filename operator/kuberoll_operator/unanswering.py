"""Replicas that do not answer a job's workers, though Kubernetes may take them for ready. Pure.

A worker judges a replica by its own requests, in seconds. Probes ask more rarely, from the replica's own node, and say
nothing of the network between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kuberoll_api.contract import PodProgress, UnansweringReplica
from kuberoll_operator import names
from kuberoll_operator.backends.pods import component_of, is_lost, redact
from kuberoll_operator.model import Object, Observed

_NAMED: Final = 2


class Silence(NamedTuple):
    """A replica that does not answer workers.

    Attributes:
        name: Its pod and node, or its URL.
        since: From when it has not answered the first of them.
        workers: Number of workers that say so.
        requests: Requests that they had in flight there.
        problem: Why it counts as one that does not answer, as the first of them says.
    """

    name: str
    since: str
    workers: int
    requests: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswering:
    """What workers say of replicas that do not answer.

    Attributes:
        replicas: Those, the one that has been silent for longest first.
        workers: Number of workers that send requests to replicas.
        all: True if no worker has a replica that answers.
    """

    replicas: Sequence[Silence] = ()
    workers: int = 0
    all: bool = False

    @property
    def since(self) -> str:
        """From when no replica has answered, if none does."""
        return max((item.since for item in self.replicas), default="")

    @property
    def text(self) -> str:
        """What is said of the replicas; empty if all answer."""
        return _told(self.replicas, f"of {self.workers} workers" if self.workers > 1 else "")


def unanswering_replicas(observed: Observed) -> Unanswering:
    """The policy's replicas that do not answer."""
    reports = [item for _, item in sorted(observed.progress.items()) if item.answering is not None]
    found = _silences(observed.pods, reports, names.GENERATION)
    nobody = bool(reports) and all(not item.answering and item.unanswering for item in reports)
    return Unanswering(replicas=found, workers=len(reports), all=nobody and bool(found))


def _silences(pods: Sequence[Object], reports: Iterable[PodProgress], component: str) -> list[Silence]:
    said: dict[str, list[UnansweringReplica]] = {}
    for report in reports:
        for server in report.unanswering:
            said.setdefault(server.url, []).append(server)
    at = _by_address(pods, component)
    found = []
    for url, servers in said.items():
        host = urlsplit(url).hostname or ""
        pod = at.get(host)
        # One that is gone, or whose node is, is told of by what Kubernetes knows.
        if (pod is None and at and _is_address(host)) or (pod is not None and is_lost(pod)):
            continue
        servers.sort(key=lambda server: server.since)
        name = url if pod is None else f"pod {pod['metadata']['name']}{_where(pod)}"
        requests = sum(server.requests for server in servers)
        found.append(Silence(name, servers[0].since, len(servers), requests, servers[0].problem))
    return sorted(found, key=lambda item: (item.since, item.name))


def _told(silences: Sequence[Silence], workers: str) -> str:
    if not silences:
        return ""
    told = []
    for item in silences[:_NAMED]:
        facts = [f"{item.workers} {workers} say so"] if workers else []
        if item.requests:
            facts.append(f"{item.requests} requests were in flight there")
        beside = f" ({', '.join(facts)})" if facts else ""
        problem = f": {item.problem}" if item.problem else ""
        told.append(f"{item.name} does not answer the workers since {item.since}{beside}{problem}")
    if len(silences) > _NAMED:
        told.append(f"and {len(silences) - _NAMED} more")
    return redact("; ".join(told))


def _by_address(pods: Sequence[Object], component: str) -> Mapping[str, Object]:
    found: dict[str, Object] = {}
    for pod in pods:
        address = (pod.get("status") or {}).get("podIP")
        if address and component_of(pod) == component and not pod["metadata"].get("deletionTimestamp"):
            found[str(address)] = pod
    return found


def _where(pod: Object) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f" on node {node}" if node else ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
