"""Where the PersistentVolumeClaim of a job's output lets its workers run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kuberoll_api.output_location import InvalidOutput, output_of

_SHARED = "ReadWriteMany"
_ONE_NODE = "ReadWriteOnce"
_ONE_POD = "ReadWriteOncePod"


def output_claim(uri: str | None) -> str | None:
    """Name of the claim that an output is on; None if it is on none, or nowhere."""
    try:
        return output_of(uri).claim
    except InvalidOutput:
        return None


def is_of_one_node(claim: Mapping[str, Any] | None) -> bool:
    """True if a claim's volume is attached to one node at a time."""
    modes = _modes(claim)
    return _ONE_NODE in modes and _SHARED not in modes


def claim_problem(uri: str | None, replicas: int, claim: Mapping[str, Any] | None) -> str | None:
    """Reason why workers cannot write to the claim of an output, with the remedy; None if they can, or it is unknown.

    Args:
        replicas: Number of workers at the same time.
        claim: The PersistentVolumeClaim; None if it is not known.
    """
    modes = _modes(claim)
    if not modes or modes & {_SHARED, _ONE_NODE}:
        return None
    name = output_claim(uri)
    if _ONE_POD not in modes:
        return f"spec.output.uri: the claim {name} is of access mode {', '.join(sorted(modes))}: workers write to it"
    if replicas > 1:
        return (
            f"spec.output.uri: the claim {name} is of access mode {_ONE_POD}, which takes one pod at a time, and "
            f"spec.workers.replicas is {replicas}; use {_SHARED}, {_ONE_NODE} (all workers on one "
            "node), an object store, or one replica"
        )
    return None


def _modes(claim: Mapping[str, Any] | None) -> frozenset[str]:
    """Access modes that a claim asks for; empty if it is not known."""
    return frozenset(((claim or {}).get("spec") or {}).get("accessModes") or ())
