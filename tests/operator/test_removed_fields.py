"""Jobs of before a field was removed: the operator goes on without it, and says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import Path, format_path
from kuberoll_operator import render
from kuberoll_operator.removed_fields import lost_event, lost_fields, with_kept
from kuberoll_operator.render.objects import has_other_shape
from tests.api.contradictions import JOB, changed
from tests.operator.test_render import context

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


def test_what_the_workers_job_still_has_is_kept_for_the_pods_that_come() -> None:
    """The aggregation writes with the workers' identity, and resumed workers have their runtime class."""
    old = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"iam": "role"}},
        "spec": {
            "containers": [{"name": "worker", "envFrom": [{"secretRef": {"name": "store"}}]}],
            "runtimeClassName": "gvisor",
            "serviceAccountName": "writer",
            "tolerations": [{"operator": "Exists"}],
        },
    }
    live = render.build_workers_job(context(workers={"podTemplate": old}), suspend=True)
    live["spec"]["template"]["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "job"
    names = ("runtimeClassName", "serviceAccountName", "tolerations", "podLabels", "podAnnotations", "envFrom")
    paths: list[Path] = [("spec", "workers", name) for name in names]
    pruned = context()
    kept = dataclasses.replace(pruned, job=with_kept(pruned.job, paths, live))
    assert not has_other_shape(render.build_workers_job(kept, suspend=False), live)
    finish = render.build_finish_job(kept)["spec"]["template"]
    assert (finish["spec"]["serviceAccountName"], finish["spec"]["runtimeClassName"]) == ("writer", "gvisor")
    assert finish["metadata"]["labels"]["team"] == "a"
    assert "batch.kubernetes.io/job-name" not in finish["metadata"]["labels"]
    # What the job says today goes first; without a Job, or without a loss, nothing is kept.
    said = context(workers={"podTemplate": {"spec": {"serviceAccountName": "mine"}}}).job
    assert with_kept(said, paths, live).spec.workers.template_spec["serviceAccountName"] == "mine"
    assert with_kept(pruned.job, paths, None) == with_kept(pruned.job, [], live) == pruned.job
