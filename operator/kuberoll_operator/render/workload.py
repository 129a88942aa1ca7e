"""Kueue's Workload of a job: quota for engines, Ray's head and workers, granted together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.demand import demand
from kuberoll_operator.render.workers import build_workers_job


class PodSet(NamedTuple):
    """A set of identical pods.

    Attributes:
        pods: Maximum number of pods at the same time.
    """

    name: str
    pods: int
    template: Object


class Priority(NamedTuple):
    """A WorkloadPriorityClass and its value."""

    name: str
    value: int


def build_workload(
    context: RenderContext, engines: Sequence[PodSet], *, queue: str, priority: Priority | None
) -> Object:
    """Workload <job>-workload.

    Args:
        engines: Pods of the policy; none for an external policy.
        queue: Name of the LocalQueue.
    """
    child = context.child("kueue.x-k8s.io/v1beta2", "Workload", names.workload(context.name), names.QUOTA)
    child["spec"] = {
        "podSets": [
            {"name": item.name, "count": item.pods, "template": demand(item.template)}
            for item in (*engines, workers_pod_set(context))
        ],
        "queueName": queue,
    }
    if priority is not None:
        reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": priority.name}
        child["spec"] |= {"priority": priority.value, "priorityClassRef": reference}
    return child


def workers_pod_set(context: RenderContext) -> PodSet:
    """Pod set of the environment workers. There is always room for one: the finish pod takes its place at the end."""
    job = build_workers_job(context, suspend=True)
    return PodSet(names.WORKERS, max(1, job["spec"]["parallelism"]), job["spec"]["template"])
