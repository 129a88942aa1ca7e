"""The files beside a manifest that server pods of an environment mount."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.manifest.beside import files_beside
from kuberoll_operator import render
from kuberoll_operator.console.shipping import with_files
from kuberoll_operator.model import Object
from kuberoll_operator.render.server_files import matches, server_files
from tests.operator.support import job
from tests.operator.test_render import context

FILES = {
    "guessing.py": "import words.lists\n",
    "words/__init__.py": "",
    "words/lists.py": "",
    "words/common.txt": "a\n",
    "words/rows.jsonl": "{}\n",
    "rows/one.jsonl": "{}\n",
    "rows/two.jsonl": "{}\n",
    "rows/more/three.jsonl": "{}\n",
    "rows.jsonl": "{}\n",
    "notes.txt": "a note\n",
}
CODE = {"guessing.py", "words/__init__.py", "words/lists.py", "words/common.txt", "words/rows.jsonl"}
INCLUDED = {"notes.txt"}


def environment(**config: Any) -> Object:
    return {"name": "guess", "entrypoint": "guessing:Guess", "isolation": "Remote", "config": config}


def located(uri: str) -> Object:
    """A dataset, in place of the generator's."""
    return {"source": {"uri": uri, "generator": None}}


def shipped(directory: Path, dataset: Object, **config: Any) -> Any:
    """A job as `kuberoll apply` ships it, and the paths of what it has shipped."""
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    made = job(environments=[environment(**config)], dataset=dataset)
    found = files_beside(made, directory, include=["notes.txt"])
    assert not found.problems
    return with_files(made, {name: path.read_bytes() for name, path in found.files.items()}), set(found.files)


def mounted(made: Any) -> set[str]:
    found = server_files(made, made.spec.environments[0])
    return set() if found is None else {item.path for item in found.items}


@pytest.mark.parametrize(
    ("uri", "rows"),
    [
        ("rows.jsonl", {"rows.jsonl"}),
        ("./rows.jsonl", {"rows.jsonl"}),
        ("rows", {"rows/one.jsonl", "rows/two.jsonl"}),
        ("rows/", {"rows/one.jsonl", "rows/two.jsonl"}),
        ("rows/t*.jsonl", {"rows/two.jsonl"}),
        ("rows/**/*.jsonl", {"rows/one.jsonl", "rows/two.jsonl", "rows/more/three.jsonl"}),
        ("*.jsonl", {"rows.jsonl"}),
        # Code and the data of packages are an environment's, wherever a dataset is.
        ("words", set()),
        ("**/*.*", {"rows.jsonl", "rows/one.jsonl", "rows/two.jsonl", "rows/more/three.jsonl", "notes.txt"}),
    ],
)
def test_servers_get_what_is_shipped_without_the_rows(tmp_path: Path, uri: str, rows: set[str]) -> None:
    made, files = shipped(tmp_path, located(uri))
    assert files == CODE | INCLUDED | rows
    assert mounted(made) == files - rows


def test_rows_of_all_sources_are_left_out(tmp_path: Path) -> None:
    sources = [{"name": name, "source": {"uri": uri}} for name, uri in (("a", "rows.jsonl"), ("b", "rows/one.jsonl"))]
    made, files = shipped(tmp_path, {"source": None, "sources": sources})
    assert mounted(made) == files - {"rows.jsonl", "rows/one.jsonl"} == CODE | INCLUDED


@pytest.mark.parametrize("name", ["rows/one.jsonl", "./rows/one.jsonl", "/opt/kuberoll-files/rows/one.jsonl", "rows/"])
def test_what_the_config_names_is_mounted(tmp_path: Path, name: str) -> None:
    made, files = shipped(tmp_path, located("rows"), shots=[{"from": name}])
    left = {"rows/two.jsonl"} if name != "rows/" else set()
    assert mounted(made) == files - left


def test_the_pods_mount_these_and_workers_all(tmp_path: Path) -> None:
    made, files = shipped(tmp_path, located("rows.jsonl"))
    found = context(
        environments=[environment()],
        dataset=located("rows.jsonl"),
        workers={"files": made.spec.workers.files.model_dump(mode="json", by_alias=True)},
    )
    [server] = render.build_environment_deployments(found)
    worker = render.build_workers_job(found, suspend=False)
    paths = []
    for child in (server, worker):
        volumes = {item["name"]: item for item in child["spec"]["template"]["spec"]["volumes"]}
        paths.append({item["path"] for item in volumes["files"]["configMap"]["items"]})
    assert paths == [files - {"rows.jsonl"}, files]


@pytest.mark.parametrize("items", [[], [{"key": "rows.jsonl", "path": "rows.jsonl"}]])
def test_a_pod_without_files_has_no_volume_and_keys_that_are_unknown_are_all_mounted(items: list[Object]) -> None:
    found = context(
        environments=[{"name": "puzzle", "type": "sliding_puzzle", "isolation": "Remote"}],
        dataset=located("rows.jsonl"),
        workers={"files": {"configMap": {"name": "made-by-hand", "items": items}}},
    )
    [server] = render.build_environment_deployments(found)
    volumes = {item["name"]: item for item in server["spec"]["template"]["spec"]["volumes"]}
    [config] = [item for item in render.build_environment_fixtures(found) if item["kind"] == "ConfigMap"]
    if items:
        assert "files" not in volumes
        assert "modules" not in config["data"]["environment.json"]
    else:
        assert volumes["files"] == {"name": "files", "configMap": {"name": "made-by-hand"}}


PARTS = st.lists(st.sampled_from(["a", "b", "*", "**", "?", "[ab]", "a.txt"]), min_size=1, max_size=4)
PATHS = st.lists(st.sampled_from(["a", "b", "a.txt"]), min_size=1, max_size=4)


@given(PARTS, PATHS)
def test_patterns_are_those_of_path_glob(words: list[str], parts: list[str]) -> None:
    # Before Python 3.13 the last `**` finds directories only, none of which is a row.
    words = [*words, "*"] if words[-1] == "**" else words
    with tempfile.TemporaryDirectory() as root:
        file = Path(root).joinpath(*parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        assert matches(words, parts) == (file in Path(root).glob("/".join(words)))
