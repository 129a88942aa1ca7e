"""Who runs the policy: one module per backend, all behind the protocol of `base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.backends.base import Backend, GenerationState
from kuberoll_operator.backends.external import External
from kuberoll_operator.backends.kuberay import KubeRay
from kuberoll_operator.backends.native import Native

__all__ = ["BACKENDS", "Backend", "GenerationState", "backend_of", "runs_in_job"]

BACKENDS: Final[Mapping[str, Backend]] = {"KubeRay": KubeRay(), "Native": Native(), "External": External()}


def runs_in_job(name: str | None) -> bool:
    """Whether a backend runs the policy in pods of the job; one that is not known is taken to do so."""
    backend = None if name is None else BACKENDS.get(name)
    return backend is None or backend.in_job


def backend_of(job: RolloutJob, status: Mapping[str, Any], *, kuberay: bool | None) -> str:
    """The name of a job's backend.

    What Auto means is settled once: where the status names a backend already, KubeRay that is installed or removed
    while the job runs does not change it.

    Args:
        status: Of the job, as it is.
        kuberay: Whether the cluster serves RayServices; None: not known.
    """
    if job.spec.generation.backend != "Auto":
        return job.spec.generation.backend
    settled = (status.get("generation") or {}).get("backend")
    if settled in BACKENDS and settled != "External":
        return str(settled)
    return "KubeRay" if kuberay else "Native"
