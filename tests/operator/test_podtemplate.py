"""Pod templates merged."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.podtemplate import merge, rename_container
from kuberoll_operator.settings import Settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from("abc"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "containers", "volumes", "ports", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)
MAPPING = st.dictionaries(st.sampled_from(["env", "containers", "volumes", "a", "b"]), JSON, max_size=4)

BASE: dict[str, Any] = {
    "spec": {
        "containers": [
            {"name": "worker", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": ["x", "y"]},
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "securityContext": {"runAsNonRoot": True},
    }
}


def test_a_probe_has_one_handler() -> None:
    base = {"readinessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 5}}
    other = merge(base, {"readinessProbe": {"exec": {"command": ["true"]}}})
    assert other == {"readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 5}}
    slower = merge(base, {"readinessProbe": {"periodSeconds": 60}})
    assert slower == {"readinessProbe": {**base["readinessProbe"], "periodSeconds": 60}}
    elsewhere = merge(base, {"readinessProbe": {"httpGet": {"port": 1}}})
    assert elsewhere == {"readinessProbe": {"httpGet": {"port": 1}, "periodSeconds": 5}}


def test_containers_and_variables_are_merged_by_name() -> None:
    over = {
        "spec": {
            "containers": [
                {"name": "sidecar", "image": "i"},
                {"name": "worker", "env": [{"name": "B", "valueFrom": {}}, {"name": "C", "value": "3"}], "args": ["z"]},
            ]
        }
    }
    worker, sidecar = merge(BASE, over)["spec"]["containers"]
    assert [item["name"] for item in worker["env"]] == ["A", "B", "C"]
    # A value and a source cannot be mixed.
    assert worker["env"][1] == {"name": "B", "valueFrom": {}}
    assert worker["args"] == ["z"]
    assert sidecar == {"name": "sidecar", "image": "i"}


def test_a_volume_of_the_same_name_is_replaced() -> None:
    over = {"spec": {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]}}
    assert merge(BASE, over)["spec"]["volumes"] == over["spec"]["volumes"]


def test_null_removes() -> None:
    assert merge(BASE, {"spec": {"securityContext": {"runAsNonRoot": None}}})["spec"]["securityContext"] == {}
    assert merge({}, {"a": {"b": None, "c": [{"d": None}]}}) == {"a": {"c": [{"d": None}]}}


def test_what_is_no_pod_template_is_handed_on_for_the_server_to_refuse() -> None:
    assert merge(BASE, {"spec": {"containers": "none"}})["spec"]["containers"] == "none"
    assert merge(BASE, {"spec": {"containers": [3, {"image": "x"}]}})["spec"]["containers"][1:] == [3, {"image": "x"}]


def test_a_container_is_renamed_for_another_pod() -> None:
    renamed = rename_container(BASE, "worker", "finish")
    assert [item["name"] for item in renamed["spec"]["containers"]] == ["finish"]
    assert rename_container({"spec": "x"}, "worker", "finish") == {"spec": "x"}


@given(base=MAPPING, over=MAPPING)
def test_merging_changes_neither_and_twice_is_once(base: dict[str, Any], over: dict[str, Any]) -> None:
    kept = copy.deepcopy((base, over))
    merged = merge(base, over)
    assert (base, over) == kept
    assert merge(base, {}) == base
    assert merge(merged, {}) == merged
    for key, value in over.items():
        if value is None:
            assert key not in merged
        elif isinstance(value, str | int):
            assert merged[key] == value


def test_workers_run_under_a_seccomp_profile_and_a_runtime_class_of_the_users() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "code", "namespace": "rollouts"},
            "spec": {
                "generation": {"model": {"source": "Qwen/Qwen2.5-0.5B-Instruct"}},
                "environments": [{"name": "code", "type": "code_execution"}],
                "dataset": {"source": {"generator": {"count": 1}}},
                "workers": {
                    "podTemplate": {
                        "spec": {
                            "runtimeClassName": "kata",
                            "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"}},
                        }
                    },
                },
                "output": {"uri": "pvc://store/code"},
            },
        }
    )
    settings = Settings(token_key="tests")  # type: ignore[arg-type]
    children = [child for _, child in children_of(job, "rollouts", settings)]
    [template] = [
        child["spec"]["template"]["spec"]
        for child in children
        if child["kind"] == "Job" and child["metadata"]["name"].endswith("-workers")
    ]
    assert template["runtimeClassName"] == "kata"
    assert template["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "p.json"}
    # The rest stays as restricted as it is.
    assert template["securityContext"]["runAsNonRoot"] is True
    assert template["automountServiceAccountToken"] is False
    assert template["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
