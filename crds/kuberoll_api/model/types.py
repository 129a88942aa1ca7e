"""Building blocks of the API's fields: bounded strings, numbers and maps, and the base of every model."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from kuberoll_api.model.contradictions import contradiction

# Children are named "<job>-<suffix>"; a pod of an Indexed Job adds "-<index>-<5 characters>" and must stay within the
# 63 characters of a DNS label.
MAX_NAME_LENGTH = 40

COMMIT_PATTERN = r"^[0-9a-f]{40,64}$"  # of git, by SHA-1 or SHA-256
Commit = Annotated[str, StringConstraints(pattern=COMMIT_PATTERN, max_length=64)]

MAX_SECONDS = 365 * 86400
MAX_COUNT = 10**15  # JSON readers with only floats are exact up to here
MAX_SEED = 2**63 - 1

# Patterns with equal meaning in Rust, Go and CEL: no look-around, and no \w, which is ASCII-only in one of them.
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_NAME_PATTERN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_PATTERN = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
# Of Kubernetes' labels; a key may have a domain.
LABEL_KEY_PATTERN = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"
ENTRYPOINT_PATTERN = r"^[\p{L}\p{M}\p{N}_.]+:[\p{L}\p{M}\p{N}_.]+$"
URL_PATTERN = r"^https?://"
VERSION_PATTERN = r"^[A-Za-z0-9]([-._+A-Za-z0-9]*[A-Za-z0-9])?$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
# No part of the path is "." or "..".
PVC_PATTERN = r"^pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?(/([^./]|[.][^./]|[.][.][^/])[^/]*)*/?$"
# Relative, and no part is "." or begins with "..": what Kubernetes accepts as path of a ConfigMap's key.
FILE_PATH_PATTERN = r"^([^./]|[.][^./])[^/]*(/([^./]|[.][^./])[^/]*)*$"
CONFIG_MAP_KEY_PATTERN = r"^[-._A-Za-z0-9]+$"
QUANTITY_PATTERN = r"^[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
DnsName = Annotated[str, StringConstraints(pattern=DNS_NAME_PATTERN, min_length=1, max_length=253)]
Url = Annotated[str, StringConstraints(pattern=URL_PATTERN, max_length=2048)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=63)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Text = Annotated[str, StringConstraints(max_length=4096)]
LongText = Annotated[str, StringConstraints(max_length=65536)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]

AccessPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^(/|~|\.)")]
"""A path of the machine that an environment's process may use, or not; `~` is the home, `.` the working directory."""
JsonObject = Annotated[dict[str, JsonValue], Field(max_length=1024)]
TrackingName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Quantity = (
    Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, min_length=1, max_length=64)]
    | Annotated[int, Field(ge=0, le=MAX_COUNT)]
)


def _kubernetes_keys(found: dict[str, str]) -> dict[str, str]:
    # The CRD's schema cannot say it; the API server does for metadata, and when pods are made.
    for key in found:
        if not re.fullmatch(LABEL_KEY_PATTERN, key) or len(key.rpartition("/")[2]) > 63 or len(key) > 317:
            message = "the key must be letters, digits, -, _ and ., at most 63, alone or after DOMAIN/"
            raise contradiction(message, key)
    return found


Labels = Annotated[
    dict[str, Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN, max_length=63)]],
    Field(max_length=256),
    AfterValidator(_kubernetes_keys),
]
Annotations = Annotated[dict[str, LongText], Field(max_length=256), AfterValidator(_kubernetes_keys)]


class Model(BaseModel):
    """Base of all models: camelCase in JSON, no unknown fields, no conversions, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
        serialize_by_alias=True,
        use_attribute_docstrings=False,
        # A field named model_* is about the policy's model, never about pydantic.
        protected_namespaces=(),
    )


def keyed_by(key: str) -> JsonDict:
    """Schema of a list whose items have a key: appliers can own single items, and keys are unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
