"""The ConfigMap that all pods of a job read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from kuberoll_api.contract import DATASET_DIRECTORY, PodConfig
from kuberoll_api.model import traits
from kuberoll_api.model.rolloutjob import RolloutJobSpec
from kuberoll_api.model.traits import Traits
from kuberoll_api.output_location import output_of
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.servers import located

CONFIG_DIRECTORY: Final = "/etc/kuberoll"
CONFIG_FILE: Final = f"{CONFIG_DIRECTORY}/{names.CONFIG_KEY}"
FILES_DIRECTORY: Final = "/opt/kuberoll-files"
"""Directory of `workers.files`; not below /etc/kuberoll*, which processes of environments cannot read."""

STATE_DIRECTORY: Final = "/var/lib/kuberoll"


def build_config(context: RenderContext) -> Object:
    """ConfigMap <job>-config with the one key job.json.

    Raises:
        InvalidOutput: Pods cannot write to the output.
    """
    child = context.child("v1", "ConfigMap", names.config(context.name), names.CONFIG)
    fields = dataclasses.asdict(pod_config(context))
    # `turns` is always written, because its absence has a meaning.
    given = {key: value for key, value in fields.items() if key == "turns" or value not in (None, [])}
    text = json.dumps(given, sort_keys=True, indent=1, ensure_ascii=False)
    return {**child, "data": {names.CONFIG_KEY: f"{text}\n"}}


def pod_config(context: RenderContext) -> PodConfig:
    """The configuration in job.json.

    Raises:
        InvalidOutput: Pods cannot write to the output.
    """
    output = output_of(context.job.spec.output.uri)
    # Pods are not restarted in place, so turns are only written to a volume that outlives them.
    kept = output.claim is not None and context.job.spec.rollout.journal_turns
    source, files = context.job.spec.dataset.source, context.job.spec.workers.files
    mounted = source is not None and (source.config_map is not None or source.pvc is not None)
    return PodConfig(
        job=_for_pods(context),
        base=DATASET_DIRECTORY if mounted or files is None else FILES_DIRECTORY,
        modules=None if files is None else FILES_DIRECTORY,
        endpoint=context.hosting.endpoint,
        shard_count=context.shards,
        output=output.location,
        turns=output.location if kept else None,
        discovery=context.hosting.discovery,
        replicas=list(context.hosting.replicas),
        replicas_host=context.hosting.replicas_host,
    )


def _for_pods(context: RenderContext) -> dict[str, Any]:
    given = context.job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status", "metadata"})
    spec = traits.without(given["spec"], RolloutJobSpec, lambda field: field.reader == "Operator", Traits())
    return {**given, "metadata": {"name": context.name}, "spec": located(context, spec)}
