"""Generation backends: one module for each, behind the protocol in `base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.backends.base import Backend, GenerationState
from kuberoll_operator.backends.external import External
from kuberoll_operator.backends.kuberay import KubeRay
from kuberoll_operator.backends.native import Native

__all__ = ["BACKENDS", "Backend", "GenerationState", "backend_of", "runs_in_job"]

BACKENDS: Final[Mapping[str, Backend]] = {backend.name: backend for backend in (KubeRay(), Native(), External())}


def runs_in_job(name: str | None) -> bool:
    """True if a backend runs the policy in pods of the job; unknown backends are assumed to."""
    backend = None if name is None else BACKENDS.get(name)
    return backend is None or backend.in_job


def backend_of(job: RolloutJob, status: Mapping[str, Any], *, kuberay: bool | None) -> str:
    """Name of a job's backend.

    `Auto` is resolved once and recorded in the status: installing or removing KubeRay while the job runs does not
    change it.

    Args:
        status: The job's current status.
        kuberay: True if the cluster serves RayServices; None if unknown.
    """
    if job.spec.generation.backend != "Auto":
        return job.spec.generation.backend
    settled = (status.get("generation") or {}).get("backend")
    if settled in BACKENDS and settled != "External":
        return str(settled)
    return "KubeRay" if kuberay else "Native"
