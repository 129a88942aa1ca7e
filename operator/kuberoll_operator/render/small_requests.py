"""Requests of a pod that does little, taken from those of pods that do much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kuberoll_operator.quantities import number_of


def small_resources(resources: Mapping[str, Any], most: Mapping[str, str]) -> dict[str, Any]:
    """Resource requirements with requests of at most so much, and the same limits.

    Resources that `most` does not name, GPUs and other devices, are left out: in them the pod has no part.

    Args:
        most: Largest requests, by the resource.
    """
    limits, requests = (
        {name: value for name, value in (resources.get(part) or {}).items() if name in most}
        for part in ("limits", "requests")
    )
    # Without a request of its own a container requests its limit.
    requests = {name: _least(value, most[name]) for name, value in {**limits, **requests}.items()}
    return {name: found for name, found in (("limits", limits), ("requests", requests)) if found}


def _least(quantity: Any, most: str) -> Any:
    try:
        return min((quantity, most), key=number_of)
    except ValueError:
        # What the API server does not take either: it says so with the field's path.
        return quantity
