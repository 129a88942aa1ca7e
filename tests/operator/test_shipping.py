"""The files beside a manifest as a ConfigMap, and the job that names it."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.types import CONFIG_MAP_KEY_PATTERN
from kuberoll_operator.cache import Cache
from kuberoll_operator.commands.apply import apply
from kuberoll_operator.commands.render import children_of, to_yaml
from kuberoll_operator.console.shipping import applied_object, file_items, files_config_map, owned_by, with_files
from kuberoll_operator.kube.resources import CHILDREN
from kuberoll_operator.model import Key, Object
from tests.operator.support import NAMESPACE, SETTINGS, UID, job, manifest
from tests.schemas import validate

# Other paths are refused before (kuberoll_api.manifest.beside).
NAMES = st.builds("".join, st.tuples(st.sampled_from(["a", "é", " ", ".b", "_"]), st.text("aB0-_. é", max_size=3)))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(PATHS, st.binary(max_size=8) | st.text(max_size=4).map(str.encode), min_size=1, max_size=6)


@given(FILES)
def test_every_file_is_in_the_config_map_under_a_key_of_its_own(files: dict[str, bytes]) -> None:
    made = files_config_map("puzzle", NAMESPACE, files)
    items = file_items(files)
    contents: dict[str, bytes] = {key: base64.b64decode(text) for key, text in made.get("binaryData", {}).items()}
    contents |= {key: text.encode() for key, text in made.get("data", {}).items()}
    assert {item.path: contents[item.key] for item in items} == files
    assert len(contents) == len(files)
    for key in contents:
        assert re.fullmatch(CONFIG_MAP_KEY_PATTERN, key)
        assert key not in {".", ".."}
        assert not key.startswith("..")


@given(FILES, FILES)
def test_the_name_is_that_of_the_content(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    names = [files_config_map("puzzle", NAMESPACE, files)["metadata"]["name"] for files in (one, other)]
    assert (names[0] == names[1]) == (one == other)
    assert re.fullmatch("puzzle-files-[0-9a-f]{10}", names[0])


def test_long_and_equal_keys() -> None:
    long = "d/" * 150 + "x.py"
    items = file_items(dict.fromkeys(["a/b.py", "a.b.py", long], b""))
    assert [item.key for item in items[:2]] == ["a.b.py", "2-a.b.py"]
    assert all(len(item.key) <= 253 for item in items)


def test_it_cannot_be_changed_and_goes_with_its_job() -> None:
    made = owned_by(files_config_map("puzzle", NAMESPACE, {"a.py": b"x"}), {"metadata": {"name": "puzzle", "uid": UID}})
    assert made["immutable"] is True
    [owner] = made["metadata"]["ownerReferences"]
    # It is not the operator's to manage: the job is its owner, and no controller.
    assert owner == {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "name": "puzzle", "uid": UID}
    validate(made)


def test_the_job_that_is_applied_says_what_its_manifest_says_and_names_its_files() -> None:
    files = {"games/guess.py": b"x", "rows.jsonl": b"{}"}
    given = manifest()
    found = applied_object(with_files(RolloutJob.model_validate(given), files), NAMESPACE)
    name = files_config_map("puzzle", NAMESPACE, files)["metadata"]["name"]
    items = [{"key": "games.guess.py", "path": "games/guess.py"}, {"key": "rows.jsonl", "path": "rows.jsonl"}]
    named = {"files": {"configMap": {"name": name, "items": items}}}
    workers = {**given["spec"]["workers"], **named}
    assert found == {**given, "spec": {**given["spec"], "workers": workers}}


def test_the_pods_mount_what_was_shipped() -> None:
    files = {"games/guess.py": b"x"}
    shipped = with_files(job(), files)
    for _, child in children_of(shipped, NAMESPACE, SETTINGS):
        if child["kind"] == "Job":
            pod = child["spec"]["template"]["spec"]
            [volume] = [item for item in pod["volumes"] if item["name"] == "files"]
            assert volume["configMap"] == {
                "name": files_config_map("puzzle", NAMESPACE, files)["metadata"]["name"],
                "items": [{"key": "games.guess.py", "path": "games/guess.py"}],
            }


def test_programs_stay_executable() -> None:
    shipped = with_files(job(), {"run.sh": b"x", "rows.jsonl": b"{}"}, ["run.sh"])
    for _, child in children_of(shipped, NAMESPACE, SETTINGS):
        if child["kind"] == "Job":
            [volume] = [item for item in child["spec"]["template"]["spec"]["volumes"] if item["name"] == "files"]
            assert volume["configMap"]["items"] == [
                {"key": "rows.jsonl", "path": "rows.jsonl"},
                {"key": "run.sh", "path": "run.sh", "mode": 0o755},
            ]
            validate(child)


# What UTF-8 can write; the API server takes nothing else.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(" \t\r\n#:-|'\"x", max_size=40)


@given(TEXTS)
@example("\x85")
@example("a\r\nb\n")
def test_printed_files_are_read_back_unchanged(text: str) -> None:
    made = files_config_map("puzzle", NAMESPACE, {"a.txt": text.encode()})
    assert YAML(typ="safe").load(io.StringIO(to_yaml(made))) == made


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(apply, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def write(directory: Path, *items: Any) -> Path:
    file = directory / "job.yaml"
    with file.open("w") as out:
        YAML().dump_all(items, out)
    return file


def guessing(directory: Path) -> Object:
    (directory / "guessing.py").write_text("import words\n")
    (directory / "words.py").write_text("WORDS = []\n")
    return manifest(environments=[{"name": "guess", "entrypoint": "guessing:Guess"}])


def test_all_objects_of_a_file_are_printed_in_their_order(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "rows"}}
    code, output, _ = run(write(tmp_path, guessing(tmp_path), claim), "--print", "-n", "mine")
    assert code == 0
    found = list(YAML(typ="safe").load_all(output))
    assert [item["kind"] for item in found] == ["PersistentVolumeClaim", "ConfigMap", "RolloutJob"]
    assert [item["metadata"].get("namespace") for item in found] == [None, "mine", "mine"]
    assert set(found[1]["data"]) == {"guessing.py", "words.py"}
    assert found[2]["spec"]["workers"]["files"]["configMap"]["name"] == found[1]["metadata"]["name"]


def test_what_was_printed_is_applied_as_it_is(tmp_path: Path) -> None:
    """An applied manifest, as a GitOps repository keeps it, needs nothing beside it."""
    _, output, _ = run(write(tmp_path, guessing(tmp_path)), "--print")
    (tmp_path / "guessing.py").unlink()
    kept = tmp_path / "kept.yaml"
    kept.write_text(output)
    code, again, error = run(kept, "--print")
    assert code == 0, error
    assert list(YAML(typ="safe").load_all(again)) == list(YAML(typ="safe").load_all(output))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"output": {"uri": "runs/x"}}, "spec.output.uri"),
        (
            {"dataset": {"source": {"uri": "none.jsonl", "generator": None}}},
            "spec.dataset.source.uri: there is",
        ),
        ({"workers": {"replica": 1}}, "spec.workers.replica"),
    ],
)
def test_what_no_cluster_can_run_is_refused_without_one(
    spec: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, output, error = run(write(tmp_path, manifest(**spec)))
    assert (code, output) == (2, "")
    assert words in error


def test_a_claim_beside_a_job_is_looked_at_before_both_are_applied(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
    job = manifest(output={"uri": "pvc://runs/a"}, workers={"replicas": 2})
    file = write(tmp_path, {**claim, "spec": {"accessModes": ["ReadWriteOncePod"]}}, job)
    code, output, error = run(file, "--print")
    assert (code, output) == (2, "")
    assert "the claim runs is of access mode ReadWriteOncePod, which takes one pod at a time" in error


def test_jobs_of_different_namespaces_need_one_to_go_to(tmp_path: Path) -> None:
    other = manifest("other")
    other["metadata"]["namespace"] = "elsewhere"
    file = write(tmp_path, manifest(), other)
    assert run(file, "--print")[0] == 2
    assert run(file, "--print", "-n", "mine")[0] == 0


@pytest.mark.parametrize("namespace", [None, "rollouts"])
def test_without_a_cluster_it_says_where_it_looked(
    namespace: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    job = manifest()
    job["metadata"].pop("namespace", None)
    code, _, error = run(write(tmp_path, job), *(() if namespace is None else ("-n", namespace)))
    assert code == 2
    assert "(looked at KUBECONFIG, the pod's service account, ~/.kube/config)" in error
    assert ("set one with -n" in error) is (namespace is None)


def test_the_operator_keeps_no_content_of_shipped_files() -> None:
    """It watches all ConfigMaps of jobs, and a thousand jobs may ship a MiB each."""
    cache, config_maps = Cache(lambda _: None), CHILDREN[0]
    made = files_config_map("puzzle", NAMESPACE, {"words.txt": b"w" * 10_000, "model.bin": b"\xff" * 10_000})
    metadata = {**made["metadata"], "uid": UID, "resourceVersion": "1"}
    cache.add_page(config_maps, None, [{**made, "metadata": metadata}], "1", last=True)
    [kept] = cache.children(Key(NAMESPACE, "puzzle")).values()
    assert len(str(kept)) < 2000
