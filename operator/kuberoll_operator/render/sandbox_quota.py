"""Quota of trajectories' sandboxes."""

from __future__ import annotations

from kuberoll_api.ahead import usual_ahead
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.sandbox_pods import sandbox_pods, sandboxed
from kuberoll_operator.render.workload import PodSet


def sandbox_pod_sets(context: RenderContext) -> list[PodSet]:
    """Pod sets of the sandboxes: one for each kind of nodes, of as many pods as there are at a time.

    These are those of trajectories that run, and of those that begin next. All trajectories may be of one environment,
    so that several pod sets have as many each.
    """
    concurrency = context.job.spec.rollout.concurrency
    usual = usual_ahead(concurrency)
    ahead = {
        context.job.spec.environments[number].name: usual if sandbox.start_ahead is None else sandbox.start_ahead
        for number, sandbox in sandboxed(context.job)
    }
    workers = min(context.job.spec.workers.replicas, context.shards)
    return [
        PodSet(item.name, workers * (concurrency + sum(ahead[name] for name in item.environments)), item.template)
        for item in sandbox_pods(context)
    ]


def quota_problem(job: RolloutJob) -> str | None:
    """Why a job in a queue cannot ask for the quota of its sandboxes; None if it can."""
    for number, sandbox in sandboxed(job):
        if not {"cpu", "memory"} <= {*sandbox.resources.limits}:
            return (
                f"spec.environments[{number}].sandbox.resources.limits: a job in a queue asks for the quota of its "
                "sandboxes, so that they must have limits of cpu and memory"
            )
    return None
