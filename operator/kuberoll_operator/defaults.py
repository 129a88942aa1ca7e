"""Fields of a job that its manifest leaves to the cluster."""

from __future__ import annotations

from typing import Any

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.output_location import default_output
from kuberoll_operator.model import Object, status_of
from kuberoll_operator.settings import Settings


def with_defaults(job: RolloutJob, raw: Object, settings: Settings) -> RolloutJob:
    """The job with its output filled in, if its spec names none.

    The output in the status takes precedence over the operator's default: a job that has begun to write must not move
    when the default changes.

    Args:
        raw: The live object: its metadata and status.
    """
    if job.spec.output.uri is not None:
        return job
    recorded: Any = status_of(raw).get("output") or {}
    uri = recorded.get("uri")
    if uri is None and settings.default_output is not None:
        uri = default_output(settings.default_output, raw["metadata"]["namespace"], job.metadata.name)
    if uri is None:
        return job
    output = job.spec.output.model_copy(update={"uri": uri})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"output": output})})
