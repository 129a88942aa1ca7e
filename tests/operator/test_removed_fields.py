"""Jobs of before a field was removed: the operator goes on without it, and says so."""

from __future__ import annotations

from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import format_path
from kuberoll_operator.removed_fields import lost_event, lost_fields
from tests.api.contradictions import JOB, changed

MANAGED: dict[str, Any] = {
    "f:spec": {
        "f:workers": {"f:replicas": {}, "f:tolerations": {}, "f:volumes": {'k:{"name":"a"}': {}}, "f:podLabels": {}},
        "f:services": {'k:{"name":"grader"}': {".": {}, "f:envFrom": {}}, 'k:{"name":"gone"}': {"f:envFrom": {}}},
        "f:environments": {'k:{"name":"mine"}': {"f:remote": {"f:runtimeClassName": {}}}},
        "f:rollout": {"f:retries": {"f:maxBackoffSeconds": {}, "f:backoffSeconds": {}}},
    }
}
SERVICE = {"name": "grader", "model": {"source": "a"}}
LOST = [
    "spec.workers.tolerations",
    "spec.workers.volumes",
    "spec.workers.podLabels",
    "spec.services[0].envFrom",
    "spec.environments[1].remote.runtimeClassName",
    "spec.rollout.retries.maxBackoffSeconds",
]


def lost(change: dict[str, Any], managed: Any = MANAGED) -> list[str]:
    raw = changed(JOB, {"spec.services": [SERVICE], "spec.environments.1.isolation": "Remote"} | change)
    raw["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Update", "fieldsV1": managed}]
    return [format_path(path) for path in lost_fields(raw, RolloutJob.model_validate(raw))]


def test_what_was_set_is_told_by_the_managed_fields() -> None:
    assert lost({}) == LOST
    assert lost({}, {"f:metadata": {}}) == lost({}, {"f:spec": {"f:workers": {"f:env": {}}}}) == []


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"spec.workers.podTemplate": {"spec": {"tolerations": []}}}, {"spec.workers.tolerations"}),
        ({"spec.workers.podTemplate": {"metadata": {"labels": {"a": "b"}}}}, {"spec.workers.podLabels"}),
        (
            {"spec.services.0.podTemplate": {"spec": {"containers": [{"name": "service", "envFrom": []}]}}},
            {"spec.services[0].envFrom"},
        ),
        (
            {"spec.environments.1.remote": {"podTemplate": {"spec": {"runtimeClassName": "a"}}}},
            {"spec.environments[1].remote.runtimeClassName"},
        ),
    ],
)
def test_what_the_pod_template_has_is_not_lost(change: dict[str, Any], replaced: set[str]) -> None:
    assert lost(change) == [field for field in LOST if field not in replaced]


def test_the_event_names_the_fields_and_what_to_do() -> None:
    event = lost_event([("spec", "workers", "tolerations"), ("spec", "rollout", "retries", "maxBackoffSeconds")])
    assert (event.type, event.reason) == ("Warning", "FieldsRemoved")
    assert "spec.workers.tolerations was removed: set spec.workers.podTemplate.spec.tolerations; " in event.note
    assert "spec.rollout.retries.maxBackoffSeconds was removed: it is 30" in event.note
