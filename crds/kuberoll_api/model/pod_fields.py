"""Fields of pods, spelled as in Kubernetes and passed on unchanged.

They are checked one level deep and stay plain dicts. That level is typed because CEL rules compare only fields with a
schema: with free-form keys, replacing one by another would count as no change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, StringConstraints, with_config
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from kuberoll_api.model.types import DnsLabel, DnsName, JsonObject, LongText, ShortText

_STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(_STRICT)
class _EnvVar(TypedDict):
    name: Annotated[ShortText, Field(description="Name of the variable.")]
    value: NotRequired[Annotated[LongText, Field(description="Value of the variable; $(OTHER) is replaced.")]]
    valueFrom: NotRequired[
        Annotated[JsonObject, Field(description="Source of the value: secretKeyRef, configMapKeyRef, fieldRef, ...")]
    ]


@with_config(_STRICT)
class _EnvFrom(TypedDict):
    prefix: NotRequired[
        Annotated[str, StringConstraints(max_length=1024), Field(description="Prefix of each variable's name.")]
    ]
    configMapRef: NotRequired[Annotated[JsonObject, Field(description="A ConfigMap: name, optional.")]]
    secretRef: NotRequired[Annotated[JsonObject, Field(description="A Secret: name, optional.")]]


@with_config(_STRICT)
class _Toleration(TypedDict):
    key: NotRequired[Annotated[ShortText, Field(description="Key of the taint; absent with Exists: every taint.")]]
    operator: NotRequired[
        Annotated[
            Literal["Exists", "Equal", "Lt", "Gt"], Field(description="Comparison with the value; absent: Equal.")
        ]
    ]
    value: NotRequired[Annotated[str, StringConstraints(max_length=1024), Field(description="Value of the taint.")]]
    effect: NotRequired[
        Annotated[
            Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
            Field(description="Effect of the taint; absent: every effect."),
        ]
    ]
    tolerationSeconds: NotRequired[
        Annotated[
            int,
            Field(
                ge=-(2**31),
                le=2**31 - 1,
                description="Seconds for which a NoExecute taint is tolerated; absent: forever.",
            ),
        ]
    ]


@with_config(_STRICT)
class _Volume(TypedDict):
    name: Annotated[DnsLabel, Field(description="Name of the volume, for volumeMounts.")]
    configMap: NotRequired[Annotated[JsonObject, Field(description="Files from a ConfigMap.")]]
    csi: NotRequired[Annotated[JsonObject, Field(description="A volume of a CSI driver with the lifetime of the pod.")]]
    downwardAPI: NotRequired[Annotated[JsonObject, Field(description="Files with fields of the pod.")]]
    emptyDir: NotRequired[Annotated[JsonObject, Field(description="An empty directory with the lifetime of the pod.")]]
    ephemeral: NotRequired[Annotated[JsonObject, Field(description="A claim with the lifetime of the pod.")]]
    hostPath: NotRequired[Annotated[JsonObject, Field(description="A path of the node.")]]
    image: NotRequired[Annotated[JsonObject, Field(description="The files of a container image.")]]
    nfs: NotRequired[Annotated[JsonObject, Field(description="An NFS export.")]]
    persistentVolumeClaim: NotRequired[Annotated[JsonObject, Field(description="A PersistentVolumeClaim.")]]
    projected: NotRequired[Annotated[JsonObject, Field(description="Several sources in one directory.")]]
    secret: NotRequired[Annotated[JsonObject, Field(description="Files from a Secret.")]]


@with_config(_STRICT)
class _VolumeMount(TypedDict):
    name: Annotated[DnsLabel, Field(description="Name of the volume.")]
    mountPath: Annotated[ShortText, Field(description="Path of the mount in the container.")]
    subPath: NotRequired[Annotated[ShortText, Field(description="Path inside the volume; absent: its root.")]]
    subPathExpr: NotRequired[
        Annotated[ShortText, Field(description="Path inside the volume, with $(VARIABLES) replaced.")]
    ]
    readOnly: NotRequired[Annotated[bool, Field(description="Mount it read-only.")]]
    recursiveReadOnly: NotRequired[
        Annotated[
            Literal["Disabled", "IfPossible", "Enabled"],
            Field(description="Apply readOnly to mounts inside it, too."),
        ]
    ]
    mountPropagation: NotRequired[
        Annotated[
            Literal["None", "HostToContainer", "Bidirectional"],
            Field(description="Propagation of later mounts between host and container."),
        ]
    ]


@with_config(_STRICT)
class _PullSecret(TypedDict):
    name: Annotated[DnsName, Field(description="Name of a Secret in the job's namespace.")]


@with_config(_STRICT)
class _PodTemplate(TypedDict):
    metadata: NotRequired[Annotated[JsonObject, Field(description="Labels and annotations of the pods.")]]
    spec: NotRequired[
        Annotated[JsonObject, Field(description="Pod spec; containers, volumes and env are merged by their names.")]
    ]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Constraint on the keys of a dict, in the schema and in validation; the value stays a dict."""

    shape: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.shape)


EnvVar = Annotated[JsonObject, _Keys(_EnvVar)]
EnvFrom = Annotated[JsonObject, _Keys(_EnvFrom)]
Toleration = Annotated[JsonObject, _Keys(_Toleration)]
Volume = Annotated[JsonObject, _Keys(_Volume)]
VolumeMount = Annotated[JsonObject, _Keys(_VolumeMount)]
PullSecret = Annotated[JsonObject, _Keys(_PullSecret)]
PodTemplate = Annotated[JsonObject, _Keys(_PodTemplate)]
