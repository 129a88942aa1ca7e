"""Files of a job as a kubelet mounts them: links into a directory that it exchanges as a whole."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api.contract import PodConfig
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.environments.source_digest import source_digest
from kuberoll_workers.pods.files import add_modules, job_of
from kuberoll_workers.pods.worker import check_files
from kuberoll_workers.worker.environments import isolated_environment_factory

FILES = {
    "played_beside.py": "from pack_beside import rules\n"
    "class Played:\n"
    "    def __init__(self, config): rules.words()\n"
    "    def step(self, logs, metadata): ...\n"
    "    def global_post_process_and_metrics(self, batch): return batch, {}\n",
    "pack_beside/__init__.py": "",
    "pack_beside/rules.py": "from pathlib import Path\n"
    "def words(): return Path(__file__).with_name('words.txt').read_text()\n",
    "pack_beside/words.txt": "one\n",
    "data/a.jsonl": '{"prompt": "1"}\n',
    "data/b.jsonl": '{"prompt": "2"}\n',
}


def write(directory: Path) -> Path:
    for name, text in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The files in a volume of a ConfigMap."""
    directory = tmp_path / "mounted"
    write(directory / "..2026_11_22")
    (directory / "..data").symlink_to("..2026_11_22")
    for name in {path.partition("/")[0] for path in FILES}:
        (directory / name).symlink_to(f"..data/{name}")
    return directory


def job(uri: str) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "mounted"},
            "spec": {
                "generation": {"model": {"source": "org/model"}},
                "environments": [{"name": "played", "entrypoint": "played_beside:Played", "isolation": "Process"}],
                "dataset": {"source": {"uri": uri}},
            },
        }
    )


def config(modules: Path | None) -> PodConfig:
    place = None if modules is None else str(modules)
    return PodConfig(job={}, base="", modules=place, endpoint="", shard_count=1, output="")


@pytest.mark.parametrize(("uri", "rows"), [("data/a.jsonl", 1), ("data", 2), ("data/*.jsonl", 2)])
def test_rows_and_modules_are_found_where_they_are_mounted(
    uri: str, rows: int, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    add_modules(config(mounted))
    check_files(job(uri), mounted)
    make = isolated_environment_factory(job(uri), protected=())
    # Its process may read them: they are on the module path.
    make("played")
    assert scan(job(uri), base=mounted, environment=make).rows == rows


def test_the_digest_is_that_of_the_files_beside_the_manifest(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [spec] = job("data").spec.environments
    digests = []
    for place in (mounted, write(tmp_path / "manifest")):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            digests.append(source_digest(spec))
    assert digests[0] == digests[1] is not None


def test_a_job_without_files_changes_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ["somewhere"]
    monkeypatch.setattr(sys, "path", before)
    add_modules(config(None))
    assert before == ["somewhere"]


def test_fields_that_a_job_has_no_longer_are_left_out() -> None:
    """The operator may be of an earlier release than the images of a job."""
    now = job("data/a.jsonl").model_dump(mode="json", by_alias=True, exclude_unset=True)
    earlier: Any = copy.deepcopy(now)
    earlier["spec"]["rollout"] = {"retries": {"maxBackoffSeconds": 5}}
    earlier["spec"]["environments"][0]["spareProcesses"] = 1
    earlier["spec"]["dataset"]["seedPerRepeat"] = True
    assert (
        job_of(dataclasses.replace(config(None), job=earlier)).spec
        == job_of(dataclasses.replace(config(None), job=now)).spec
    )
    earlier["spec"]["rollout"] = {"maxBackoff": 5}
    with pytest.raises(ValidationError, match="maxBackoff"):
        job_of(dataclasses.replace(config(None), job=earlier))
