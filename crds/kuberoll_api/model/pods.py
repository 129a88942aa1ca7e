"""Options of all kinds of pods: four typed fields, and a pod template for all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import reject_duplicates
from kuberoll_api.model.pod_fields import EnvVar, PodTemplate
from kuberoll_api.model.pod_templates import check_pod_spec, items_of, mapping_of
from kuberoll_api.model.traits import POD, POD_ANYWHERE
from kuberoll_api.model.types import Labels, Model, Quantity, keyed_by


class Resources(Model):
    """Kubernetes resource requirements."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Maximum amounts that the container may use."
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Amounts that are reserved for the container."
    )


class PodOptions(Model):
    """Options of pods, for the operator; `kuberoll run` uses only `env` and the GPUs of `resources`.

    The node selector is typed because it is what most jobs set beside the other three, on clusters with several kinds
    of nodes; it needs no second field, as volumes do.
    """

    container_name: ClassVar[str] = ""
    """Name of the main container, by which `podTemplate` changes it."""

    resources: Annotated[Resources, POD_ANYWHERE] = Field(
        default_factory=Resources, description="Requests and limits of the main container."
    )
    image: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, POD] = Field(
        default=None, description="Container image; absent: the operator's default for this role."
    )
    env: Annotated[list[EnvVar], POD_ANYWHERE] = Field(
        default_factory=list,
        max_length=256,
        json_schema_extra=keyed_by("name"),
        description="Environment variables of the main container, as in a container.",
    )
    node_selector: Annotated[Labels, POD] = Field(default_factory=dict, description="Labels that a node must have.")
    pod_template: Annotated[PodTemplate | None, POD] = Field(
        default=None,
        description="A pod template that is merged over the rendered one: tolerations, affinity, volumes, "
        "securityContext, serviceAccountName, labels and annotations, and all other fields of pods.",
    )

    @property
    def template_spec(self) -> Mapping[str, Any]:
        """The pod's spec in `podTemplate`; empty without one."""
        return mapping_of((self.pod_template or {}).get("spec"))

    @property
    def main_containers(self) -> list[Mapping[str, Any]]:
        """What `podTemplate` says of the main container: one item, or none."""
        return [item for item in items_of(self.template_spec, "containers") if item.get("name") == self.container_name]

    @property
    def mount_paths(self) -> list[str]:
        """Paths at which `podTemplate` mounts volumes in the main container."""
        mounts = (mount for item in self.main_containers for mount in items_of(item, "volumeMounts"))
        return [str(mount["mountPath"]).rstrip("/") for mount in mounts if "mountPath" in mount]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        reject_duplicates([item["name"] for item in self.env], "env", "name")
        self._check_template()
        return self

    def _check_template(self) -> None:
        """Check what merging by names needs, which neither a schema nor an API server that gets the result can say.

        Raises:
            PydanticCustomError: Two items have the same key, or a container has neither an image nor a known name.
        """
        check_pod_spec(self.template_spec, self.container_name)
