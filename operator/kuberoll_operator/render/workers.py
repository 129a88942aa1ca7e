"""The Indexed Job of environment workers, one index per shard, and the Service for their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.access import direct_token_variables
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.pods import (
    DRAINS,
    POD_IP,
    STATE_VARIABLES,
    container,
    data_volumes,
    pod_template,
    spread,
)
from kuberoll_operator.render.sandboxes import sandbox_variables
from kuberoll_operator.render.servers import environment_token_variables
from kuberoll_operator.render.service_tokens import service_variables
from kuberoll_operator.render.tokens import token_variables

MUTABLE: Final = frozenset({"parallelism", "suspend"})
"""Fields of the Job that may change while it runs."""

GRACE_SECONDS: Final = 120


def worker_template(context: RenderContext, component: str, *, arguments: Sequence[str] = ()) -> Object:
    """Template of a worker's pod.

    Args:
        component: Component of the job, for the pod's labels.
        arguments: Additional arguments of the program.
    """
    spec = context.job.spec.workers
    volumes = data_volumes(context)
    main = container(
        context,
        spec,
        name="worker",
        module="kuberoll_workers.pods.worker",
        arguments=arguments,
        image=context.settings.worker_image,
        env=[
            *STATE_VARIABLES,
            POD_IP,
            *token_variables(context, "generate"),
            *environment_token_variables(context),
            *sandbox_variables(context),
            *((*direct_token_variables(context), *service_variables(context)) if component == names.WORKERS else ()),
        ],
        volumes=volumes,
        read_only=True,
        ports=[{"name": "metrics", "containerPort": contract.PROGRESS_PORT}],
    )
    together = context.together and component == names.WORKERS
    apart = [] if together or component != names.WORKERS else spread(names.selector(context.name, names.WORKERS))
    return pod_template(
        context,
        spec,
        component=component,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Never",
        over=spec.pod_template,
        affinity=_together(context) if together else None,
        annotations=DRAINS,
        apart=apart,
        pod_set=names.WORKERS,
    )


def _together(context: RenderContext) -> Object:
    """Affinity that keeps a job's workers on one node; the first of them chooses it."""
    term = {
        "labelSelector": {"matchLabels": names.selector(context.name, names.WORKERS)},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def build_workers_job(context: RenderContext, *, suspend: bool) -> Object:
    """Job <job>-workers."""
    spec = context.job.spec.workers
    assignment = context.assignments.get(names.WORKERS)
    paid_for = None if assignment is None else assignment.count
    child = context.child("batch/v1", "Job", names.workers(context.name), names.WORKERS)
    child["spec"] = {
        "backoffLimitPerIndex": spec.retries_per_shard,
        "completionMode": "Indexed",
        "completions": context.shards,
        "maxFailedIndexes": min(spec.max_failed_shards, context.shards),
        "parallelism": min(spec.replicas, context.shards, spec.replicas if paid_for is None else paid_for),
        "podFailurePolicy": failure_policy("worker", ignored=(contract.EXIT_DRAINED,)),
        "podReplacementPolicy": "Failed",
        "suspend": suspend,
        "template": worker_template(context, names.WORKERS),
    }
    return shaped(child, MUTABLE)


def build_workers_service(context: RenderContext) -> Object:
    """Headless Service <job>-workers, of worker pods' metrics."""
    child = context.child("v1", "Service", names.workers(context.name), names.WORKERS)
    child["spec"] = {
        "clusterIP": "None",
        "ports": [{"name": "metrics", "port": contract.PROGRESS_PORT, "targetPort": "metrics"}],
        "selector": names.selector(context.name, names.WORKERS),
    }
    return child


def failure_policy(container: str, *, ignored: tuple[int, ...] = ()) -> Mapping[str, Any]:
    """Pod failure policy: a refusal fails the Job at once; disruptions and `ignored` exit codes do not count."""
    rules: list[Object] = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    codes = [("FailJob", (contract.EXIT_REFUSED,)), ("Ignore", ignored)]
    for action, values in codes:
        if values:
            on = {"containerName": container, "operator": "In", "values": list(values)}
            rules.append({"action": action, "onExitCodes": on})
    return {"rules": rules}
