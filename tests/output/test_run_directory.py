"""A run's directory is never mixed up with another's, and nothing in it is lost."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.output.journal import partial_name, write_atomically
from kuberoll_workers.output.run_directory import (
    RunDirectory,
    RunManifest,
    RunRefused,
    differences,
    new_manifest,
    pinned_revision,
)
from kuberoll_workers.output.storage import DirectoryStorage

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


EXTERNAL: dict[str, Any] = {"backend": "External", "model": {"source": "models/tiny"}}


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
    assert set(stored["versions"]) >= {"kuberoll", "ray", "transformers", "tokenizers", "jinja2"}


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
        (
            {
                "path": "generation",
                "value": {**EXTERNAL, "external": {"url": "http://b/v1", "api": "OpenAI", "model": "m2"}},
            },
            'spec.generation.external.model: was null, is "m2"',
        ),
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
    with pytest.raises(RunRefused, match="their origin is unknown"):
        opened(tmp_path, manifest(), resume=True)
    assert (tmp_path / "shard-00000.jsonl").read_text() == "{}\n"


def test_trajectories_whose_manifest_was_lost_are_continued_by_force(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_text("{}\n")
    directory = RunDirectory(DirectoryStorage(tmp_path))
    try:
        assert directory.open(manifest(), resume=True, force=True)
    finally:
        directory.close()
    assert json.loads((tmp_path / "manifest.json").read_text())["forced"][0].startswith("manifest.json was missing")


def test_what_shapes_tokens_may_not_change(tmp_path: Path) -> None:
    def with_sources(**sources: str) -> Any:
        return dataclasses.replace(manifest(), sources=sources)

    opened(tmp_path, with_sources())
    # An older version stored none.
    opened(tmp_path, with_sources(model="commit a", tokenizer="b"), resume=True)
    assert json.loads((tmp_path / "manifest.json").read_text())["sources"] == {"model": "commit a", "tokenizer": "b"}
    opened(tmp_path, with_sources(model="commit a"), resume=True)
    with pytest.raises(RunRefused, match=r"model: changed, so tokens may differ \(was commit a, is commit c\)"):
        opened(tmp_path, with_sources(model="commit c"), resume=True)


@pytest.mark.parametrize(
    ("name", "model", "earlier", "pinned"),
    [
        ("model", {}, {}, "a" * 40),
        ("tokenizer", {}, {}, "b" * 40),
        ("tokenizer", {"tokenizer": "me/other"}, {"tokenizer": "me/other"}, "b" * 40),
        ("model", {"revision": "v2"}, {}, "v2"),
        ("model", {"revision": "a" * 40}, {"revision": "main"}, "a" * 40),
        ("tokenizer", {"tokenizer": "me/other", "revision": "a" * 40}, {"tokenizer": "me/other"}, "b" * 40),
        ("tokenizer", {"tokenizer": "me/other", "revision": "v2"}, {}, None),
    ],
)
def test_a_run_stays_with_the_commits_that_it_began_with(
    name: str, model: dict[str, str], earlier: dict[str, str], pinned: str | None
) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["spec"]["generation"]["model"] |= earlier
    stored = new_manifest(
        RolloutJob.model_validate(document), shards=1, inputs={},
        sources={"model": f"commit {'a' * 40}", "tokenizer": f"commit {'b' * 40}"},
    )  # fmt: skip
    document["spec"]["generation"]["model"] |= model
    job = RolloutJob.model_validate(document)
    assert pinned_revision(job, stored, name) == pinned
    assert pinned_revision(job, None, "model") == document["spec"]["generation"]["model"].get("revision")


def test_the_commit_that_a_run_began_with_is_no_change_of_its_branch() -> None:
    def of(revision: str | None, **sources: str) -> RunManifest:
        document = copy.deepcopy(DOCUMENT)
        document["spec"]["generation"]["model"]["revision"] = revision
        return new_manifest(RolloutJob.model_validate(document), shards=1, inputs={}, sources=sources)

    for branch in (None, "main"):
        began = of(branch, model=f"commit {'a' * 40}")
        assert differences(began, of("a" * 40, model=f"commit {'a' * 40}")) == []
        assert differences(began, of("b" * 40))
        assert differences(of(branch), of("a" * 40))


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
    with pytest.raises(RunRefused, match="cannot be created"):
        opened(tmp_path / "run", manifest())


def test_write_atomically_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"new"


def test_another_policy_at_an_endpoint_is_another_run_and_another_address_is_not(tmp_path: Path) -> None:
    def served(url: str, model: str) -> Any:
        return manifest("generation", {**EXTERNAL, "external": {"url": url, "api": "OpenAI", "model": model}})

    opened(tmp_path, served("http://a", "m"))
    assert opened(tmp_path, served("http://b", "m"), resume=True) is True
    with pytest.raises(RunRefused, match=r'spec\.generation\.external\.model: was "m", is "m2"'):
        opened(tmp_path, served("http://a", "m2"), resume=True)


def environment_job(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(directory)
    importlib.invalidate_caches()
    return manifest("environments", [{"name": "a", "entrypoint": "own_rewards.game:Game"}])


def test_changed_code_of_an_environment_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = tmp_path / "code", tmp_path / "run"
    (code / "own_rewards").mkdir(parents=True)
    for name, source in {
        "own_rewards/__init__.py": "",
        "own_rewards/game.py": "import json\nfrom . import scoring\nfrom beside import x\nclass Game: pass\n",
        "own_rewards/scoring.py": "PAYS = 1\n",
        "beside.py": "x = 1\n",
        "unrelated.py": "y = 1\n",
    }.items():
        (code / name).write_text(source)
    opened(output, environment_job(code, monkeypatch))
    (code / "unrelated.py").write_text("y = 2\n")
    assert opened(output, environment_job(code, monkeypatch), resume=True) is True
    for name in ("own_rewards/scoring.py", "own_rewards/game.py", "own_rewards/__init__.py", "beside.py"):
        before = (code / name).read_text()
        (code / name).write_text(before + "\nPAYS = 2\n")
        with pytest.raises(RunRefused, match="code of environment 'a': changed") as caught:
            opened(output, environment_job(code, monkeypatch), resume=True)
        assert "--force" in str(caught.value)
        (code / name).write_text(before)
    (code / "beside.py").write_text("x = 2\n")
    first = json.loads((output / "manifest.json").read_text())
    first["created"] = "2020-02-02T00:00:00+00:00"
    (output / "manifest.json").write_text(json.dumps(first))
    directory = RunDirectory(DirectoryStorage(output))
    assert directory.open(environment_job(code, monkeypatch), resume=True, force=True) is True
    directory.close()
    # The run is still the one that was begun then.
    mixed = json.loads((output / "manifest.json").read_text())
    assert mixed["created"] == first["created"]
    assert first["forced"] == []
    (change,) = mixed["forced"]
    assert "code of environment 'a'" in change
    assert opened(output, environment_job(code, monkeypatch), resume=True) is True


def test_built_ins_have_digests_too() -> None:
    assert len(manifest().code["a"]) == 24
    assert manifest("environments", [{"name": "a", "type": "calculator"}]).code != manifest().code


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(RunRefused, match=r"manifest\.json: format 99: this KubeRoll knows format 1") as caught:
        opened(tmp_path, manifest(), resume=True)
    assert f"use the version that wrote it (kuberoll {manifest().versions['kuberoll']})" in str(caught.value)


def test_a_manifest_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"job"', b'"j\xff"'))
    with pytest.raises(RunRefused, match=r"manifest\.json: not a run's manifest"):
        opened(tmp_path, manifest(), resume=True)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RunRefused, match=r"\.lock: cannot be opened: Is a directory"):
        opened(tmp_path, manifest())


def test_what_a_killed_write_left_goes_with_the_next_run(tmp_path: Path) -> None:
    opened(tmp_path, manifest())
    left = partial_name(tmp_path / "report.html")
    left.write_text("half")
    (tmp_path / ".own.partial").write_text("somebody's")
    opened(tmp_path, manifest(), resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".own.partial", "manifest.json"]


def test_a_new_name_is_made_durable_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real_fsync, real_rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".json")[0]))
        real_fsync(descriptor)

    def rename(old: Path, new: Path) -> Path:
        calls.append(("rename", new.name))
        return real_rename(old, new)

    (tmp_path / "source").write_bytes(b"data")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    write_atomically(tmp_path / "a.json", b"data")
    durably = [("fsync", ".a"), ("rename", "a.json"), ("fsync", tmp_path.name)]
    assert calls == durably
    calls.clear()
    DirectoryStorage(tmp_path).upload("a.json", tmp_path / "source")
    assert calls == durably


def test_long_values_are_cut_in_what_is_told() -> None:
    (line,) = differences(
        manifest("generation.model.source", "x" * 500), manifest("generation.model.source", "y" * 500)
    )
    _, _, rest = line.partition(": was ")
    was, _, now = rest.partition(", is ")
    assert was == '"' + "x" * 96 + "..."
    assert now == '"' + "y" * 96 + "..."
    assert differences(manifest(), manifest(shards=2)) == ["shards: was 1, is 2"]


@pytest.mark.parametrize("off", [False, "", [], {}])
def test_runs_of_an_older_version_are_resumed_where_its_missing_fields_are_off(off: Any) -> None:
    older = manifest()
    newer, set_otherwise, zero = (
        dataclasses.replace(older, identity={**older.identity, "dataset.newField": value}) for value in (off, 1, 0)
    )
    assert differences(older, newer) == []
    assert differences(older, zero) == ["spec.dataset.newField: was null, is 0"]
    assert len(differences(set_otherwise, newer)) == 1


@pytest.mark.parametrize(("epochs", "changed"), [(1, []), (2, ["spec.dataset.epochs: was null, is 2"])])
def test_a_run_from_before_there_were_passes_had_one(epochs: int, changed: list[str]) -> None:
    older, newer = manifest(), manifest()
    del older.identity["dataset.epochs"]
    newer.identity["dataset.epochs"] = epochs
    assert differences(older, newer) == changed


@pytest.mark.parametrize(
    ("seeded", "changed"), [(True, []), (False, ["spec.dataset.seedPerRepeat: was false, is null"])]
)
def test_a_run_with_a_field_that_was_removed_is_resumed_where_it_had_the_value_of_now(
    seeded: bool, changed: list[str]
) -> None:
    older = manifest()
    older.identity["dataset.seedPerRepeat"] = seeded
    assert differences(older, manifest()) == changed


def test_a_run_that_was_stored_before_a_field_existed_is_resumed() -> None:
    older = manifest()
    known = {key: value for key, value in older.identity.items() if key not in ("dataset.columns", "dataset.sources")}
    assert len(known) == len(older.identity) - 2
    assert differences(dataclasses.replace(older, identity=known), older) == []


SIMULATED = {"model": {"source": "models/tiny"}, "engine": "Simulated"}
SPELLINGS: list[tuple[str, Any, str, Any]] = [
    *(
        (f"generation.sampling.{name}", value, "generation.sampling", {})
        for name, value in {
            "minP": 0, "minTokens": 0, "presencePenalty": 0, "frequencyPenalty": 0, "repetitionPenalty": 1, "topK": 0,
            "temperature": 1, "stop": [], "greedy": False, "override": False,
        }.items()
    ),
    ("generation.sampling", {"greedy": True, "temperature": 0.3, "topP": 0.5}, "generation.sampling.temperature", 0),
    ("generation.sampling", {"temperature": 0, "topK": 5, "minP": 0.2}, "generation.sampling", {"greedy": True}),
    (
        "generation", {**SIMULATED, "simulated": {}}, "generation", SIMULATED,
    ),
    (
        "generation", {**SIMULATED, "simulated": {"responses": [], "sigma": 0}}, "generation", SIMULATED,
    ),
    ("generation.model.tokenizer", "models/tiny", "generation.model.revision", None),
    ("environments", [{"name": "a", "type": "math", "repeats": 1}], "dataset.repeats", 1),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "other", "same"), SPELLINGS)
def test_settings_are_compared_and_not_how_they_are_written(path: str, value: Any, other: str, same: Any) -> None:
    one, two = manifest(path, value), manifest(other, same)
    assert differences(one, two) == differences(two, one) == []


@pytest.mark.parametrize("name", ["minP", "minTokens", "presencePenalty", "frequencyPenalty", "repetitionPenalty"])
def test_what_an_older_version_stored_as_null_was_the_default(name: str) -> None:
    key = f"generation.sampling.{name}"
    older, other = manifest(), manifest(key, 0.5 if name != "minTokens" else 3)
    older.identity[key] = None
    assert differences(older, manifest()) == []
    default = 1.0 if name == "repetitionPenalty" else 0 if name == "minTokens" else 0.0
    assert differences(older, other) == [f"spec.{key}: was {json.dumps(default)}, is {json.dumps(other.identity[key])}"]
