"""Folders of tasks as datasets: rows, names, and what `kuberoll validate --dataset` says of broken tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kuberoll_api.cli import main
from kuberoll_api.model.dataset import Dataset
from kuberoll_workers.dataset.reading import read_rows
from kuberoll_workers.dataset.rows import DatasetError, Row
from kuberoll_workers.harbor.images import UnknownImage, builds_of, checked_prefix, image_of
from kuberoll_workers.harbor.task import read_task, read_tasks
from tests.harbor.writing import STEPS_FILES, write_task

JOB = """\
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata: {name: tasks}
spec:
  generation: {engine: Simulated, model: {source: tiny}}
  environments: [{name: shell, type: string_match}]
  dataset: {source: {uri: tasks}}
  rollout: {maxTurns: 2}
"""


def rows_of(base: Path, dataset: dict[str, Any], names: dict[str, str] | None = None) -> list[Row]:
    names = {"shell": "sandbox_agent"} if names is None else names
    given = Dataset.model_validate(dataset)
    return list(read_rows(given, base=base, task_names=list(names), environment=None, types=names))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a folder `tasks`."""
    write_task(tmp_path / "tasks/words")
    write_task(tmp_path / "tasks/report", STEPS_FILES)
    return tmp_path


def test_tasks_are_rows(folder: Path) -> None:
    report, words = rows_of(folder, {"source": {"uri": "tasks"}})
    assert [(row.idx, row.task_id, row.task_name) for row in (report, words)] == [
        ("report", "report", "shell"),
        ("kuberoll/count-words", "kuberoll/count-words", "shell"),
    ]
    assert report.messages == [{"role": "user", "content": "Write a report.\n"}]
    assert words.where == f"{folder}/tasks/words/task.toml:1"
    assert words.metadata is not None
    assert report.metadata is not None
    fields = words.metadata["harbor"]
    assert fields["directory"] == "tasks/words"
    assert fields["digest"] == read_task(folder / "tasks/words").digest
    assert fields["machine"]["env"] == {"TOKEN": "${WORDS_TOKEN:-none}"}
    assert fields["about"] == {"difficulty": "easy", "written": "2026-05-04", "weights": [0.5, "nan"]}
    first, second = report.metadata["harbor"]["steps"]
    assert "instruction" not in first
    assert second["instruction"] == "Check the report.\n"
    assert second["verifier"]["machine"]["build"]["directory"] == "steps/check it/tests"
    assert second["min_reward"] == {"form": 0.25, "reward": 1}


def test_a_row_does_not_depend_on_where_the_job_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (folder / "tasks").rename(other / "tasks")
    contents = [row.content for row in rows_of(other, {"source": {"uri": "tasks"}})]
    (other / "tasks").rename(folder / "tasks")
    assert [row.content for row in rows_of(folder, {"source": {"uri": "tasks"}})] == contents


@pytest.mark.parametrize("uri", ["tasks/words", "tasks/words/", "file://tasks/words"])
def test_a_task_is_a_dataset_of_one_row(folder: Path, uri: str) -> None:
    [row] = rows_of(folder, {"source": {"uri": uri}})
    assert row.metadata is not None
    assert row.metadata["harbor"]["directory"].rstrip("/") == "tasks/words"


def test_a_path_that_is_absolute_stays_so(folder: Path) -> None:
    row = rows_of(folder, {"source": {"uri": str(folder / "tasks")}})[1]
    assert row.metadata is not None
    assert row.metadata["harbor"]["directory"] == f"{folder}/tasks/words"


def test_rows_go_to_the_environment_of_their_type(folder: Path) -> None:
    dataset = {"source": {"uri": "tasks"}}
    assert {row.task_name for row in rows_of(folder, dataset, {"math": "math", "shell": "sandbox_agent"})} == {"shell"}
    with pytest.raises(DatasetError, match="task_name is missing"):
        rows_of(folder, dataset, {"a": "sandbox_agent", "b": "sandbox_agent"})
    assert {row.task_name for row in rows_of(folder, dataset, {"own": "none"})} == {"own"}


def test_tasks_mix_with_other_sources_and_shuffle(folder: Path) -> None:
    parts = [
        {"name": "shell", "source": {"uri": "tasks"}, "environment": "shell"},
        {"name": "chat", "source": {"rows": [{"prompt": "Hi."}]}, "environment": "chat"},
    ]
    found = rows_of(folder, {"sources": parts, "shuffleSeed": 3}, {"shell": "sandbox_agent", "chat": "math"})
    assert sorted(row.idx for row in found) == ["chat/0", "shell/kuberoll/count-words", "shell/report"]


def test_directories_without_tasks_are_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text('{"prompt": "Hi."}\n')
    assert len(rows_of(tmp_path, {"source": {"uri": "data"}})) == 1


@pytest.mark.parametrize("extra", [{}, {"shuffleSeed": 1}], ids=["in order", "shuffled"])
def test_each_broken_task_is_refused_by_itself(folder: Path, extra: dict[str, Any]) -> None:
    write_task(folder / "tasks/a", changed={"task.toml": "x = ["})
    write_task(folder / "tasks/b", changed={"task.toml": "[agent]\ntimeout_sec = 0\nuser = []"})
    errors: list[str] = []
    given = Dataset.model_validate({"source": {"uri": "tasks"}, **extra})
    rows = read_rows(
        given,
        base=folder,
        task_names=["shell"],
        environment=None,  # type: ignore[arg-type]
        refused=lambda error: errors.append(str(error)),
    )
    assert len(list(rows)) == 2
    assert sorted(errors) == [
        f"{folder}/tasks/a/task.toml:1: not TOML: Invalid value (at end of document)",
        f"{folder}/tasks/b/task.toml:2: agent.timeout_sec: found 0; input should be greater than 0\n"
        f"{folder}/tasks/b/task.toml:3: agent.user: found []; input should be a valid string or input should be a "
        "valid integer",
    ]
    with pytest.raises(DatasetError, match=r"task\.toml"):
        rows_of(folder, {"source": {"uri": "tasks"}, "limit": 2})


def test_validate_names_broken_tasks_by_file_and_line(folder: Path) -> None:
    write_task(folder / "tasks/broken", changed={"task.toml": '[environment]\nos = "windows"\n', "tests/test.sh": None})
    (folder / "job.yaml").write_text(JOB)
    result = CliRunner().invoke(main, ["validate", "--dataset", str(folder / "job.yaml")])
    assert result.exit_code != 0
    assert f"{folder}/tasks/broken/task.toml:2: environment.os: KubeRoll's machines run Linux" in result.output


def test_images_are_named_by_digests(folder: Path) -> None:
    report, words = read_tasks(folder / "tasks")
    assert image_of(report.machine, None) == "docker.io/library/alpine:3.20"
    assert words.machine.digest is not None
    name = f"registry.example/team/tasks:{words.machine.digest[:32]}"
    assert image_of(words.machine, "registry.example/team/tasks") == name
    row = rows_of(folder, {"source": {"uri": "tasks"}})[1]
    assert row.metadata is not None
    assert image_of(row.metadata["harbor"]["machine"], "registry.example/team/tasks") == name
    with pytest.raises(UnknownImage, match="kuberoll images build"):
        image_of(words.machine, None)


def test_a_context_that_tasks_share_is_built_once_with_the_longest_limit(tmp_path: Path) -> None:
    for number, seconds in enumerate((60, 90, 30)):
        write_task(tmp_path / f"t{number}", changed={"task.toml": f"[environment]\nbuild_timeout_sec = {seconds}"})
    write_task(tmp_path / "t3", {**STEPS_FILES})
    first, second = builds_of(read_tasks(tmp_path))
    assert (first.tasks, first.timeout) == (("t0", "t1", "t2"), 90.0)
    assert (second.tasks, second.context) == (("t3",), tmp_path / "t3/steps/check it/tests")


@pytest.mark.parametrize("prefix", ["tasks", "localhost:5000/tasks", "registry.example/a/b-c_d.e"])
def test_a_prefix_is_the_name_of_an_image(prefix: str) -> None:
    assert checked_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["", "Tasks", "a:b", "a@sha256:1", "a//b", "/a", "a/", "http://a/b", "a b", "oci:x"])
def test_a_prefix_with_a_tag_or_without_a_name_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="is no name of an image without a tag"):
        checked_prefix(prefix)


def test_a_row_is_json(folder: Path) -> None:
    for row in rows_of(folder, {"source": {"uri": "tasks"}}):
        assert json.loads(row.content)["metadata"]["harbor"]["task"] == row.idx
