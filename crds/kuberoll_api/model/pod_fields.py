"""Fields of pods, spelled as in Kubernetes and passed on unchanged.

They are checked one level deep and stay plain dicts. That level is typed because CEL rules compare only fields with a
schema: with free-form keys, replacing one by another would count as no change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, with_config
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from kuberoll_api.model.types import JsonObject, LongText, ShortText

_STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(_STRICT)
class _EnvVar(TypedDict):
    name: Annotated[ShortText, Field(description="Name of the variable.")]
    value: NotRequired[Annotated[LongText, Field(description="Value of the variable; $(OTHER) is replaced.")]]
    valueFrom: NotRequired[
        Annotated[JsonObject, Field(description="Source of the value: secretKeyRef, configMapKeyRef, fieldRef, ...")]
    ]


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
PodTemplate = Annotated[JsonObject, _Keys(_PodTemplate)]
