"""`--set path=value`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.manifest.documents import parse_documents
from kuberoll_api.manifest.loading import ManifestError, load_job
from kuberoll_api.manifest.overrides import OverrideError, apply_overrides, parse_override
from kuberoll_api.paths import Path, format_path, parse_path
from tests.api.support import VALID, edited, mistakes_of, only_mistake


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("spec.rollout.maxTurns=3", ("spec", "rollout", "maxTurns"), 3),
        ("spec.environments[0].config.size=3", ("spec", "environments", 0, "config", "size"), 3),
        ("a[0][12]=x", ("a", 0, 12), "x"),
        ('limits."nvidia.com/gpu"=1', ("limits", "nvidia.com/gpu"), 1),
        ("a=b=c", ("a",), "b=c"),
        ("a=", ("a",), None),
        ("a=1e-3", ("a",), 0.001),
        ("a=true", ("a",), True),
        ("a='3'", ("a",), "3"),
        ("a=[1, {b: c}]", ("a",), [1, {"b": "c"}]),
        ("a=text with spaces", ("a",), "text with spaces"),
    ],
)
def test_an_override_is_a_path_and_a_yaml_value(text: str, path: Path, value: object) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write path=value, for example --set spec.rollout.maxTurns=5"),
        ("spec.rollout", "write path=value"),
        ("=3", "write path=value"),
        ("a..b=3", "write path=value"),
        ("a.=3", "write path=value"),
        ("a[x]=3", "write path=value"),
        ("a[-1]=3", "write path=value"),
        ("a[0]b=3", "write path=value"),
        ('a."b=3', "write path=value"),
        ('a."\\x"=3', "write path=value"),
        ("a=[1", "the value is not YAML: YAML syntax"),
        ("a=b: c: d", "mapping values are not allowed here"),
        ("a=1\n---\n2", "several YAML documents"),
        ("a=2026-01-01", 'found the date "2026-01-01"; it must be text'),
        ("a={b: .nan}", 'b: found ".nan"; it must be a finite number'),
    ],
)
def test_a_malformed_override_is_named(text: str, words: str) -> None:
    with pytest.raises(OverrideError) as caught:
        parse_override(text)
    assert str(caught.value).startswith(f"--set {text}: ")
    assert words in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PATHS = st.lists(st.text(max_size=6) | st.integers(min_value=0, max_value=999_999_999), min_size=1, max_size=5)


@given(path=PATHS.map(tuple), rest=st.sampled_from(["", "=", "=.a[0]", " x"]))
def test_a_path_is_read_as_it_was_written(path: Path, rest: str) -> None:
    assert parse_path(f"{format_path(path)}{rest}") == (path, rest)


@given(path=PATHS.map(tuple), value=JSON)
def test_an_override_is_read_as_it_was_written(path: Path, value: object) -> None:
    read_path, read_value = parse_override(f"{format_path(path)}={json.dumps(value)}")
    assert read_path == path
    assert read_value == value
    assert repr(read_value) == repr(value)


@given(text=st.text(max_size=30))
def test_any_text_is_an_override_or_an_error(text: str) -> None:
    with contextlib.suppress(OverrideError):
        path, _ = parse_override(text)
        assert path


def changed(text: str, *overrides: str) -> object:
    return apply_overrides(parse_documents(text)[0], overrides).value


def test_values_are_set_and_mappings_that_are_missing_are_made() -> None:
    assert changed("{a: {b: 1, c: 2}}", "a.b=3", "a.d.e=4", "f=5") == {"a": {"b": 3, "c": 2, "d": {"e": 4}}, "f": 5}
    assert changed("a:\n", "a.b=1") == {"a": {"b": 1}}
    assert changed("a: [1, {b: 2}]", "a[1].b=3", "a[0]=4") == {"a": [4, {"b": 3}]}
    assert changed("a: 1", "a=2", "a=3") == {"a": 3}
    assert changed("a: {b: 1}", "a={c: 2}", "a.d=3") == {"a": {"c": 2, "d": 3}}


def test_an_override_changes_neither_the_document_nor_another_use_of_an_alias() -> None:
    document = parse_documents("a: &x {b: 1}\nc: *x")[0]
    assert apply_overrides(document, ["a.b=2"]).value == {"a": {"b": 2}, "c": {"b": 1}}
    assert document.value == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("spec.environments[2].type=x", "spec.environments has 2 items; the first is [0]"),
        ("spec.generation.sampling.stop[1]=x", "spec.generation.sampling.stop has 1 item; the first is [0]"),
        ("spec.rollout[0]=x", "spec.rollout is not a list"),
        ("spec.environments.type=x", "spec.environments is not a mapping, so it has no field type; choose an item"),
        ("spec.rollout.maxTurns.x=3", "spec.rollout.maxTurns is not a mapping, so it has no field x"),
        ("[0]=3", "the manifest is not a list"),
    ],
)
def test_an_override_that_leads_nowhere_is_named(override: str, words: str) -> None:
    mistake = only_mistake(VALID, [override])
    assert str(mistake).startswith(f"--set {override}: {words}")


def test_the_model_sees_the_overridden_value(tmp_path: FilePath) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(VALID)
    job = load_job(file, ["spec.rollout.maxTurns=3", "spec.environments[0].config.size=3", "spec.dataset.limit=1"])
    assert job.spec.rollout.max_turns == 3
    assert job.spec.environments[0].config == {"size": 3}
    assert job.spec.dataset.limit == 1


def test_a_mistake_in_an_overridden_value_names_the_override() -> None:
    mistake = only_mistake(VALID, ["spec.rollout.maxTurns=many"])
    assert (mistake.line, mistake.field) == (None, "spec.rollout.maxTurns")
    assert str(mistake).startswith('--set spec.rollout.maxTurns=many: spec.rollout.maxTurns: found the text "many"')
    inside = only_mistake(VALID, ["spec.rollout={maxTurns: 1, maxTurn: 2}"])
    assert str(inside).startswith(
        "--set spec.rollout={maxTurns: 1, maxTurn: 2}: spec.rollout.maxTurn: this field does not exist"
    )
    slip = only_mistake(VALID, ["spec.rolout.maxTurns=3"])
    assert str(slip).startswith(
        "--set spec.rolout.maxTurns=3: spec.rolout: this field does not exist; did you mean rollout?"
    )
    lacking = only_mistake(VALID, ["spec.generation.autoscaling.minReplicas=1"])
    assert str(lacking).startswith("--set spec.generation.autoscaling.minReplicas=1: spec.generation.autoscaling.max")
    later = only_mistake(VALID, ["spec.rollout.maxTurns=0", "spec.rollout.maxTurns=-1"])
    assert later.override == "--set spec.rollout.maxTurns=-1"


def test_mistakes_of_the_file_keep_their_lines_beside_overrides() -> None:
    broken = edited("temperature: 1", "temperature: hot")
    overrides = ["spec.rollout.maxTurns=0", "oops", "spec.environments[7]=1"]
    assert [(mistake.override, mistake.line) for mistake in mistakes_of(broken, overrides)] == [
        ("--set oops", None),
        ("--set spec.environments[7]=1", None),
        ("--set spec.rollout.maxTurns=0", None),
        (None, 15),
    ]


def test_an_override_mends_the_file() -> None:
    broken = edited("maxTurns: 20", "maxTurns: .inf")
    assert only_mistake(broken).line == 33
    assert mistakes_of(broken, ["spec.rollout.maxTurns=3"]) == []
    assert mistakes_of(broken, ["spec.rollout={}"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "spec.generation.model.source=" + "x" * 5000 + "}{",
        "spec." + "a" * 5000 + "=1",
        "spec.environments[0].config=" + "{a: " * 800,
        "spec.rollout.maxTurns=" + "z" * 5000,
        "spec.rollout.maxTurns" + "z" * 5000,
        "spec.rollout.maxTurns=" + "[" * 90 + "2026-01-01" + "]" * 90,
        "spec.workers.env" + ".b" * 3000 + "=2026-01-01",
    ],
)
def test_a_mistake_is_told_in_a_few_lines_however_long_the_option_is(text: str, tmp_path: FilePath) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(VALID)
    with pytest.raises((ManifestError, OverrideError)) as caught:
        load_job(file, [text])
    assert len(str(caught.value)) < 1200
