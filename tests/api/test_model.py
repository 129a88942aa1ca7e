"""Every field says what it is and how far it may go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.workers import FileItem

SCHEMA = RolloutJob.model_json_schema(by_alias=True)


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, model in {"RolloutJob": SCHEMA, **SCHEMA["$defs"]}.items():
        for field, schema in model.get("properties", {}).items():
            yield f"{name}.{field}", schema


FIELDS = dict(properties())


@pytest.mark.parametrize("name", FIELDS)
def test_described(name: str) -> None:
    schema = FIELDS[name]
    # pydantic leaves out a description that repeats its model's own.
    reference = schema.get("$ref", "").rpartition("/")[2]
    assert len(schema.get("description") or SCHEMA["$defs"][reference]["description"]) > 3


def _types(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for option in schema.get("anyOf", ()):
        yield from _types(option)
    if isinstance(schema.get("items"), dict):
        yield from _types(schema["items"])


@pytest.mark.parametrize("name", FIELDS)
def test_bounded(name: str) -> None:
    # Deadlines in whole seconds may be as long as anybody likes; quantities are Kubernetes' own.
    unbounded = {"Dataset.limit", "RolloutJobSpec.activeDeadlineSeconds", "RolloutJobSpec.ttlSecondsAfterFinished"}
    for schema in _types(FIELDS[name]):
        kind = schema.get("type")
        if "const" in schema or "enum" in schema or name in unbounded:
            continue
        if kind in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum"} & set(schema), name
            assert {"maximum", "exclusiveMaximum"} & set(schema), name
        if kind == "string":
            assert "maxLength" in schema, name
        if kind == "array":
            assert "maxItems" in schema, name


def test_unknown_fields_are_refused_everywhere() -> None:
    objects = {name: model for name, model in SCHEMA["$defs"].items() if "properties" in model}
    lax = [name for name, model in objects.items() if model.get("additionalProperties") is not False]
    # An object exported from a cluster has more metadata than anybody writes.
    assert lax == ["ObjectMeta"]


@pytest.mark.parametrize("path", ["a.py", "a/b.py", ".a/b", "a b/é.txt", "a..b", "a/.b"])
def test_paths_of_files(path: str) -> None:
    assert FileItem(key="a", path=path).path == path


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", ".", "..", "./a", "a/./b", "../a", "a/../b", "..a"])
def test_paths_that_kubernetes_or_a_kubelet_would_not_mount(path: str) -> None:
    with pytest.raises(ValidationError):
        FileItem(key="a", path=path)
