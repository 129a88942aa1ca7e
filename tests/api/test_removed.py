"""Removed fields: refused by their name, with what takes their place."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kuberoll_api.cli import main
from kuberoll_api.manifest.loading import ManifestError, load_manifest
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import format_path, parse_path
from kuberoll_api.removed import REMOVED, replacement, sentence, without_removed
from kuberoll_api.schema.crd import schema
from tests.api.contradictions import JOB, changed

FIRST: dict[str, Any] = {"spec.services": [{"name": "grader", "model": {"source": "a"}}]}


def with_field(pattern: str) -> dict[str, Any]:
    """The job with a value at a removed field."""
    return changed(JOB, FIRST | {pattern.replace("[]", ".0"): [{"name": "a"}]})


def write(job: dict[str, Any], path: FilePath) -> FilePath:
    with path.open("w") as out:
        YAML().dump(job, out)
    return path


@pytest.mark.parametrize("pattern", REMOVED)
def test_each_is_refused_with_its_name_its_line_and_what_to_do(pattern: str, tmp_path: FilePath) -> None:
    file = write(with_field(pattern), tmp_path / "job.yaml")
    field = pattern.replace("[]", "[0]")
    with pytest.raises(ManifestError) as refused:
        load_manifest(file)
    [mistake] = [item for item in refused.value.mistakes if item.field == field]
    path, _ = parse_path(field)
    assert mistake.message == f"was removed: {replacement(path)}"
    name = pattern.rpartition(".")[2]
    lines = file.read_text().splitlines()
    assert mistake.line is not None
    assert name in lines[mistake.line - 1]
    assert "{" not in mistake.message


@pytest.mark.parametrize("pattern", REMOVED)
def test_nothing_that_exists_is_removed_and_what_is_named_instead_exists(pattern: str) -> None:
    field, _ = parse_path(pattern.replace("[]", "[0]"))
    said = replacement(field)
    assert said is not None
    assert not exists(pattern)
    for place in re.findall(r"spec\.[\w.\[\]]+\w", said):
        inside = place.split(".podTemplate.")[0]
        assert exists(re.sub(r"\[\d+\]", "[]", inside)), place


def exists(pattern: str) -> bool:
    """True if the CRD has this field."""
    given: Any = schema()
    for part in pattern.split("."):
        given = given.get("properties", {}).get(part.removesuffix("[]"))
        if given is None:
            return False
        given = given["items"] if part.endswith("[]") else given
    return True


def test_commands_say_so(tmp_path: FilePath) -> None:
    file = write(with_field("spec.workers.tolerations"), tmp_path / "job.yaml")
    done = CliRunner().invoke(main, ["validate", str(file)])
    assert done.exit_code != 0
    assert re.search(
        r"job\.yaml:\d+: spec\.workers\.tolerations: was removed: set spec\.workers\.podTemplate\.spec\.tolerations",
        done.output,
    )


def test_an_option_with_one_is_refused_too(tmp_path: FilePath) -> None:
    with pytest.raises(ManifestError, match=r"spec\.workers\.volumes: was removed: set spec\.workers\.podTemplate"):
        load_manifest(write(JOB, tmp_path / "job.yaml"), ["spec.workers.volumes=[]"])


def test_a_job_without_them_is_what_is_left() -> None:
    job = JOB
    for pattern in REMOVED:
        job = changed(job, FIRST if pattern == next(iter(REMOVED)) else {})
        job = changed(job, {pattern.replace("[]", ".0"): [1]})
    kept, found = without_removed(job)
    assert {re.sub(r"\[\d+\]", "[]", format_path(path)) for path in found} == set(REMOVED)
    left = changed(kept, {"spec.environments.0.isolation": "Remote", "spec.environments.0.agent": None})
    left = changed(left, {"spec.output.tracking": None})
    RolloutJob.model_validate(left)
    assert without_removed(kept) == (kept, [])
    assert without_removed({"kind": "a"}) == ({"kind": "a"}, [])


def test_what_is_free_is_not_searched() -> None:
    """A row, a config or a pod template may have a key of any name."""
    job = changed(JOB, {"spec.environments.0.config": {"tolerations": 1, "spareProcesses": 2}})
    assert without_removed(job) == (job, [])


def test_a_sentence_names_the_field_and_what_to_do() -> None:
    assert sentence(("spec", "services", 1, "envFrom")) == (
        "spec.services[1].envFrom was removed: set envFrom of the container named service in "
        "spec.services[1].podTemplate.spec.containers"
    )
