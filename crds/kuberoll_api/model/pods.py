"""Options of all kinds of pods: resources, variables, volumes and scheduling."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from kuberoll_api.model.contradictions import reject_duplicates
from kuberoll_api.model.pod_fields import EnvFrom, EnvVar, PodTemplate, PullSecret, Toleration, Volume, VolumeMount
from kuberoll_api.model.traits import POD, POD_ANYWHERE
from kuberoll_api.model.types import (
    Annotations,
    DnsName,
    Labels,
    Model,
    Quantity,
    keyed_by,
)


class Resources(Model):
    """Kubernetes resource requirements."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Maximum amounts that the container may use."
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Amounts that are reserved for the container."
    )


class PodOptions(Model):
    """Options of pods, for the operator; `kuberoll run` uses only `env` and the GPUs of `resources`."""

    resources: Annotated[Resources, POD_ANYWHERE] = Field(
        default_factory=Resources, description="Requests and limits of the main container."
    )
    image: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, POD] = Field(
        default=None, description="Container image; absent: the operator's default for this role."
    )
    image_pull_secrets: Annotated[list[PullSecret], POD] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra=keyed_by("name"),
        description="Secrets to pull the image with, as in a pod.",
    )
    env: Annotated[list[EnvVar], POD_ANYWHERE] = Field(
        default_factory=list,
        max_length=256,
        json_schema_extra=keyed_by("name"),
        description="Environment variables, as in a container.",
    )
    env_from: Annotated[list[EnvFrom], POD] = Field(
        default_factory=list, max_length=64, description="Sources of environment variables, as in a container."
    )
    volumes: Annotated[list[Volume], POD] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=keyed_by("name"),
        description="Volumes, as in a pod; kinds that are not listed here can be set in podTemplate.",
    )
    volume_mounts: Annotated[list[VolumeMount], POD] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=keyed_by("mountPath"),
        description="Mounts of these volumes in the main container, as in a container.",
    )
    node_selector: Annotated[Labels, POD] = Field(default_factory=dict, description="Labels that a node must have.")
    tolerations: Annotated[list[Toleration], POD] = Field(
        default_factory=list, max_length=64, description="Taints that are tolerated, as in a pod."
    )
    service_account_name: Annotated[DnsName | None, POD] = Field(
        default=None,
        description="Service account of the pods, which never get its token. Absent: the namespace's default.",
    )
    runtime_class_name: Annotated[DnsName | None, POD] = Field(
        default=None, description="RuntimeClass of the pods: gVisor or Kata for untrusted code."
    )
    priority_class_name: Annotated[DnsName | None, POD] = Field(default=None, description="PriorityClass of the pods.")
    pod_labels: Annotated[Labels, POD] = Field(
        default_factory=dict, description="Additional labels of the pods; the operator's own take precedence."
    )
    pod_annotations: Annotated[Annotations, POD] = Field(default_factory=dict, description="Annotations of the pods.")
    pod_template: Annotated[PodTemplate | None, POD] = Field(
        default=None, description="A pod template that is merged over the rendered one, for all other fields."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for field, key in (
            ("image_pull_secrets", "name"),
            ("env", "name"),
            ("volumes", "name"),
            ("volume_mounts", "mountPath"),
        ):
            reject_duplicates([item[key] for item in getattr(self, field)], to_camel(field), key)
        return self
