"""The finish Job: it aggregates the shards and writes the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import rename_container
from kuberoll_operator.render.config import STATE_DIRECTORY
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.pods import DRAINS, container, data_volumes, pod_template
from kuberoll_operator.render.servers import environment_token_variables
from kuberoll_operator.render.small_requests import small_resources
from kuberoll_operator.render.workers import failure_policy

MUTABLE: Final = frozenset({"suspend"})

REQUESTS: Final = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}
"""Largest requests: it reads the shards one after another, in one process."""

GRACE_SECONDS: Final = 30
RETRIES: Final = 3


def build_finish_job(context: RenderContext, *, suspend: bool = False) -> Object:
    """Job <job>-finish: one pod like a worker's, with the workers' options and small requests.

    Fields of container "worker" in `workers.podTemplate` apply to container "finish", too, except the requests. It has
    the workers' limits, because a run's report may need more than is requested for it.
    """
    spec = context.job.spec.workers
    volumes = data_volumes(context)
    main = container(
        context,
        spec,
        name="finish",
        module="kuberoll_workers.pods.finish",
        image=context.settings.worker_image,
        env=[
            {"name": "HF_HOME", "value": f"{STATE_DIRECTORY}/huggingface"},
            {"name": "HOME", "value": STATE_DIRECTORY},
            *environment_token_variables(context),
        ],
        volumes=volumes,
        read_only=True,
    )
    over = None if spec.pod_template is None else rename_container(spec.pod_template, "worker", "finish")
    template = pod_template(
        context,
        spec,
        component=names.FINISH,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Never",
        over=over,
        annotations=DRAINS,
        pod_set=names.WORKERS,
    )
    for item in template["spec"]["containers"]:
        if item["name"] == "finish" and isinstance(item.get("resources"), Mapping):
            item["resources"] = small_resources(item["resources"], REQUESTS)
    child = context.child("batch/v1", "Job", names.finish(context.name), names.FINISH)
    child["spec"] = {
        "backoffLimit": RETRIES,
        "completions": 1,
        "parallelism": 1,
        "podFailurePolicy": failure_policy("finish"),
        "podReplacementPolicy": "Failed",
        "suspend": suspend,
        "template": template,
    }
    return shaped(child, MUTABLE)
