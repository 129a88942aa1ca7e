"""Which pods fit on the one node, in the words of Kubernetes' scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils import quantity

Object = dict[str, Any]
_parse: Any = quantity.parse_quantity


def quantities(items: Mapping[str, Any]) -> dict[str, Decimal]:
    """Numbers of `{"cpu": "500m"}`: cores, bytes, pieces."""
    return {name: Decimal(_parse(str(value))) for name, value in items.items()}


def requests(pod: Object) -> dict[str, Decimal]:
    """What a pod asks for: the sum of its containers, or the largest of its init containers, and itself."""
    total: dict[str, Decimal] = defaultdict(Decimal)
    for container in pod["spec"]["containers"]:
        for name, value in _requests(container).items():
            total[name] += value
    for container in pod["spec"].get("initContainers", ()):
        for name, value in _requests(container).items():
            total[name] = max(total[name], value)
    total["pods"] += 1
    return dict(total)


def _requests(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources", {})
    return quantities({**resources.get("limits", {}), **resources.get("requests", {})})


def in_use(pods: Iterable[Object]) -> dict[str, Decimal]:
    """What pods that are bound and not at their end hold."""
    total: dict[str, Decimal] = defaultdict(Decimal)
    for pod in pods:
        if pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            for name, value in requests(pod).items():
                total[name] += value
    return dict(total)


def why_not(pod: Object, node: Object, used: Mapping[str, Decimal], claims: Iterable[str]) -> str | None:
    """None when the pod fits on the node, else the message of its condition PodScheduled.

    Args:
        pod: The pod.
        node: The node, with labels, taints and status.allocatable.
        used: What other pods hold.
        claims: Names of the PersistentVolumeClaims of the pod's namespace.
    """
    known = set(claims)
    for volume in pod["spec"].get("volumes", ()):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in known:
            # Kubernetes' scheduler says this before it looks at any node.
            return f'persistentvolumeclaim "{claim}" not found'
    labels = node["metadata"].get("labels", {})
    reasons: list[str] = []
    wanted = pod["spec"].get("nodeSelector", {})
    if any(labels.get(name) != value for name, value in wanted.items()):
        reasons.append("1 node(s) didn't match Pod's node affinity/selector")
    for taint in node["spec"].get("taints", ()):
        if not any(_tolerates(toleration, taint) for toleration in pod["spec"].get("tolerations", ())):
            reasons.append(f"1 node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}")
            break
    if not reasons:
        free = quantities(node["status"]["allocatable"])
        for name, value in sorted(requests(pod).items()):
            if value > free.get(name, Decimal()) - used.get(name, Decimal()):
                reasons.append("1 Too many pods" if name == "pods" else f"1 Insufficient {name}")
    if not reasons:
        return None
    return (
        f"0/1 nodes are available: {', '.join(reasons)}. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))
