"""A run's directory is never mixed up with another's, and nothing in it is lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_workers.collection.journal import write_atomically
from kuberoll_workers.collection.run_directory import RunDirectory, RunRefused, new_manifest
from kuberoll_workers.collection.storage import DirectoryStorage

DOCUMENT: dict[str, Any] = {
    "apiVersion": "kuberoll.io/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "job"},
    "spec": {
        "generation": {"model": {"source": "models/tiny"}},
        "environments": [{"name": "a", "type": "math"}],
        "dataset": {"source": {"rows": [{"prompt": "x"}]}},
    },
}


def manifest(path: str | None = None, value: Any = None, *, shards: int = 1, digest: str = "d") -> Any:
    document = copy.deepcopy(DOCUMENT)
    if path is not None:
        *parents, last = path.split(".")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return new_manifest(RolloutJob.model_validate(document), shards=shards, inputs={"rows": 1, "digest": digest})


def opened(path: Path, given: Any, *, resume: bool = False) -> bool:
    directory = RunDirectory(DirectoryStorage(path))
    try:
        return directory.open(given, resume=resume)
    finally:
        directory.close()


def test_a_fresh_directory_gets_the_manifest(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "run"
    assert opened(output, manifest()) is False
    stored = json.loads((output / "manifest.json").read_text())
    assert stored["identity"]["generation.model.source"] == "models/tiny"
    assert set(stored["versions"]) == {"kuberoll", "ray", "transformers"}


def test_the_same_run_resumes_only_when_asked(tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    with pytest.raises(RunRefused, match="continue it with --resume"):
        opened(tmp_path, manifest())
    assert opened(tmp_path, manifest(), resume=True) is True


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rollout.concurrency", 7),
        ("rollout.scheduling", "Lockstep"),
        ("rollout.retries", {"generationAttempts": 9}),
        ("workers.replicas", 4),
        ("generation.replicas", 2),
    ],
)
def test_how_fast_it_runs_is_no_part_of_what_it_is(path: str, value: Any, tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    assert opened(tmp_path, manifest(path, value), resume=True) is True


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"path": "rollout.maxTurns", "value": 3}, "spec.rollout.maxTurns: was 20, is 3"),
        (
            {"path": "generation.sampling", "value": {"temperature": 0.5}},
            "spec.generation.sampling.temperature: was 1.0, is 0.5",
        ),
        ({"path": "generation.engineArgs", "value": {"dtype": "float16"}}, 'engineArgs.dtype: was null, is "float16"'),
        ({"shards": 2}, "shards: was 1, is 2"),
        ({"digest": "e"}, 'dataset: digest: was "d", is "e"'),
    ],
)
def test_another_run_is_refused_with_what_changed(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(RunRefused) as caught:
        opened(tmp_path, manifest(**changes), resume=True)
    assert line in str(caught.value)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_trajectories_of_unknown_origin_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_text("{}\n")
    with pytest.raises(RunRefused, match="nothing says what made them"):
        opened(tmp_path, manifest(), resume=True)
    assert (tmp_path / "shard-00000.jsonl").read_text() == "{}\n"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    first = RunDirectory(DirectoryStorage(tmp_path))
    first.open(manifest(), resume=False)
    with pytest.raises(RunRefused, match="in use by another run"):
        opened(tmp_path, manifest(), resume=True)
    first.close()
    assert opened(tmp_path, manifest(), resume=True) is True


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(RunRefused, match=r"manifest\.json: not a run's manifest"):
        opened(tmp_path, manifest(), resume=True)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunRefused, match="cannot be made"):
        opened(tmp_path / "run", manifest())


def test_write_atomically_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"new"
