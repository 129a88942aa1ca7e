"""What is rendered for controllers of others, as an API server with their CRDs takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.kube.resources import LEADER_WORKER_SETS, WORKLOADS, Resource
from tests.cluster.api import Api, is_true
from tests.operator import published_crds
from tests.operator.support import SETTINGS

GOLDEN = Path(__file__).parents[1] / "operator" / "golden" / "native-groups" / "input.yaml"


@pytest.mark.parametrize("resource", [LEADER_WORKER_SETS, WORKLOADS], ids=lambda resource: resource.kind)
async def test_it_is_taken_as_it_is_and_written_once(api: Api, namespace: str, resource: Resource) -> None:
    crd = published_crds.crd(resource.plural)
    await api.apply({**crd, "status": None})
    await api.wait("CustomResourceDefinition", None, crd["metadata"]["name"], lambda item: is_true(item, "Established"))
    [child] = [item for _, item in children_of(load_job(GOLDEN), namespace, SETTINGS) if item["kind"] == resource.kind]
    # Its owner is not there, and the garbage collector would know.
    child["metadata"].pop("ownerReferences")
    path = resource.path(namespace, child["metadata"]["name"])
    # A field that the CRD does not know is an error, not dropped.
    parameters = {"fieldManager": "kuberoll-operator", "fieldValidation": "Strict"}
    first, second = [
        await api.request("PATCH", path, child, parameters=parameters, content_type="application/apply-patch+yaml")
        for _ in range(2)
    ]
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    for key, value in child["spec"].items():
        assert key in first["spec"], value
