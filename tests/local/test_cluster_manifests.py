"""Manifests on both sides: those of examples/ run on this machine and on a cluster, or say what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_api.cli import main
from kuberoll_api.manifest.loading import load_job
from kuberoll_operator.commands.render import children_of
from kuberoll_operator.settings import Settings
from kuberoll_workers.dataset.reading import DatasetError, Row, read_rows
from kuberoll_workers.environments.interface import EnvironmentInterface
from tests.local.support import EXAMPLES, TINY, run_to_end
from tests.operator.support import SETTINGS

MANIFESTS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml"))
IN_A_CLUSTER = ["spec.generation.model.source=/opt/kuberoll/models/tiny-policy"]
# They need a server, a program, a package or a model that is not here; `tests/adapters`,
# `tests/local/test_agent_sdks.py` and `tests/local/test_service_run.py` run the same environments with them.
ELSEWHERE = {
    *(f"environments/{name}.yaml" for name in ("mcp", "nemo-gym", "openenv", "verifiers")),
    "agents/calculator.yaml",
    "kubernetes/reward-model.yaml",
    # Its policy needs a chat template with tools; its tasks are played in tests/harbor/test_folders.py.
    "folders/folders.yaml",
    # Its images are built first: tests/harbor/test_example.py, tests/local/test_sandbox_run.py.
    "tasks/tasks.yaml",
    # It goes on until a trainer stops it: tests/local/test_train_example.py.
    "train/rolloutjob.yaml",
}
ON_ONE_MACHINE = {"tasks/tasks.yaml"}
"""Their images are on its disk."""

ON_THIS_MACHINE = [f"spec.generation.model.source={TINY}", "spec.generation.engine=Simulated"]


def options(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name not in ON_ONE_MACHINE])
def test_an_example_runs_on_a_cluster_with_the_model_of_its_images(name: str) -> None:
    file = EXAMPLES / name
    result = CliRunner().invoke(main, ["validate", "--cluster", str(file), *options(IN_A_CLUSTER)])
    assert result.exit_code == 0, result.stderr
    job = load_job(file, IN_A_CLUSTER)
    more = {"default_output": "pvc://rollouts", "sandbox_broker": "http://broker:8790"}
    settings = Settings.model_validate({**SETTINGS.model_dump(), **more})
    assert {child["kind"] for _, child in children_of(job, "default", settings)} >= {"ConfigMap", "Deployment", "Job"}


@pytest.mark.parametrize("name", sorted(ON_ONE_MACHINE))
def test_an_example_that_no_cluster_plays_says_so(name: str) -> None:
    result = CliRunner().invoke(main, ["validate", "--cluster", str(EXAMPLES / name)])
    assert result.exit_code == 2
    assert "is on the disk of one machine, and pods pull their images from registries" in result.stderr


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name not in ON_ONE_MACHINE])
def test_an_example_without_that_names_the_field_to_set(name: str) -> None:
    file = EXAMPLES / name
    result = CliRunner().invoke(main, ["validate", "--cluster", str(file)])
    source = load_job(file).spec.generation.model.source
    local = source.startswith("..")
    assert result.exit_code == (2 if local else 0)
    assert (f"spec.generation.model.source: {source} is a directory of this machine" in result.stderr) == local


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name not in ELSEWHERE])
def test_an_example_runs_on_this_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of clusters too, whose output is a volume claim: it goes where an output that is not named goes."""
    monkeypatch.chdir(tmp_path)
    job = load_job(EXAMPLES / name)
    small = ["spec.dataset.repeats=1"]
    if job.spec.dataset.source is not None and job.spec.dataset.source.generator is not None:
        small.append("spec.dataset.source.generator.count=2")
    code, text = run_to_end(EXAMPLES / name, *options([*ON_THIS_MACHINE, *small]), "--metrics-port", "0")
    assert code == 0, text
    output = tmp_path / "runs" / job.metadata.name
    assert json.loads((output / "manifest.json").read_text())["job"] == job.metadata.name
    claim = str(job.spec.output.uri).startswith("pvc:")
    assert ("is a volume of a cluster; writing to runs/" in text) == claim


def test_a_model_of_an_image_names_the_option_that_replaces_it(tmp_path: Path) -> None:
    code, text = run_to_end(EXAMPLES / "kubernetes" / "simulated.yaml", "--output", tmp_path / "out")
    assert code == 2
    assert "/opt/kuberoll/models/tiny-policy" in text
    assert "--set spec.generation.model.source=" in text


@pytest.mark.parametrize(
    "source", [{"configMap": {"name": "rows"}}, {"pvc": {"claimName": "data", "path": "rows.jsonl"}}]
)
def test_rows_of_a_cluster_name_the_option_that_replaces_them(source: object, tmp_path: Path) -> None:
    override = f"spec.dataset.source={json.dumps(source)}"
    with pytest.raises(DatasetError) as refused:
        rows_of([override], tmp_path)
    replacement = re.search("--set '?([^' ]+=)'?'?([^']+)'", str(refused.value))
    assert replacement is not None
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "task_name": "sliding_puzzle"}\n')
    assert len(rows_of([override, "".join(replacement.groups())], tmp_path)) == 1


def rows_of(overrides: list[str], base: Path) -> list[Row]:
    """Rows of an example of clusters on this machine."""
    job = load_job(EXAMPLES / "kubernetes" / "simulated.yaml", overrides)

    def environment(name: str) -> EnvironmentInterface:
        raise AssertionError(f"{name} generates no rows here")

    return list(read_rows(job.spec.dataset, base=base, task_names=["sliding_puzzle"], environment=environment))
