"""The RolloutJob resource, `kuberoll.io/v1alpha1`.

Python attributes are snake_case, JSON fields camelCase; keys passed to vLLM (`engineArgs`) keep vLLM's spelling. Models
reject unknown fields and convert nothing: `"4"` is not an integer, as in Kubernetes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction, reject_duplicates
from kuberoll_api.model.dataset import Dataset
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.generation import Generation, Weights
from kuberoll_api.model.output import Output
from kuberoll_api.model.rollout import Rollout
from kuberoll_api.model.services import MAX_SERVICES, ModelService
from kuberoll_api.model.traits import OPERATION, Traits
from kuberoll_api.model.types import (
    JOB_NAME_PATTERN,
    MAX_NAME_LENGTH,
    MAX_SECONDS,
    Annotations,
    DnsLabel,
    JsonObject,
    Labels,
    Model,
    keyed_by,
)
from kuberoll_api.model.workers import Workers

GROUP = "kuberoll.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RolloutJob"

WHOLE_NUMBER: Final = "0|[1-9][0-9]{0,17}"
"""Pattern of versions of weights where they are counted."""


_LIFE = Traits(identity=False, change="AnyTime", reader="Operator", place="Cluster")
_WORK = Traits(change="Suspended", reader="Pods", place="Anywhere")


_OTHER_METADATA: Final = (
    *("clusterName", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
    *("generateName", "generation", "managedFields", "ownerReferences", "resourceVersion", "selfLink", "uid"),
)
"""Fields of Kubernetes' ObjectMeta that an exported object may have, besides those of the model."""


class ObjectMeta(Model):
    """The part of Kubernetes' ObjectMeta that a manifest may contain."""

    # Fields that an API server adds to an exported object are accepted and ignored.
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_fields(cls, found: Any) -> Any:
        for key in found if isinstance(found, dict) else ():
            if key not in cls.model_fields and key not in _OTHER_METADATA:
                known = ", ".join(cls.model_fields)
                raise contradiction(f"unknown field; Kubernetes has no such metadata, and KubeRoll reads {known}", key)
        return found

    name: Annotated[str, StringConstraints(pattern=JOB_NAME_PATTERN, min_length=1, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of the job: a DNS label like a Service's name, short enough for the names of its children."
    )
    namespace: DnsLabel | None = Field(default=None, description="Namespace of the job; not used on a laptop.")
    labels: Labels = Field(default_factory=dict, description="Labels of the job.")
    annotations: Annotations = Field(
        default_factory=dict, description="Annotations of the job, which KubeRoll ignores."
    )


class RolloutJobSpec(Model):
    """Specification of the job."""

    suspend: Annotated[bool, _LIFE] = Field(
        default=False, description="Stop the job; trajectories in flight are finished first. As in batch/v1."
    )
    managed_by: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=253)] | None, _LIFE | Traits(change="Never")
    ] = Field(default=None, description="The controller that manages this job, as in batch/v1; immutable.")
    active_deadline_seconds: Annotated[int | None, _LIFE] = Field(
        default=None, ge=1, le=MAX_SECONDS, description="Maximum duration of the job, after which it fails."
    )
    startup_deadline_seconds: Annotated[int, _LIFE | Traits(reader="Pods", place="Anywhere")] = Field(
        default=1800,
        ge=1,
        le=7 * 86400,
        description="Maximum duration of each step of the start, after which the job fails: the check, then "
        "generation, then the first worker.",
    )
    ttl_seconds_after_finished: Annotated[int | None, _LIFE] = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds after its end at which the job is deleted; absent: never.",
    )
    generation: Annotated[Generation, _WORK] = Field(description="The policy: model, engine and replicas.")
    weights: Annotated[Weights | None, _WORK | Traits(identity=False, change="AnyTime")] = Field(
        default=None,
        description="Weights that replace the model's own; may change while the job runs.",
    )
    services: Annotated[list[ModelService], _WORK] = Field(
        default_factory=list,
        max_length=MAX_SERVICES,
        json_schema_extra=keyed_by("name"),
        description="Further served models, which environments ask: judges and reward models.",
    )
    environments: Annotated[list[Environment], _WORK] = Field(
        min_length=1, max_length=64, json_schema_extra=keyed_by("name"), description="The environments."
    )
    dataset: Annotated[Dataset, _WORK] = Field(description="The prompts.")
    rollout: Annotated[Rollout, _WORK] = Field(default_factory=Rollout, description="The multi-turn loop.")
    workers: Annotated[Workers, _WORK | OPERATION] = Field(
        default_factory=Workers, description="The environment workers."
    )
    output: Annotated[Output, _WORK | OPERATION] = Field(
        default_factory=Output, description="Destination of the trajectories."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [environment.name for environment in self.environments]
        reject_duplicates(names, "environments", "name")
        self._check_services()
        if self.rollout.groups.drop_equal_rewards:
            repeats = [item.repeats or self.dataset.repeats for item in self.environments]
            if 1 in repeats:
                name = names[repeats.index(1)]
                message = (
                    f"the groups of {name} have one sample each, so all their rewards are equal; raise its repeats"
                )
                raise contradiction(message, "rollout", "groups", "dropEqualRewards")
        if self.rollout.scheduling == "Lockstep" and any(item.agent is not None for item in self.environments):
            raise contradiction(
                "agents take their turns by themselves; set scheduling: Concurrent", "rollout", "scheduling"
            )
        external = self.generation.external
        if external is not None and external.api == "OpenAI" and any(item.has_sessions for item in self.environments):
            raise contradiction(
                "agents need KubeRoll's own server, whose sessions record their calls; set api: KubeRoll",
                *("generation", "external", "api"),
            )
        if self.weights is not None and self.generation.backend == "External":
            raise contradiction(
                "is not for backend External, whose weights are managed externally; remove it", "weights"
            )
        self._check_pace()
        for path, source in self.dataset.located_sources():
            for index, name in enumerate(source.generator.environments if source.generator else ()):
                _check_environment(name, names, *path[1:], "generator", "environments", index)
        for number, part in enumerate(self.dataset.sources):
            if part.environment is not None:
                _check_environment(part.environment, names, "dataset", "sources", number, "environment")
        return self

    def _check_pace(self) -> None:
        on_policy, workers, external = self.rollout.on_policy, self.workers, self.generation.external
        paced = on_policy is not None or self.dataset.epochs is None
        if paced and workers.shards is not None and workers.shards > workers.replicas:
            raise contradiction(
                f"found {workers.shards}, and replicas is {workers.replicas}: with rollout.onPolicy or "
                "dataset.epochs: null every shard needs a worker at all times; remove it",
                *("workers", "shards"),
            )
        if on_policy is None or on_policy.max_lag is None:
            return
        if external is not None and external.api == "OpenAI":
            raise contradiction(
                "OpenAI endpoints do not name the weights that sampled a token; set api: KubeRoll, or remove maxLag",
                *("generation", "external", "api"),
            )
        if self.weights is not None and not re.fullmatch(WHOLE_NUMBER, self.weights.version):
            raise contradiction(
                f'found "{self.weights.version}"; with rollout.onPolicy.maxLag versions are whole numbers that grow',
                *("weights", "version"),
            )

    def _check_services(self) -> None:
        services = [service.name for service in self.services]
        reject_duplicates(services, "services", "name")
        for number, environment in enumerate(self.environments):
            path = ("environments", number)
            for index, name in enumerate(environment.access.services):
                _check_service(name, services, *path, "access", "services", index)
            if environment.asked_service is not None:
                _check_service(environment.asked_service, services, *path, "config", "service")


def _check_service(name: str, services: Sequence[str], *path: str | int) -> None:
    if name in services:
        return
    near = difflib.get_close_matches(name, services, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = (
        f"the name of one of spec.services: {', '.join(services)}" if services else "a name, and spec.services is empty"
    )
    raise contradiction(f'found "{name}"; it must be {known}{hint}', *path)


def _check_environment(name: str, names: list[str], *path: str | int) -> None:
    if name not in names:
        raise contradiction(f'found "{name}"; it must be the name of an environment: {", ".join(names)}', *path)


class RolloutJob(Model):
    """A rollout job: a model, its environments, a dataset, and the destination of the trajectories."""

    api_version: Literal["kuberoll.io/v1alpha1"] = Field(description="The version of this API.")
    kind: Literal["RolloutJob"] = Field(description="The kind of this object.")
    metadata: ObjectMeta = Field(description="Kubernetes object metadata.")
    spec: RolloutJobSpec = Field(description="Specification of the job.")
    status: JsonObject | None = Field(default=None, description="Written by the operator; ignored in a manifest.")
