"""Options of pods: what their pod template must be like to be merged by names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api.manifest.mistakes import explain
from kuberoll_api.model.rolloutjob import RolloutJob
from tests.api.contradictions import JOB, changed

SERVICE = {"name": "grader", "model": {"source": "org/grader"}}
PLACES: dict[str, dict[str, Any]] = {
    "spec.generation": {},
    "spec.workers": {},
    "spec.services[0]": {"spec.services": [SERVICE]},
    "spec.environments[0].remote": {"spec.environments.0.isolation": "Remote"},
}


def with_spec(place: str, spec: dict[str, Any]) -> RolloutJob:
    """The job whose pods at a place have a pod template."""
    path = place.replace("[", ".").replace("]", "")
    return RolloutJob.model_validate(changed(JOB, PLACES[place] | {f"{path}.podTemplate": {"spec": spec}}))


def mistakes(place: str, spec: dict[str, Any]) -> list[str]:
    """What is said of a job whose pods at a place have a pod template."""
    with pytest.raises(ValidationError) as refused:
        with_spec(place, spec)
    return [".".join(map(str, path)) + ": " + message for path, message in explain(refused.value, {})]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("field", ["volumes", "imagePullSecrets", "containers", "initContainers"])
def test_names_are_unique(place: str, field: str) -> None:
    items = [{"name": "same", "image": "a"}, {"name": "other", "image": "a"}, {"name": "same", "image": "b"}]
    [found] = mistakes(place, {field: items})
    assert found.endswith(
        f'podTemplate.spec.{field}.2.name: found "same", the name of {field}[0] too; no two may have the same'
    )


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_names_in_containers_are_unique(kind: str) -> None:
    mounts = [{"name": name, "mountPath": "/same"} for name in "ab"]
    [found] = mistakes("spec.workers", {kind: [{"name": "c", "image": "c", "volumeMounts": mounts}]})
    assert f"podTemplate.spec.{kind}.0.volumeMounts.1.mountPath" in found
    [found] = mistakes("spec.workers", {kind: [{"name": "c", "image": "c", "env": [{"name": "A"}, {"name": "A"}]}]})
    assert f"podTemplate.spec.{kind}.0.env.1.name" in found


@pytest.mark.parametrize("place", PLACES)
def test_a_container_without_an_image_is_the_main_one(place: str) -> None:
    """A misspelled name would add a container that no pod can have."""
    name = {"generation": "generation", "workers": "worker", "services": "service", "environments": "environment"}[
        place.removeprefix("spec.").split("[")[0]
    ]
    with_spec(place, {"containers": [{"name": name}, {"name": "sidecar", "image": "a"}]})
    [found] = mistakes(place, {"containers": [{"name": "main"}]})
    assert f'found "main"; the main container of these pods is {name}, and another one needs an image' in found


@pytest.mark.parametrize("spec", [{"containers": "a", "volumes": None}, {"volumes": [{}, {}]}, {"volumes": ["a"]}])
def test_what_is_of_another_form_is_left_to_the_api_server(spec: dict[str, Any]) -> None:
    assert with_spec("spec.workers", spec).spec.workers.template_spec == spec


def sandbox_with(spec: dict[str, Any]) -> RolloutJob:
    """A job whose sandboxes' pods have a pod template."""
    sandbox = {"image": "debian", "podTemplate": {"spec": spec}}
    agents = {"name": "harbor", "agent": {"tools": {}}, "sandbox": sandbox}
    return RolloutJob.model_validate(changed(JOB, {"spec.environments": [agents]}))


def test_pods_of_sandboxes_may_be_placed_and_pulled_as_any() -> None:
    spec = {
        "automountServiceAccountToken": False,
        "containers": [{"name": "sandbox", "env": [{"name": "A", "value": "b"}]}],
        "hostUsers": False,
        "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"pool": "sandboxes"},
        "tolerations": [{"operator": "Exists"}],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "rows", "persistentVolumeClaim": {"claimName": "rows", "readOnly": True}},
            {"name": "about", "projected": {"sources": [{"configMap": {"name": "a"}}, {"downwardAPI": {"items": []}}]}},
        ],
    }
    sandbox = sandbox_with(spec).spec.environments[0].sandbox
    assert sandbox is not None
    assert sandbox.pod_template == {"spec": spec}


TOKEN = {"serviceAccountToken": {"path": "token"}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"serviceAccountName": "admin"}, "serviceAccountName"),
        ({"serviceAccount": "admin"}, "serviceAccount"),
        ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
        # It would remove the false that keeps the token out.
        ({"automountServiceAccountToken": None}, "automountServiceAccountToken"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"hostIPC": True}, "hostIPC"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volumes.0.hostPath"),
        ({"volumes": [{"name": "a", "secret": {"secretName": "b"}}]}, "volumes.0.secret"),
        ({"volumes": [{"name": "a", "projected": {"sources": [TOKEN]}}]}, "volumes.0.projected.sources.0."),
        (
            {"volumes": [{"name": "a", "projected": {"sources": [{}, {"secret": {}}]}}]},
            "volumes.0.projected.sources.1.",
        ),
        ({"volumes": [{"name": "a", "csi": {"driver": "b", "nodePublishSecretRef": {}}}]}, "volumes.0.csi."),
        ({"containers": [{"name": "sandbox", "envFrom": [{"secretRef": {}}]}]}, "containers.0.envFrom"),
        (
            {"containers": [{"name": "sandbox", "env": [{"name": "A", "valueFrom": {}}]}]},
            "containers.0.env.0.valueFrom",
        ),
        (
            {"initContainers": [{"name": "a", "image": "b", "securityContext": {"privileged": True}}]},
            "initContainers.0.securityContext.privileged",
        ),
        ({"containers": [{"name": "worker"}]}, "containers.0.name"),
    ],
)
def test_pods_of_sandboxes_have_neither_secrets_nor_their_node(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        sandbox_with(spec)
    [(path, message)] = explain(refused.value, {})
    assert ".".join(map(str, path)).startswith(f"podTemplate.spec.{field}")
    assert "the policy's commands run in these pods" in message or field == "containers.0.name"
