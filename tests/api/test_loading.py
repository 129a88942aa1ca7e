"""Each kind of mistake: its line, its field, and words that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.manifest.documents import parse_documents
from kuberoll_api.manifest.loading import MOST_SHOWN, ManifestError, Mistake, load_job, load_jobs
from kuberoll_api.model.rolloutjob import RolloutJob
from tests.api.support import VALID, edited, line_of_here, mistakes_of, only_mistake

# A part of the valid manifest, what stands there instead (the mistake's line is marked), the mistake's field, words.
MISTAKES = {
    "unknown field": (
        "    maxTurns: 20",
        "    maxTurn: 20 # here",
        "spec.rollout.maxTurn",
        ["this field does not exist", "did you mean maxTurns?", "Allowed: scheduling, maxTurns"],
    ),
    "snake_case": (
        "    maxTurns: 20",
        "    max_turns: 20 # here",
        "spec.rollout.max_turns",
        ["did you mean maxTurns?"],
    ),
    "field at the wrong depth": (
        "    maxTurns: 20",
        "    stepTimeoutSeconds: 20 # here",
        "spec.rollout.stepTimeoutSeconds",
        ["did you mean spec.environments[].stepTimeoutSeconds?"],
    ),
    "field like no other": (
        "    maxTurns: 20",
        "    zzz: 20 # here",
        "spec.rollout.zzz",
        ["this field does not exist; remove it. Allowed: "],
    ),
    "many fields are not listed": (
        "    engine: VLLM",
        "    zzz: 20 # here",
        "spec.generation.zzz",
        ["this field does not exist; remove it."],
    ),
    "number in quotes": (
        "maxTurns: 20",
        'maxTurns: "20" # here',
        "spec.rollout.maxTurns",
        ['found the text "20"', "must be a whole number from 1 to 1000000", "remove the quotes"],
    ),
    "text for a number": (
        "temperature: 1",
        "temperature: hot # here",
        "spec.generation.sampling.temperature",
        ['found the text "hot"; it must be a number from 0 to 2'],
    ),
    "float for a whole number": (
        "maxTurns: 20",
        "maxTurns: 20.0 # here",
        "spec.rollout.maxTurns",
        ["found the number 20.0", "a whole number", "write 20"],
    ),
    "boolean for a number": ("topP: 0.9", "topP: true # here", "spec.generation.sampling.topP", ["found true"]),
    "number for text": (
        "source: org/model",
        "source: 7 # here",
        "spec.generation.model.source",
        ["found the number 7", "text of 1 to 1024 characters", "put it in quotes"],
    ),
    "text for a boolean": (
        "spec:",
        "spec:\n  suspend: yes # here",
        "spec.suspend",
        ['found the text "yes"; it must be true or false'],
    ),
    "below a bound": ("maxTurns: 20", "maxTurns: 0 # here", "spec.rollout.maxTurns", ["found the number 0", "from 1"]),
    "at an open bound": (
        "topP: 0.9",
        "topP: 0 # here",
        "spec.generation.sampling.topP",
        ["found the number 0; it must be a number above 0 and of at most 1"],
    ),
    "a number of many digits": (
        "maxTurns: 20",
        f"maxTurns: {'9' * 100} # here",
        "spec.rollout.maxTurns",
        ["found a number of more than 60 digits"],
    ),
    "a number of very many digits": (
        "maxTurns: 20",
        f"maxTurns: {'9' * 5000} # here",
        "spec.rollout.maxTurns",
        ["cannot be read as a whole number"],
    ),
    "choice in other letters": (
        "engine: VLLM",
        "engine: vllm # here",
        "spec.generation.engine",
        ['found the text "vllm"; it must be VLLM or Simulated; did you mean VLLM?'],
    ),
    "other version": (
        "apiVersion: kuberoll.io/v1alpha1",
        "apiVersion: kuberoll.io/v1 # here",
        "apiVersion",
        ['found the text "kuberoll.io/v1"; it must be kuberoll.io/v1alpha1'],
    ),
    "other group": (
        "apiVersion: kuberoll.io/v1alpha1",
        "apiVersion: batch/v1 # here",
        "apiVersion",
        ["must be kuberoll.io/v1alpha1"],
    ),
    "other kind": (
        "kind: RolloutJob",
        "kind: Rollout # here",
        "kind",
        ['found the text "Rollout"; it must be RolloutJob'],
    ),
    "missing field": (
        "model:\n      source: org/model",
        "model: # here\n      revision: main",
        "spec.generation.model.source",
        ["is missing; it must be text of 1 to 1024 characters. Hub id, local directory"],
    ),
    "missing field of a list's item": (
        "    - name: mine\n      entrypoint",
        "    - entrypoint: a:b # here\n      xentrypoint",
        "spec.environments[1].name",
        ["is missing; it must be text of 1 to 63 characters, only letters, digits"],
    ),
    "text for a list": (
        'stop: ["</answer>"]',
        "stop: </answer> # here",
        "spec.generation.sampling.stop",
        ['found the text "</answer>"', "a list of at most 64 items", 'write ["</answer>"]'],
    ),
    "wrong item of a list": (
        'stop: ["</answer>"]',
        'stop:\n        - "ok"\n        - "" # here',
        "spec.generation.sampling.stop[1]",
        ['found the text ""; it must be text of 1 to 256 characters'],
    ),
    "nothing for a mapping": (
        "model:\n      source: org/model",
        "model: # here",
        "spec.generation.model",
        ["found nothing; it must be a mapping"],
    ),
    "a list for a mapping": (
        "  rollout:\n    maxTurns: 20",
        "  rollout: # here\n    - maxTurns: 20",
        "spec.rollout",
        ["found a list of 1; it must be a mapping"],
    ),
    "fits neither of two types": (
        "limits: {nvidia.com/gpu: 1}",
        "limits:\n        nvidia.com/gpu: 1.5 # here",
        'spec.generation.resources.limits."nvidia.com/gpu"',
        [
            "found the number 1.5; it must be text of 1 to 64 characters, a quantity",
            "or a whole number from 0",
            "put it in quotes",
        ],
    ),
    "a pattern in words": (
        "name: puzzles",
        "name: My_Puzzles # here",
        "metadata.name",
        ["only lowercase letters, digits and dashes"],
    ),
    "both of two fields": (
        "    - name: mine\n",
        "    - name: mine # here\n      type: math\n",
        "spec.environments[1]",
        ["set one of type (a built-in), entrypoint (package.module:Class) and agent; found type and entrypoint"],
    ),
    "two sources": (
        "    source:\n",
        "    source: # here\n      uri: rows.jsonl\n",
        "spec.dataset.source",
        ["set one of uri, huggingface, rows, generator, configMap, pvc; found uri and generator"],
    ),
    "the same name twice": (
        "    - name: mine",
        "    - name: sliding_puzzle # here",
        "spec.environments[1].name",
        ['found "sliding_puzzle", the name of environments[0] too'],
    ),
    "a name of nothing": (
        "environments: [mine]",
        "environments:\n          - mine\n          - yours # here",
        "spec.dataset.source.generator.environments[1]",
        ['found "yours"; it must be the name of an environment: sliding_puzzle, mine'],
    ),
    "fields that exclude each other": (
        "    engine: VLLM",
        "    autoscaling: {maxReplicas: 2}\n    replicas: 2 # here",
        "spec.generation.replicas",
        ["excludes autoscaling"],
    ),
    "bounds in the wrong order": (
        "    engine: VLLM",
        "    autoscaling:\n      maxReplicas: 2\n      minReplicas: 3 # here",
        "spec.generation.autoscaling.minReplicas",
        ["found 3, which is more than maxReplicas (2)"],
    ),
    "a backend without its endpoint": (
        "    engine: VLLM",
        "    backend: External # here",
        "spec.generation.backend",
        ["needs external.url"],
    ),
    "an endpoint without its backend": (
        "    engine: VLLM",
        "    external: {url: http://x} # here",
        "spec.generation.external",
        ["is only for backend External"],
    ),
    "settings of another engine": (
        "    engine: VLLM",
        "    simulated: {} # here",
        "spec.generation.simulated",
        ["is only for engine Simulated"],
    ),
    "duplicate key": (
        "    maxTurns: 20",
        "    maxTurns: 20\n    concurrency: 3\n    maxTurns: 21 # here",
        "spec.rollout.maxTurns",
        ["occurs twice (first in line 33); keep one of them"],
    ),
    "date": (
        "max_model_len: 1024",
        "revision: 2026-11-21 # here",
        "spec.generation.engineArgs.revision",
        ['found the date "2026-11-21"; it must be text: put it in quotes'],
    ),
    "infinity": (
        "max_model_len: 1024",
        "x: .inf # here",
        "spec.generation.engineArgs.x",
        ['found ".inf"; it must be a finite number'],
    ),
    "more than a float can hold": ("topP: 0.9", "topP: 1e999 # here", "spec.generation.sampling.topP", ["finite"]),
    "not a number": ("topP: 0.9", "topP: .nan # here", "spec.generation.sampling.topP", ["must be a finite number"]),
    "tag": (
        "max_model_len: 1024",
        "x: !Secret abc # here",
        "spec.generation.engineArgs.x",
        ["found a value of type !Secret; a manifest has only mappings, lists, text, numbers"],
    ),
    "set": (
        "max_model_len: 1024",
        "x: !!set {a, b} # here",
        "spec.generation.engineArgs.x",
        ["found a value of type !!set"],
    ),
    "binary": ("max_model_len: 1024", "x: !!binary aGk= # here", "spec.generation.engineArgs.x", ["type !!binary"]),
    "tag that does not fit": (
        "max_model_len: 1024",
        "x: !!bool maybe # here",
        "spec.generation.engineArgs.x",
        ['found "maybe", which cannot be read as true or false'],
    ),
    "key that is a number": (
        "max_model_len: 1024",
        "4: x # here",
        "spec.generation.engineArgs",
        ["found the key 4; a key must be text: put it in quotes"],
    ),
    "key that is a list": (
        "max_model_len: 1024",
        "? [a, b] # here\n      : x",
        "spec.generation.engineArgs",
        ["found a key of several values"],
    ),
    "alias of itself": (
        "engineArgs:\n      max_model_len: 1024",
        "engineArgs: &loop\n      again: *loop",
        "spec.generation.engineArgs.again",
        ["the alias refers to itself"],
    ),
    "half a character": (
        "max_model_len: 1024",
        'x: "\\ud83d" # here',
        "spec.generation.engineArgs.x",
        ["found half a character"],
    ),
}


@pytest.mark.parametrize(("old", "new", "field", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_its_line_field_and_what_is_allowed(
    old: str, new: str, field: str, words: list[str]
) -> None:
    text = edited(old, new)
    by_field = {mistake.field: mistake for mistake in mistakes_of(text)}
    assert field in by_field, by_field
    if "# here" in text:
        assert by_field[field].line == line_of_here(text)
    for part in words:
        assert part in by_field[field].message
    assert len(str(by_field[field]).splitlines()) == 1


# A whole file, the line, words.
UNREADABLE: dict[str, tuple[str | bytes, int | None, list[str]]] = {
    "empty": ("", None, ["the file is empty", "a RolloutJob begins with apiVersion: kuberoll.io/v1alpha1"]),
    "comments only": ("# nothing\n---\n# here\n", None, ["the file is empty"]),
    "not UTF-8": (VALID.replace("org/model", "größe").encode("latin-1"), 11, ["not UTF-8 text"]),
    "control character": ("a: 1\nb: \x01", 2, ["the character 0x1 is not allowed in YAML"]),
    "tab": ("a:\n\tb: 1\n", 2, ["indent with spaces, not with tabs", "\n     b: 1\n    ^"]),
    "colon": ("a: 1\nb: c: d\n", 2, ["mapping values are not allowed here", "in quotes", "\n    b: c: d\n        ^"]),
    "character": ("a: @x\n", 1, ["put text that begins with this character in quotes"]),
    "unclosed": ("a: 1\nb: [1,\nc: 2\n", 2, ["YAML syntax: expected ',' or ']'", "\n    b: [1,\n       ^"]),
    "unfinished": ("a: 1\nb: {c: 1\nd: 2 }\n", 3, ["YAML syntax: ", "begun in line 2"]),
    "unknown alias": ("a: 1\nb: *c\n", 2, ["undefined alias 'c'"]),
    "far right": ("{" + '"a": 1, ' * 100 + "]", 1, ['"a": 1, ]\n']),
    "deep": ("[" * 1000, None, ["nested too deeply"]),
}


@pytest.mark.parametrize(("text", "line", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_is_no_manifest_is_told_with_its_line(
    text: str | bytes, line: int | None, words: list[str]
) -> None:
    mistake = only_mistake(text)
    assert (mistake.line, mistake.field) == (line, "")
    for part in words:
        assert part in mistake.message
    assert len(str(mistake).splitlines()) <= 3


@pytest.mark.parametrize(("text", "found"), [("- a\n", "a list of 1"), ("text\n", 'the text "text"'), ("3", "3")])
def test_the_top_level_must_be_a_mapping(text: str, found: str) -> None:
    mistake = only_mistake(text)
    assert (mistake.line, mistake.field) == (1, "")
    assert found in mistake.message
    assert "must be a mapping" in mistake.message


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: the file does not exist"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ManifestError, match="this is a directory; name the manifest inside it"):
        load_job(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ManifestError, match="cannot be read: Not a directory"):
        load_job(tmp_path / "file" / "job.yaml")


def test_all_mistakes_are_told_in_the_order_of_their_lines() -> None:
    text = (
        VALID.replace("maxTurns: 20", "maxTurns: 0")
        .replace("name: puzzles", "name: 3")
        .replace("max_model_len: 1024", "x: .nan")
        .replace("type: sliding_puzzle", "tipe: sliding_puzzle")
    )
    assert [(mistake.line, mistake.field) for mistake in mistakes_of(text)] == [
        (5, "metadata.name"),
        (13, "spec.generation.engineArgs.x"),
        (22, "spec.environments[0].tipe"),
        (33, "spec.rollout.maxTurns"),
    ]


def test_a_valid_manifest_becomes_a_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(VALID)
    job = load_job(file)
    assert job.metadata.name == "puzzles"
    assert job.metadata.labels == {"team": "7"}
    assert job.spec.generation.engine_args == {"max_model_len": 1024}
    assert job.spec.generation.sampling.temperature == 1.0
    assert job.spec.generation.resources.limits == {"nvidia.com/gpu": 1}
    assert [environment.name for environment in job.spec.environments] == ["sliding_puzzle", "mine"]
    assert job.spec.rollout.max_turns == 20


def test_json_is_yaml_with_tabs_and_escapes_of_wide_characters(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(
        '{"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob",\n\t"metadata": {"name": "a"},\n\t"spec": {'
        '"generation": {"model": {"source": "\\ud83d\\ude00"}}, "environments": [{"name": "e", "type": "math"}],\n'
        '\t"dataset": {"source": {"uri": "rows\\/a.jsonl"}}}}'
    )
    job = load_job(file)
    assert job.spec.generation.model.source == "\N{GRINNING FACE}"
    assert job.spec.dataset.source is not None
    assert job.spec.dataset.source.uri == "rows/a.jsonl"


def test_a_byte_order_mark_and_foreign_line_ends_are_accepted() -> None:
    assert mistakes_of(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode()) == []


def test_aliases_and_merged_mappings_are_values_like_others() -> None:
    text = edited(
        "    - name: mine\n      entrypoint: package.module:Class",
        "    - &mine\n      name: mine\n      entrypoint: package.module:Class\n      config: &config {a: 1}\n"
        "    - {<<: *mine, name: other, config: *config}\n    - <<: [*mine, {maxBatch: 0}]\n      name: third # here",
    )
    mistake = only_mistake(text)
    assert mistake.field == "spec.environments[3].maxBatch"
    assert mistake.line == line_of_here(text) - 1


def test_merging_what_is_no_mapping_is_a_mistake() -> None:
    assert "merges mappings only" in mistakes_of(edited("max_model_len: 1024", "<<: 3"))[0].message


def test_aliases_that_make_billions_of_values_are_refused_at_once() -> None:
    laughs = "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    mistake = only_mistake(f"apiVersion: kuberoll.io/v1alpha1\nspec:\n  a0: &a0 1\n{laughs}")
    assert "more than 1000000 values" in mistake.message


def test_objects_of_other_apis_beside_the_job_are_passed_over(tmp_path: Path) -> None:
    config_map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: rows}\n"
    file = tmp_path / "job.yaml"
    file.write_text(f"{config_map}---\n{VALID}---\n")
    assert load_job(file).metadata.name == "puzzles"
    mistake = only_mistake(config_map)
    assert (mistake.line, mistake.field) == (2, "kind")
    assert mistake.message.startswith("found only ConfigMap; a RolloutJob begins with")


def test_each_document_of_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{VALID}---\n{VALID.replace('puzzles', 'more')}")
    assert [job.metadata.name for job in load_jobs(file)] == ["puzzles", "more"]
    with pytest.raises(ManifestError, match=r"there are 2 RolloutJobs \(puzzles, more\)"):
        load_job(file)
    broken = edited("maxTurns: 20", "maxTurns: 0")
    assert [mistake.line for mistake in mistakes_of(f"{broken}---\n{broken}")] == [33, 67]


def test_an_object_exported_from_a_cluster_is_accepted() -> None:
    added = "  name: puzzles\n  uid: x\n  creationTimestamp: '2026-01-01T00:00:00Z'\n  managedFields: [{}]"
    assert mistakes_of(edited("  name: puzzles", added) + "status: {phase: Running}\n") == []


@pytest.mark.parametrize(
    ("added", "field", "message"),
    [
        ("NAMESPACE: x", "metadata.NAMESPACE", "unknown field"),
        ("lables: {a: b}", "metadata.lables", "unknown field"),
        ("annotations: {a/b/c: b}", "metadata.annotations.a/b/c", "the key must be letters"),
        ("annotations: {team a: b}", 'metadata.annotations."team a"', "the key must be letters"),
    ],
)
def test_metadata_that_no_api_server_takes_is_refused(added: str, field: str, message: str) -> None:
    mistake = only_mistake(edited("  name: puzzles", f"  name: puzzles\n  {added}"))
    assert mistake.field == field
    assert message in mistake.message


def test_labels_are_those_of_kubernetes() -> None:
    mistake = only_mistake(edited('{team: "7"}', '{team: "\\e[2J"}'))
    assert mistake.field == "metadata.labels.team"
    assert "the value of a label, as in Kubernetes" in mistake.message
    assert "the key must be letters" in only_mistake(edited('{team: "7"}', "{-team: a}")).message


def test_the_text_of_many_mistakes_fits_a_screen() -> None:
    error = ManifestError([Mistake("f", number, "a", "b") for number in range(MOST_SHOWN + 3)])
    lines = str(error).splitlines()
    assert len(lines) == MOST_SHOWN + 1
    assert lines[-1] == "and 3 more"


YAML_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["2026-01-01", "!x y", "&a 1", "*a", "{", "- b", "? c", ".inf", "'", '"\\udc00"', "0x", "<<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places_in(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    items = value.items() if isinstance(value, dict) else enumerate(value)
    changed = {key: replaced(inner, path[1:], new) if key == path[0] else inner for key, inner in items}
    return changed if isinstance(value, dict) else list(changed.values())


WHOLE = RolloutJob.model_validate(parse_documents(VALID)[0].value).model_dump(mode="json")


@given(path=st.sampled_from(list(places_in(WHOLE))), value=YAML_VALUES)
def test_any_value_in_any_field_is_a_job_or_a_list_of_mistakes(path: tuple[Any, ...], value: object) -> None:
    for mistake in mistakes_of(json.dumps(replaced(WHOLE, path, value))):
        assert mistake.message
        str(mistake).encode()


@given(data=st.binary(max_size=60))
def test_random_bytes_are_a_list_of_mistakes(data: bytes) -> None:
    assert mistakes_of(data)


@given(line=st.integers(min_value=0, max_value=VALID.count("\n") - 1), value=YAML_VALUES)
def test_any_value_in_any_line_is_a_manifest_or_a_list_of_mistakes(line: int, value: object) -> None:
    lines = VALID.splitlines()
    lines[line] = f"{lines[line].partition(':')[0]}: {value if isinstance(value, str) else repr(value)}"
    for mistake in mistakes_of("\n".join(lines).encode("utf-8", "surrogatepass")):
        assert mistake.message
        assert mistake.line is None or mistake.line >= 1


@given(
    cut=st.integers(min_value=0, max_value=len(VALID)),
    length=st.integers(min_value=0, max_value=40),
    bytes_=st.binary(max_size=8) | st.text(alphabet="{}[]:,-?&*!|>'\"%@`#\n\t ~.0a", max_size=8).map(str.encode),
)
def test_any_damage_to_a_file_is_a_manifest_or_a_list_of_mistakes(cut: int, length: int, bytes_: bytes) -> None:
    data = VALID.encode()
    for mistake in mistakes_of(data[:cut] + bytes_ + data[cut + length :]):
        assert mistake.message
        str(mistake).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%YAML 1.3\n---\na: 1\n", "remove the lines that begin with %"),
        ("%YAML 1.3\n%YAML 1.2\n---\na: 1\n", "%"),
        (f"{VALID}\n...\n%YAML 3.0\n---\na: 1\n", "YAML"),
        ("a: 1\n%YAML 3.0\n---\nb: 1\n", "YAML"),
    ],
)
def test_directives_of_yaml_are_a_mistake_and_no_crash(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ManifestError, match=words):
        load_jobs(tmp_path / "job.yaml")


@pytest.mark.parametrize("field", ["    scheduling: {}", "    maxTurns: {}", "    {}: 1"])
def test_large_values_are_not_repeated(field: str, tmp_path: Path) -> None:
    large = "x" * 100_000
    (tmp_path / "job.yaml").write_text(
        VALID.replace("    maxTurns: 20", field.format(f'"{large}"' if ": {}" in field else large[:900]))
    )
    with pytest.raises(ManifestError) as caught:
        load_jobs(tmp_path / "job.yaml")
    assert len(str(caught.value)) < 3000
