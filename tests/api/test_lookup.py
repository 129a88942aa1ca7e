"""What is allowed, in words."""

from __future__ import annotations

import pytest

from kuberoll_api.paths import Path
from kuberoll_api.schema.lookup import alternatives, description, field_paths, fields, in_words


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("apiVersion",), "kuberoll.io/v1alpha1"),
        (("spec",), "a mapping"),
        (("spec", "suspend"), "true or false"),
        (("spec", "generation", "backend"), "Auto, KubeRay, Native or External"),
        (("spec", "generation", "replicas"), "a whole number from 1 to 1024"),
        (("spec", "generation", "sampling", "topP"), "a number above 0 and of at most 1"),
        (("spec", "environments"), "a list of 1 to 64 items"),
        (("spec", "environments", 3, "name"), "text of 1 to 63 characters, only letters, digits and ._-, beginning "
         "and ending with a letter or digit"),
        (("spec", "environments", 3, "entrypoint"), "text of at most 512 characters, of the form package.module:Class"),
        (("spec", "environments", 3, "config"), "a mapping of at most 1024 fields"),
        (("spec", "environments", 3, "config", "anything"), "any value"),
        (("spec", "generation", "resources", "limits", "cpu"), "text of 1 to 64 characters, a quantity as Kubernetes "
         "writes it (500m, 2.5, 16Gi) or a whole number from 0 to 1000000000000000"),
        (("spec", "nothing"), ""),
        (("spec", "suspend", "deeper"), ""),
    ],
)  # fmt: skip
def test_in_words(path: Path, words: str) -> None:
    assert in_words(alternatives(path)) == words


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": "a"}, "a"),
        ({"enum": ["a"]}, "a"),
        ({"type": "integer"}, "a whole number"),
        ({"type": "integer", "minimum": 2}, "a whole number of at least 2"),
        ({"type": "number", "maximum": 2}, "a number of at most 2"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "a number above 0 and below 1"),
        ({"type": "string"}, "text"),
        ({"type": "string", "minLength": 1}, "text of at least 1 character"),
        ({"type": "string", "pattern": "^a$"}, "text, of the form ^a$"),
        ({"type": "array", "maxItems": 1}, "a list of at most 1 item"),
    ],
)
def test_bounds_in_words(schema: dict[str, object], words: str) -> None:
    assert in_words([schema]) == words


def test_fields_and_their_descriptions() -> None:
    assert "maxTurns" in fields(("spec", "rollout"))
    assert fields(("spec", "environments", 0, "config")) == {}
    assert description(("spec", "rollout", "maxTurns")) == "Maximum turns per trajectory."
    assert description(("spec", "environments", 0)) == ""
    assert description(()) == ""


def test_places_begin_with_the_shallowest() -> None:
    assert list(field_paths("repeats")) == ["spec.dataset.repeats", "spec.environments[].repeats"]
    assert list(field_paths("nowhere")) == []
