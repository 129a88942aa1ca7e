"""The output of jobs that name none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_api import conditions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator.commands.get import rendered_template
from kuberoll_operator.defaults import with_defaults
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object, Observed, condition
from kuberoll_operator.settings import InvalidSettings, Settings
from kuberoll_operator.status.job_status import compute_status
from tests.operator.support import NAMESPACE, SETTINGS, UID, at, job, manifest, raw

WITH_DEFAULT = SETTINGS.model_copy(update={"default_output": "s3://bucket/rollouts/"})


def unnamed(**spec: Any) -> RolloutJob:
    return job(output={"uri": None}, **spec)


def test_a_job_without_an_output_writes_below_the_default() -> None:
    found = with_defaults(unnamed(), raw(), WITH_DEFAULT)
    assert found.spec.output.uri == f"s3://bucket/rollouts/{NAMESPACE}/puzzle"
    assert found.spec.model_copy(update={"output": unnamed().spec.output}) == unnamed().spec


def test_an_output_that_is_named_stays() -> None:
    assert with_defaults(job(), raw({"output": {"uri": "s3://before"}}), WITH_DEFAULT) == job()


def test_a_job_keeps_its_output_when_the_default_changes() -> None:
    status = {"output": {"uri": "pvc://store/rollouts/puzzle"}}
    for settings in (WITH_DEFAULT, SETTINGS):
        found = with_defaults(unnamed(), raw(status), settings)
        assert found.spec.output.uri == "pvc://store/rollouts/puzzle"


def status_of_new(settings: Settings) -> Object:
    found = with_defaults(unnamed(), raw(), settings)
    return compute_status(compute_facts(found, raw(), Observed(), settings, at(0)))


def test_the_status_has_the_output() -> None:
    assert status_of_new(WITH_DEFAULT)["output"] == {"uri": f"s3://bucket/rollouts/{NAMESPACE}/puzzle"}


def test_a_cluster_without_a_default_says_what_to_set() -> None:
    found = status_of_new(SETTINGS)
    failed = condition(found, conditions.FAILURE_TARGET)
    assert failed["reason"] == "InvalidSpec"
    assert "spec.output.uri: missing" in failed["message"]
    assert "jobs.defaultOutput" in failed["message"]
    assert "output" not in found


@pytest.mark.parametrize("root", ["runs", "/data", "file:///data", "pvc://", "pvc://Claim"])
def test_a_default_that_pods_cannot_write_to_is_refused(root: str) -> None:
    with pytest.raises(InvalidSettings, match="KUBEROLL_DEFAULT_OUTPUT"):
        Settings.from_environment({"KUBEROLL_DEFAULT_OUTPUT": root})


def test_output_is_copied_from_where_the_job_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kuberoll get` of a job whose Jobs are gone does not know the operator's default."""
    monkeypatch.delenv("KUBEROLL_DEFAULT_OUTPUT", raising=False)
    live = manifest(output={"uri": None})
    live["metadata"]["uid"] = UID
    live["status"] = {"output": {"uri": "pvc://store/rollouts/puzzle"}}
    volumes = rendered_template(live)["spec"]["volumes"]
    assert {"name": "output", "persistentVolumeClaim": {"claimName": "store"}} in volumes


def test_render_reads_the_default_as_the_operator_does(tmp_path: Path) -> None:
    from click.testing import CliRunner
    from ruamel.yaml import YAML

    from kuberoll_operator.commands.render import render

    file = tmp_path / "job.yaml"
    given = manifest(output={"uri": None})
    del given["spec"]["output"]
    YAML().dump(given, file)
    without = CliRunner().invoke(render, [str(file)])
    assert without.exit_code == 2
    assert "KUBEROLL_DEFAULT_OUTPUT" in without.output
    found = CliRunner().invoke(render, [str(file)], env={"KUBEROLL_DEFAULT_OUTPUT": "pvc://store"})
    assert found.exit_code == 0, found.output
    assert f'"output": "/var/lib/kuberoll-output/{NAMESPACE}/puzzle"' in found.output
