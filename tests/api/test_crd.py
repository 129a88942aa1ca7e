"""The CRD that is made from the model: in order, and up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from ruamel.yaml import YAML

from kuberoll_api.cli import main
from kuberoll_api.model.generation import Generation
from kuberoll_api.model.rolloutjob import RolloutJob, RolloutJobSpec
from kuberoll_api.model.workers import Workers
from kuberoll_api.schema import crd, rules
from kuberoll_api.status import RolloutJobStatus
from tests.api.contradictions import ACCEPTED, JOB, REFUSED, Contradiction, changed

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "rolloutjobs.kuberoll.io.yaml"
Schema = dict[str, Any]

ANYTHING = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}


def places(given: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema inside a schema, itself first."""
    yield path, given
    for name, field in given.get("properties", {}).items():
        yield from places(field, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in given:
            yield from places(given[key], path + mark)


SCHEMA = crd.schema()
PLACES = [place for place in places(SCHEMA) if place[0] not in ("", ".metadata", ".apiVersion", ".kind")]


def test_the_file_is_as_the_model_is() -> None:
    result = CliRunner().invoke(main, ["crd"])
    assert result.exit_code == 0
    assert FILE.read_text() == result.stdout, f"{FILE.name} is stale: make crd"


def test_the_reference_is_as_the_model_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.reference", "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_file_says_what_the_definition_says() -> None:
    assert YAML(typ="safe").load(FILE.read_text()) == crd.definition()


def test_it_fits_the_annotation_of_a_client_side_apply() -> None:
    # 262,144 bytes are all annotations together; kubectl puts the whole manifest into one.
    assert len(json.dumps(crd.definition())) < 200_000


@pytest.mark.parametrize(("path", "given"), PLACES, ids=[path for path, _ in PLACES])
def test_the_schema_is_structural_described_and_bounded(path: str, given: Schema) -> None:
    if given == ANYTHING:
        return
    assert not {"$ref", "allOf", "oneOf", "not", "const", "title", "exclusiveMin"} & set(given)
    if not path.endswith(("[]", "{}")):
        assert given["description"].endswith(".")
    if given.get("x-kubernetes-int-or-string"):
        assert given["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        assert "type" not in given
        assert given["maxLength"]
        return
    assert "anyOf" not in given
    match given["type"]:
        case "string":
            assert "maxLength" in given or "enum" in given
        case "integer":
            assert "minimum" in given
            assert "maximum" in given or given["format"] == "int64"
        case "number":
            assert {"minimum", "maximum"} <= set(given) or path.endswith(".meanReward")
        case "array":
            assert "maxItems" in given
            assert given["x-kubernetes-list-type"] in ("atomic", "map")
        case "object" if "properties" not in given:
            assert "maxProperties" in given
            assert "additionalProperties" in given
        case "object":
            # An API server that knows some of an object's keys and keeps the others compares those it knows.
            assert "additionalProperties" not in given
            assert "x-kubernetes-preserve-unknown-fields" not in given
        case other:
            assert other == "boolean"
    if "enum" in given:
        assert "nullable" not in given


def test_no_choice_is_a_boolean_for_readers_of_older_yaml() -> None:
    # Helm and kubectl read YAML 1.1, where an unquoted Off is false.
    choices = {choice for _, given in places(SCHEMA) for choice in given.get("enum", ())}
    assert "Require" in choices
    assert not {choice for choice in choices if str(choice).lower() in ("y", "n", "yes", "no", "on", "off")}


def test_lists_with_keys_have_items_with_those_keys() -> None:
    keyed = {path: given for path, given in PLACES if given.get("x-kubernetes-list-type") == "map"}
    assert {".spec.environments", ".spec.workers.env", ".status.conditions"} <= set(keyed)
    for given in keyed.values():
        assert set(given["x-kubernetes-list-map-keys"]) <= set(given["items"]["required"])


@pytest.mark.parametrize("path", [path for path, given in PLACES if "x-kubernetes-validations" in given])
def test_rules_name_fields_and_say_what_to_do(path: str) -> None:
    given = dict(PLACES)[path]
    for rule in given["x-kubernetes-validations"]:
        assert rule["message"]
        assert "\n" not in rule["message"]
        field: Schema = given
        for part in rule.get("fieldPath", "").split(".")[1:]:
            field = field["properties"][part]


def test_every_rule_is_of_a_model_that_is_there() -> None:
    written = [rule for _, given in places(SCHEMA) for rule in given.get("x-kubernetes-validations", ())]
    meant = [rule.as_json() for model in rules._RULES.values() for rule in model]
    # A model may be in several places.
    assert set(map(str, written)) == set(map(str, meant))


def test_every_field_of_a_running_job_is_settled_or_known_to_change() -> None:
    at_any_time = {
        "suspend",
        "activeDeadlineSeconds",
        "startupDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "weights",
    }
    settled = {rule.path for rule in rules.rules_of(RolloutJobSpec.__name__) if "oldSelf" in rule.rule}
    spec = {str(field.alias) for field in RolloutJobSpec.model_fields.values()}
    parts = {
        f"{part}.{field.alias}"
        for part, model in (("generation", Generation), ("workers", Workers))
        for field in model.model_fields.values()
    }
    scale = {"generation.replicas", "generation.autoscaling", "workers.replicas"}
    assert settled == (spec - at_any_time - {"generation", "workers"}) | (parts - scale)


def with_defaults(given: Schema, value: Any) -> Any:
    """What an API server makes of a value."""
    if isinstance(value, list):
        return [with_defaults(given["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in given:
        return value
    fields = given["properties"]
    made = {name: field["default"] for name, field in fields.items() if "default" in field} | value
    return {name: with_defaults(fields[name], item) for name, item in made.items()}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_a_job_with_its_defaults_filled_in_is_the_same_job(change: dict[str, Any]) -> None:
    job = changed(JOB, change)
    assert RolloutJob.model_validate(job | {"spec": with_defaults(SCHEMA["properties"]["spec"], job["spec"])}) == (
        RolloutJob.model_validate(job)
    )


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_the_model_refuses_what_an_api_server_refuses(case: Contradiction) -> None:
    with pytest.raises(ValidationError):
        RolloutJob.model_validate(changed(JOB, case.change))


def test_what_a_structural_schema_cannot_say_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not a structural type"):
        crd._structural({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, {})
    with pytest.raises(ValueError, match="not structural"):
        crd._structural({"type": "null"}, {})


def test_columns_and_the_scale_show_fields_that_there_are() -> None:
    (version,) = crd.definition()["spec"]["versions"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"] if column["name"] != "Age"]
    known = dict(PLACES)
    assert {known[path]["type"] for path in paths} == {"string"}
    scale = version["subresources"]["scale"]
    assert [known[scale[name]]["type"] for name in ("specReplicasPath", "statusReplicasPath")] == ["integer", "integer"]
    assert known[scale["labelSelectorPath"]]["type"] == "string"


def test_the_reference_names_every_field() -> None:
    page = (ROOT / "docs" / "reference" / "rolloutjob.md").read_text()
    for path, _ in PLACES:
        name = path.rpartition(".")[2]
        assert re.search(rf"`{re.escape(name)}`|{re.escape(name)}$", page, re.MULTILINE) or name.endswith(("[]", "{}"))
    anchors = {re.sub(r"[^a-z0-9_-]", "", title) for title in re.findall(r"^#+ (.+)$", page.lower(), re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors


def test_a_status_is_what_the_schema_takes() -> None:
    status = RolloutJobStatus.model_validate(STATUS)
    assert status.model_dump(mode="json", by_alias=True, exclude_unset=True) == STATUS


STATUS: dict[str, Any] = {
    "observedGeneration": 2,
    "phase": "Running",
    "startTime": "2026-01-01T00:00:00Z",
    "conditions": [
        {
            "type": "GenerationReady",
            "status": "True",
            "reason": "Ready",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00.123456Z",
            "observedGeneration": 2,
        }
    ],
    "generation": {
        "backend": "Native",
        "endpoint": "http://job-generation.default.svc:8000",
        "readyReplicas": 1,
        "desiredReplicas": 2,
        "policyVersion": "step-100",
    },
    "workers": {
        "desired": 4,
        "active": 3,
        "ready": 3,
        "succeeded": 1,
        "failed": 0,
        "shards": 8,
        "selector": "kuberoll.io/job=job,app.kubernetes.io/component=workers",
    },
    "progress": {
        "trajectories": 1024,
        "completed": 800,
        "failed": 2,
        "dropped": 10,
        "turns": 4000,
        "generatedTokens": 100_000,
        "percentage": 79,
        "estimatedSecondsRemaining": 60,
        "meanReward": -0.25,
        "lastUpdated": "2026-01-01T00:00:00Z",
    },
    "results": {
        "trajectories": 800,
        "failed": 2,
        "dropped": 10,
        "meanReward": 1,
        "environments": [{"name": "math", "trajectories": 800, "failed": 2, "meanReward": 0.5}],
    },
    "summary": {
        "generation": "1/2",
        "workers": "3/4",
        "progress": "812/1024",
        "meanReward": "-0.25",
        "reason": "Running",
    },
}
