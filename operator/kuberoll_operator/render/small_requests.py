"""Requests of a pod that does little, taken from those of pods that do much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

_QUANTITY: Final = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+|[numkKMGTPE]i?|)")
_SUFFIXES: Final = {
    "": Decimal(1),
    **{suffix: Decimal(10) ** power for suffix, power in (("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6))},
    **{suffix: Decimal(10) ** power for suffix, power in (("G", 9), ("T", 12), ("P", 15), ("E", 18))},
    **{f"{suffix}i": Decimal(1024) ** (number + 1) for number, suffix in enumerate("KMGTPE")},
}


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
        return min((quantity, most), key=amount)
    except ValueError:
        # What the API server does not take either: it says so with the field's path.
        return quantity


def amount(quantity: object) -> Decimal:
    """A quantity of Kubernetes (500m, 2Gi, 1e3) as a number.

    Raises:
        ValueError: It is none.
    """
    found = _QUANTITY.fullmatch(str(quantity).strip())
    if found is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, suffix = found.groups()
    return (
        Decimal(f"{number}{suffix}") if suffix[:1] in {"e", "E"} and suffix[1:] else Decimal(number) * _SUFFIXES[suffix]
    )
