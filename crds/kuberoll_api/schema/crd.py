"""The CustomResourceDefinition, generated from the models.

An API server accepts structural schemas only: every value has one type, there are no references, and optional values
are nullable instead of a union with null. This module translates pydantic's schemas to that form.
"""

from __future__ import annotations

import io
from typing import Any, Final

from pydantic import BaseModel
from ruamel.yaml import YAML

from kuberoll_api.model.rolloutjob import GROUP, KIND, VERSION, RolloutJob, RolloutJobSpec
from kuberoll_api.model.types import MAX_SEED
from kuberoll_api.schema.common import ordered
from kuberoll_api.schema.rules import rules_of
from kuberoll_api.status import RolloutJobStatus

Schema = dict[str, Any]

PLURAL: Final = "rolloutjobs"

_HEADER = "# Made by `make crd` from kuberoll_api; change the model there.\n"

_COLUMNS = (
    ("Phase", ".status.phase", "Phase of the job.", 0),
    ("Generation", ".status.summary.generation", "Engine replicas, ready of desired.", 0),
    ("Workers", ".status.summary.workers", "Worker pods, active of desired.", 0),
    ("Progress", ".status.summary.progress", "Trajectories, finished of planned.", 0),
    ("Reward", ".status.summary.meanReward", "Mean reward so far.", 0),
    ("Model", ".spec.generation.model.source", "The model that generates.", 1),
    ("Backend", ".status.generation.backend", "Backend that runs the engine.", 1),
    ("Endpoint", ".status.generation.endpoint", "Base URL that the workers use.", 1),
    ("Reason", ".status.summary.reason", "Why the job is in its phase.", 1),
)

# Copied unchanged; everything else is translated or, like titles, useless to an API server.
_KEPT = (
    "type", "format", "pattern", "enum", "default",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip
_FORMATS = {"integer": "int64", "number": "double"}
_ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition, as JSON."""
    age = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    columns = [
        {"name": name, "type": "string", "jsonPath": path, "description": words} | ({"priority": wide} if wide else {})
        for name, path, words, wide in _COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [*columns, age],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.replicas",
                "statusReplicasPath": ".status.workers.active",
                "labelSelectorPath": ".status.workers.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rlj"],
                "categories": ["all", "kuberoll"],
            },
            "versions": [version],
        },
    }


def schema() -> Schema:
    """The structural schema of a RolloutJob."""
    return {
        "description": _words(RolloutJob),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": f"{GROUP}/{VERSION}.", "type": "string"},
            "kind": {"description": f"{KIND}.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": _arranged(
                "spec", {"description": "Desired state, written by the user."} | _structural_model(RolloutJobSpec)
            ),
            "status": {"description": "Observed state, written by the operator."} | _structural_model(RolloutJobStatus),
        },
        "x-kubernetes-validations": [rule.as_json() for rule in rules_of(RolloutJob.__name__)],
    }


def _arranged(path: str, given: Schema) -> Schema:
    """A schema with the fields first that most jobs set."""
    if "items" in given:
        return given | {"items": _arranged(f"{path}[]", given["items"])}
    if "properties" not in given:
        return given
    arranged = ordered(path, given["properties"])
    return given | {"properties": {name: _arranged(f"{path}.{name}", field) for name, field in arranged.items()}}


def to_yaml(value: dict[str, Any]) -> str:
    """The definition as a YAML file; equal models give equal bytes."""
    yaml = YAML(typ="rt")
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 120
    out = io.StringIO()
    yaml.dump(value, out)
    return _HEADER + out.getvalue()


def _words(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _structural_model(model: type[BaseModel]) -> Schema:
    made = model.model_json_schema(by_alias=True)
    return _structural(made | {"title": model.__name__}, made["$defs"])


def _structural(given: Schema, models: Schema) -> Schema:
    """A JSON schema of pydantic as a structural schema.

    Raises:
        ValueError: It contains something that a structural schema cannot express.
    """
    if "$ref" in given:
        name = given["$ref"].rpartition("/")[2]
        if name == "JsonValue":
            return dict(_ANYTHING)
        return _structural({**models[name], "title": name, **_without(given, "$ref")}, models)
    if "anyOf" in given:
        return _union(given, models)
    made = {key: given[key] for key in ("description", *_KEPT) if key in given}
    if "const" in given:
        made |= {"type": "string", "enum": [given["const"]]}
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive in given:
            made |= {bound: given[exclusive], exclusive: True}
    match made.get("type"):
        case "integer" | "number":
            made["format"] = _FORMATS[made["type"]]
            # API servers store bounds as floats: this one would be rounded up, beyond int64, whose own bound is the
            # same.
            if made.get("maximum") == MAX_SEED:
                del made["maximum"]
        case "array":
            made["items"] = _structural(given["items"], models)
            made.setdefault("x-kubernetes-list-type", "atomic")
        case "object" if "properties" in given:
            made |= _properties(given, models)
        case "object":
            made["additionalProperties"] = _structural(given["additionalProperties"], models)
        case "string" | "boolean":
            pass
        case other:
            raise ValueError(f"{other} of {given} is not structural")
    if made.get("default") is None or made["default"] in ([], {}, ""):
        made.pop("default", None)
    return made


def _union(given: Schema, models: Schema) -> Schema:
    choices = [choice for choice in given["anyOf"] if choice != {"type": "null"}]
    rest = _without(given, "anyOf", "title", *(("default",) if given.get("default") is None else ()))
    if [choice.get("type") for choice in choices] == ["string", "integer"]:
        text, _ = choices
        return {
            **{key: value for key, value in rest.items() if key == "description"},
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": text["maxLength"],
            "pattern": text["pattern"],
        }
    if len(choices) != 1:
        raise ValueError(f"{given['anyOf']} is not a structural type")
    made = _structural({**choices[0], **rest}, models)
    # A nullable enumeration would need null among its values.
    return made if "enum" in made or len(given["anyOf"]) == 1 else {**made, "nullable": True}


def _properties(given: Schema, models: Schema) -> Schema:
    required = given.get("required", [])
    made: Schema = {"required": required} if required else {}
    properties = {name: _structural(field, models) for name, field in given["properties"].items()}
    for name, field in properties.items():
        # An API server fills in the defaults of an object's fields only if the object exists.
        # It checks the object's rules on the default before filling in the defaults of its fields.
        inside = {key: inner["default"] for key, inner in field.get("properties", {}).items() if "default" in inner}
        if inside and name not in required and "nullable" not in field:
            field["default"] = inside
    made["properties"] = properties
    rules = [rule.as_json() for rule in rules_of(given.get("title", ""))]
    return made | ({"x-kubernetes-validations": rules} if rules else {})


def _without(given: Schema, *keys: str) -> Schema:
    return {key: value for key, value in given.items() if key not in keys}
