"""Quota of trajectories' sandboxes."""

from __future__ import annotations

from typing import Any

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.sandboxes import CONTAINER
from kuberoll_operator.model import Object
from kuberoll_operator.quantities import number_of
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.sandboxes import POD_SET, sandboxed
from kuberoll_operator.render.workload import PodSet


def sandbox_pod_sets(context: RenderContext) -> list[PodSet]:
    """Pod set of the sandboxes: as many as there are trajectories at a time, each as large as the job's largest."""
    options = [sandbox for _, sandbox in sandboxed(context.job)]
    if not options:
        return []
    largest: dict[str, Any] = {}
    for sandbox in options:
        for name, amount in {**sandbox.resources.limits, **sandbox.resources.requests}.items():
            if name not in largest or number_of(amount) > number_of(largest[name]):
                largest[name] = amount
    container: Object = {"name": CONTAINER, "image": "sandbox", "resources": {"requests": largest}}
    workers = min(context.job.spec.workers.replicas, context.shards)
    return [PodSet(POD_SET, workers * context.job.spec.rollout.concurrency, {"spec": {"containers": [container]}})]


def quota_problem(job: RolloutJob) -> str | None:
    """Why a job in a queue cannot ask for the quota of its sandboxes; None if it can."""
    for number, sandbox in sandboxed(job):
        if not {"cpu", "memory"} <= {*sandbox.resources.limits}:
            return (
                f"spec.environments[{number}].sandbox.resources.limits: a job in a queue asks for the quota of its "
                "sandboxes, so that they must have limits of cpu and memory"
            )
    return None
