"""The status of a RolloutJob, as the operator reports it.

`phase` and `summary` are for people; tools wait for `conditions`. `model_dump(mode="json", by_alias=True,
exclude_none=True)` gives the form for the API server.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kuberoll_api.model.generation import BackendName
from kuberoll_api.model.types import MAX_COUNT, Commit, Model, Name, keyed_by

Phase = Literal["Pending", "Queued", "Suspended", "Starting", "Running", "Finishing", "Succeeded", "Failed"]

_SECOND = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?Z$"

Timestamp = Annotated[
    str, StringConstraints(pattern=_SECOND, max_length=32), Field(json_schema_extra={"format": "date-time"})
]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Pods = Annotated[int, Field(ge=0, le=1_000_000)]
# Unbounded: a status that cannot be written would be worse than any number. JSON has no infinity.
Reward = Annotated[float, Field(allow_inf_nan=False)]
Word = Annotated[str, StringConstraints(max_length=64)]


class Condition(Model):
    """A condition as in metav1.Condition: true, false or unknown."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)] = Field(
        description="Suspended, WorkersChecked, GenerationReady, WeightsServed, WorkersReady, SuccessCriteriaMet, "
        "FailureTarget, Complete or Failed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=256)] = Field(
        description="Reason in one word; docs/reference/reasons.md explains each."
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="Reason in a sentence, with the original message of the cause."
    )
    last_transition_time: Timestamp = Field(description="Time of the last change of status.")
    observed_generation: Count | None = Field(default=None, description="The metadata.generation that was observed.")


class GenerationStatus(Model):
    """The policy's replicas."""

    backend: BackendName | None = Field(
        default=None, description="Backend that runs the engine, resolved when the job was first seen."
    )
    endpoint: Annotated[str, StringConstraints(max_length=2048)] | None = Field(
        default=None, description="Base URL that the workers use."
    )
    ready_replicas: Pods = Field(default=0, description="Replicas that answer.")
    desired_replicas: Pods = Field(default=0, description="Desired number of replicas; 0 once they are released.")
    policy_version: Annotated[str, StringConstraints(max_length=63)] | None = Field(
        default=None, description="Version of the weights that all replicas serve; absent: unknown."
    )
    model_commit: Commit | None = Field(
        default=None,
        description="Commit of the model at the hub that the workers' check found, which all replicas load, also when "
        "its branch has moved; absent: it is not of the hub, or unknown.",
    )


class WorkersStatus(Model):
    """The environment workers and their shards."""

    desired: Pods = Field(default=0, description="Desired number of concurrent pods.")
    active: Pods = Field(default=0, description="Pods that are pending or running.")
    ready: Pods = Field(default=0, description="Pods that run and are not terminating.")
    succeeded: Pods = Field(default=0, description="Shards that are done.")
    failed: Pods = Field(default=0, description="Shards that failed permanently.")
    shards: Pods | None = Field(
        default=None, description="Number of parts of the dataset; fixed when the workers first start."
    )
    selector: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="Selects the worker pods; for the scale subresource."
    )


class Progress(Model):
    """Progress of the trajectories: polled while workers run, final once they have ended."""

    trajectories: Count = Field(default=0, description="Planned trajectories.")
    completed: Count = Field(default=0, description="Finished and stored trajectories.")
    failed: Count = Field(
        default=0, description="Trajectories that failed permanently; failures.jsonl has their causes."
    )
    dropped: Count = Field(default=0, description="Trajectories in dropped.jsonl.")
    turns: Count = Field(default=0, description="Number of turns.")
    generated_tokens: Count = Field(default=0, description="Number of generated tokens.")
    percentage: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="Percentage of the planned trajectories that are completed, failed or dropped."
    )
    estimated_seconds_remaining: Count | None = Field(
        default=None, description="Estimate from the pace so far; absent: unknown."
    )
    mean_reward: Reward | None = Field(default=None, description="Mean total reward of the completed ones.")
    last_updated: Timestamp | None = Field(default=None, description="Time of these numbers.")


class OutputStatus(Model):
    """Destination of the trajectories."""

    uri: Annotated[str, StringConstraints(max_length=2048)] | None = Field(
        default=None,
        description="URI of the output: the spec's, or the operator's default, which this job then keeps.",
    )


class EnvironmentResults(Model):
    """The results of one environment."""

    name: Name = Field(description="Name of the environment.")
    trajectories: Count = Field(default=0, description="Trajectories that are stored.")
    failed: Count = Field(default=0, description="Trajectories that failed permanently.")
    mean_reward: Reward | None = Field(default=None, description="Mean total reward; absent: no trajectory.")


class Results(Model):
    """The main numbers of aggregate_metrics.json."""

    trajectories: Count = Field(default=0, description="Trajectories that are stored.")
    failed: Count = Field(default=0, description="Trajectories that failed permanently.")
    dropped: Count = Field(default=0, description="Trajectories in dropped.jsonl.")
    mean_reward: Reward | None = Field(default=None, description="Mean total reward; absent: no trajectory.")
    environments: list[EnvironmentResults] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=keyed_by("name"),
        description="Results of each environment.",
    )


class Summary(Model):
    """The columns of `kubectl get` as text, because kubectl can neither divide nor round."""

    generation: Word = Field(default="", description="Replicas, ready of desired: 2/2.")
    workers: Word = Field(default="", description="Worker pods, running of desired: 3/4.")
    progress: Word = Field(default="", description="Trajectories, finished of planned: 812/1024.")
    mean_reward: Word = Field(default="", description="Mean reward so far: 0.413.")
    reason: Word = Field(default="", description="Reason of the condition that explains the phase best.")


class RolloutJobStatus(Model):
    """State of the job as the operator observes it; tools should wait for conditions."""

    observed_generation: Count | None = Field(
        default=None, description="The metadata.generation that this status describes."
    )
    phase: Phase | None = Field(
        default=None, description="For people; wait for conditions instead (kubectl wait --for=condition=Complete)."
    )
    start_time: Timestamp | None = Field(default=None, description="Time of the job's start, reset when it is resumed.")
    completion_time: Timestamp | None = Field(default=None, description="Time when the job became Complete or Failed.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra=keyed_by("type"),
        description="Suspended, WorkersChecked, GenerationReady, WeightsServed, WorkersReady, SuccessCriteriaMet, "
        "FailureTarget, Complete, Failed.",
    )
    generation: GenerationStatus | None = Field(default=None, description="The policy's replicas.")
    workers: WorkersStatus | None = Field(default=None, description="The environment workers and their shards.")
    progress: Progress | None = Field(default=None, description="Progress of the trajectories.")
    output: OutputStatus | None = Field(default=None, description="Destination of the trajectories.")
    results: Results | None = Field(default=None, description="The main numbers of a finished job.")
    summary: Summary | None = Field(default=None, description="The columns of kubectl get, as text; for people.")


def ratio_text(done: int, wanted: int) -> str:
    """`812/1024`, for the columns of `kubectl get`."""
    return f"{done}/{wanted}"


def number_text(number: float | None) -> str:
    """A number with four significant digits: `0.413`, `1.25e+06`; empty for None."""
    return "" if number is None else f"{number:.4g}"
