"""What a scheduler and a queue read of a pod template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_operator.model import Object

# Fields that decide on which nodes a pod may run and what it uses there; a queue ignores variables and commands.
_OF_PODS: Final = (
    "affinity",
    "nodeSelector",
    "overhead",
    "priorityClassName",
    "resourceClaims",
    "resources",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
)
_OF_CONTAINERS: Final = ("name", "image", "resources", "restartPolicy")


def demand(template: Mapping[str, Any]) -> Object:
    """A pod template reduced to the fields that matter to a queue."""
    spec = template["spec"]
    found: Object = {key: spec[key] for key in _OF_PODS if key in spec}
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            found[kind] = [{key: item[key] for key in _OF_CONTAINERS if key in item} for item in spec[kind]]
    annotations = template.get("metadata", {}).get("annotations")
    return {**({"metadata": {"annotations": annotations}} if annotations else {}), "spec": found}
