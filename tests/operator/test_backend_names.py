"""The API's names of backends are those that the operator has."""

from __future__ import annotations

from typing import get_args

from kuberoll_api.model.generation import BackendName, Generation
from kuberoll_api.status import GenerationStatus
from kuberoll_operator.backends import BACKENDS


def test_the_operator_has_a_backend_for_each_name_of_the_api() -> None:
    assert set(BACKENDS) == set(get_args(BackendName))
    choices = {"Auto", *get_args(BackendName)}
    schema = Generation.model_json_schema()["properties"]["backend"]
    assert set(schema["enum"]) == choices
    for name in BACKENDS:
        assert GenerationStatus.model_validate({"backend": name}).backend == name
