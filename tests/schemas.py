"""Kubernetes' own schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import orjson
from kubernetes_validate import utils

VERSION = "1.31"
"""The oldest version of Kubernetes that the chart accepts."""


# Without a cache kubernetes_validate parses its definitions again for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


def validate(item: Mapping[str, Any]) -> None:
    """Check an object against its schema, unknown fields included; the same object is checked once.

    Raises:
        ValidationError: Of kubernetes_validate; names the field.
    """
    _validate(orjson.dumps(item, option=orjson.OPT_SORT_KEYS))


@functools.cache
def _validate(item: bytes) -> None:
    kubernetes_validate.validate(orjson.loads(item), VERSION, strict=True)
