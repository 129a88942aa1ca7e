"""The model: every field described and bounded, strict, camelCase on the wire."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api import model
from kuberoll_api.manifest.loading import load_job
from kuberoll_api.model.rollout import Rollout
from kuberoll_api.model.rolloutjob import ObjectMeta, RolloutJob
from kuberoll_api.model.types import Model
from tests.api.support import VALID

MODULES = [importlib.import_module(item.name) for item in pkgutil.iter_modules(model.__path__, f"{model.__name__}.")]
MODELS = sorted(
    {
        model
        for module in MODULES
        for _, model in inspect.getmembers(module, inspect.isclass)
        if issubclass(model, Model) and model is not Model
    },
    key=lambda model: model.__name__,
)
SCHEMA = RolloutJob.model_json_schema()


@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_every_field_is_described(model: type[Model]) -> None:
    assert model.__doc__ is not None
    assert model.__doc__.strip().endswith(".")
    for name, field in model.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def unbounded(schema: Any, place: str) -> Iterator[str]:
    """Places in a JSON schema where a number, a text, a list or a mapping may be of any size."""
    needed = {
        "integer": [{"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}],
        "number": [{"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}],
        "string": [{"maxLength", "enum", "const"}],
        "array": [{"maxItems"}],
        "object": [{"maxProperties", "properties"}],
    }
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from unbounded(item, f"{place}[{index}]")
    elif isinstance(schema, dict):
        for bounds in needed.get(schema["type"], []) if isinstance(schema.get("type"), str) else []:
            if not bounds & set(schema):
                yield f"{place}: no {' or '.join(sorted(bounds))}"
        for key, inner in schema.items():
            if key not in ("default", "const", "enum", "required"):
                yield from unbounded(inner, f"{place}.{key}")


def test_every_field_is_bounded() -> None:
    assert list(unbounded(SCHEMA, "")) == []


def test_the_bounds_test_sees_what_is_unbounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"type": "array"}}}
    assert list(unbounded(schema, "")) == [
        ".properties.a: no exclusiveMaximum or maximum",
        ".properties.b: no maxItems",
    ]


@pytest.mark.parametrize("model", MODELS)
def test_models_are_strict_immutable_and_camel_case(model: type[Model]) -> None:
    assert model.model_config.get("strict")
    assert model.model_config.get("frozen")
    assert model.model_config.get("extra") == ("ignore" if model is ObjectMeta else "forbid")
    for field in model.model_fields.values():
        assert field.alias is not None
        assert "_" not in field.alias


def test_a_job_survives_the_wire(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(VALID)
    job = load_job(file)
    wire = job.model_dump_json(exclude_unset=True)
    assert RolloutJob.model_validate(json.loads(wire)) == job
    assert RolloutJob.model_validate_json(job.model_dump_json()) == job
    assert json.loads(wire)["spec"]["rollout"] == {"maxTurns": 20}


def test_defaults_need_no_more_than_a_model_an_environment_and_a_dataset() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "a"},
            "spec": {
                "generation": {"model": {"source": "m"}},
                "environments": [{"name": "e", "type": "math"}],
                "dataset": {"source": {"uri": "rows.jsonl"}},
            },
        }
    )
    assert job.spec.generation.sampling.temperature == 1.0
    assert job.spec.rollout.scheduling == "Concurrent"
    assert job.spec.workers.replicas == 1


def test_python_names_are_refused_on_the_wire() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Rollout.model_validate({"max_turns": 3})
