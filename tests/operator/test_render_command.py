"""`kuberoll render`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kuberoll_operator.commands.render import render
from tests.operator.test_render import GOLDEN

NATIVE = str(GOLDEN / "native" / "input.yaml")


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(render, list(arguments), env=env)
    return result.exit_code, result.output


def test_all_children_are_printed_with_when_they_are_created() -> None:
    code, output = run(NATIVE, env={"KUBEROLL_WORKER_IMAGE": "example.org/mine:3"})
    assert code == 0
    documents = list(YAML(typ="safe").load_all(output))
    assert [item["kind"] for item in documents] == [
        "Secret",
        "ConfigMap",
        "NetworkPolicy",
        "NetworkPolicy",
        "Service",
        "Service",
        "Service",
        "Job",
        "PodDisruptionBudget",
        "Deployment",
        "Job",
        "Job",
    ]
    assert {item["metadata"]["namespace"] for item in documents} == {"rollouts"}
    assert output.count("\n# created") + output.startswith("# created") == len(documents)
    assert documents[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "example.org/mine:3"


def test_namespace_and_overrides() -> None:
    code, output = run(NATIVE, "-n", "other", "--set", "spec.workers.replicas=7")
    assert code == 0
    documents = list(YAML(typ="safe").load_all(output))
    assert {item["metadata"]["namespace"] for item in documents} == {"other"}
    assert documents[-2]["spec"]["parallelism"] == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "spec.output.uri=runs/x"], "spec.output.uri"),
        (["--set", "spec.workers.replica=1"], "replica"),
        (["--set", "spec.generation.gpusPerReplica=0.5"], "spec.generation.gpusPerReplica"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused(arguments: list[str], words: str) -> None:
    code, output = run(NATIVE, *arguments)
    assert code == 2
    assert words in output
    assert "kind:" not in output


def test_several_jobs_of_a_file(tmp_path: Path) -> None:
    both = tmp_path / "both.yaml"
    both.write_text(Path(NATIVE).read_text() + "---\n" + (GOLDEN / "external" / "input.yaml").read_text())
    code, output = run(str(both))
    assert code == 0
    assert "native-finish" in output
    assert "external-finish" in output
