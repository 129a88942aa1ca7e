"""Every kind of mistake, with its line, its field and what to do."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.cli import main
from kuberoll_api.manifest import ManifestError, load_job, load_jobs

GOOD = """\
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata:
  name: job
spec:
  generation:
    model:
      source: models/tiny
  environments:
    - name: a
      type: math
  dataset:
    source:
      rows: [{prompt: x}]
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mistakes(tmp_path: Path, text: str | bytes, *overrides: str) -> list[tuple[str, str, str]]:
    path = write(tmp_path, text)
    with pytest.raises(ManifestError) as caught:
        load_job(path, overrides)
    return [(m.where.removeprefix(f"{path}:"), m.field, m.message) for m in caught.value.mistakes]


def test_a_good_manifest(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD))
    assert job.metadata.name == "job"
    assert job.spec.rollout.max_turns == 20
    assert job.spec.generation.sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"),
    [
        ("kind: RolloutJob", "kind: RolloutJobs", "2", "kind", "'RolloutJob'"),
        ("v1alpha1", "v1", "1", "apiVersion", "'kuberoll.io/v1alpha1'"),
        ("name: job", "name: My_Job", "4", "metadata.name", "found the text My_Job"),
        ("name: job", f"name: {'x' * 41}", "4", "metadata.name", "at most 40 characters"),
        ("source: models/tiny", "sorce: models/tiny", "8", "spec.generation.model.sorce", "did you mean source?"),
        ("source: models/tiny", "tokenizer: x", "7", "spec.generation.model.source", "is missing. Hub id"),
        ("type: math", "type: 3", "11", "spec.environments[0].type", "found the number 3; it must be text"),
        ("type: math", "typ: math", "11", "spec.environments[0].typ", "did you mean type?"),
        ("type: math", "stepTimeoutSeconds: 0\n      type: math", "11", "stepTimeoutSeconds", "more than 0"),
        ("type: math", "config: []\n      type: math", "11", "spec.environments[0].config", "it must be an object"),
        ("type: math", "isolation: inline\n      type: math", "11", "isolation", "one of 'Inline' or 'Process'"),
        ("      type: math", "", "10", "spec.environments[0]", "exactly one of type"),
        ("type: math", "entrypoint: nocolon", "11", "entrypoint", "text of the form"),
        ("  dataset:", "  maxTurns: 3\n  dataset:", "12", "spec.maxTurns", "did you mean spec.rollout.maxTurns?"),
        ("  dataset:", "  rollout: {maxTurns: '3'}\n  dataset:", "12", "maxTurns", "found the text 3; it must be"),
        ("  dataset:", "  rollout: {maxTurns: 3.5}\n  dataset:", "12", "maxTurns", "a whole number"),
        ("  dataset:", "  rollout: {maxTurns: true}\n  dataset:", "12", "maxTurns", "found the boolean true"),
        ("  dataset:", "  suspend: 1\n  dataset:", "12", "spec.suspend", "true or false"),
        ("  dataset:", "  rollout:\n  dataset:", "12", "spec.rollout", "found nothing; it must be an object"),
        ("  dataset:", "  output: {uri: 2026-01-01}\n  dataset:", "12", "", "put it in quotes"),
        ("  dataset:", "  rollout: {maxFailedFraction: .nan}\n  dataset:", "12", "", "finite number"),
        ("rows: [{prompt: x}]", "uri: a\n      rows: []", "13", "spec.dataset.source", "(found uri and rows)"),
        ("rows: [{prompt: x}]", "generator: {count: 1, environments: [b]}", "5", "spec", "no environment is named 'b'"),
        ("    model:", "    replicas: 2\n    autoscaling: {maxReplicas: 3}\n    model:", "6", "generation", "exclude"),
        ("    model:", "    backend: External\n    model:", "6", "spec.generation", "needs external.url"),
        ("    model:", "    sampling: {topP: 1.5}\n    model:", "7", "spec.generation.sampling.topP", "at most 1"),
        ("- name: a", "- {name: a, type: math}\n    - name: a", "5", "spec", "the name 'a' is used twice"),
        (
            "    model:",
            '    resources: {limits: {"nvidia.com/gpu": 1.5}}\n    model:',
            "7",
            'spec.generation.resources.limits."nvidia.com/gpu"',
            "text (put it in quotes) or a whole number",
        ),
    ],
)  # fmt: skip
def test_one_mistake(old: str, new: str, line: str, field: str, words: str, tmp_path: Path) -> None:
    assert old in GOOD
    ((where, path, message),) = mistakes(tmp_path, GOOD.replace(old, new, 1))
    assert where == line
    assert path.endswith(field)
    assert words in message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", "", "the file is empty"),
        ("a: [1,\nb: {", "2", "YAML syntax"),
        ("a: 1\nb: 2\na: 3\n", "3", 'duplicate key "a"'),
        (b"a: 1\nb: \xff\n", "2", "not UTF-8"),
        ("- 1\n- 2\n", "1", "it must be an object"),
        ("just text\n", "1", "it must be an object"),
        ("kind: ConfigMap\napiVersion: v1\n", "", "only ConfigMap"),
        ("a: &x\n  b: *x\n", "", "leads back to itself"),
        ("1: x\n", "1", "not text"),
        ("a: !!python/object:os.system x\n", "1", ""),
    ],
)
def test_unreadable_files(text: str | bytes, line: str, words: str, tmp_path: Path) -> None:
    found = mistakes(tmp_path, text)
    assert any(words in message for _, _, message in found)
    assert found[0][0].endswith(line)


def test_syntax_errors_point_at_the_column(tmp_path: Path) -> None:
    ((_, _, message),) = mistakes(tmp_path, "spec:\n  a: b: c\n")
    assert message.splitlines()[1:] == ["      a: b: c", "          ^"]


def test_all_mistakes_of_a_file_in_order(tmp_path: Path) -> None:
    text = GOOD.replace("name: job", "name: J").replace("type: math", "type: 3").replace("{prompt: x}", "3")
    assert [(where, field) for where, field, _ in mistakes(tmp_path, text)] == [
        ("4", "metadata.name"),
        ("11", "spec.environments[0].type"),
        ("14", "spec.dataset.source.rows[0]"),
    ]


def test_a_screen_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("{prompt: x}", ",".join(str(n) for n in range(100))))
    with pytest.raises(ManifestError) as caught:
        load_job(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 80 more"


def test_missing_files_and_directories(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(ManifestError, match=words):
            load_job(path)


def test_several_jobs(tmp_path: Path) -> None:
    path = write(tmp_path, f"{GOOD}---\n{GOOD}---\nkind: Secret\napiVersion: v1\n")
    assert len(load_jobs(path)) == 2
    with pytest.raises(ManifestError, match="there are 2 RolloutJobs"):
        load_job(path)


def test_json_is_yaml(tmp_path: Path) -> None:
    document = load_job(write(tmp_path, GOOD)).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert load_job(write(tmp_path, json.dumps(document, indent=1))).spec.dataset.repeats == 1


def test_an_exported_object_validates(tmp_path: Path) -> None:
    exported = GOOD.replace("name: job", "name: job\n  uid: 1-2\n  creationTimestamp: '2026-01-01T00:00:00Z'")
    assert load_job(write(tmp_path, exported + "status: {phase: Running}\n")).metadata.name == "job"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("spec.rollout.maxTurns=3", lambda job: job.spec.rollout.max_turns == 3),
        ("spec.environments[0].config.size=3", lambda job: job.spec.environments[0].config == {"size": 3}),
        ("spec.dataset.source={generator: {count: 2}}", lambda job: job.spec.dataset.source.generator.count == 2),
        ('spec.workers.resources.limits."a.b/gpu"=1', lambda job: job.spec.workers.resources.limits == {"a.b/gpu": 1}),
        ("metadata.name=other", lambda job: job.metadata.name == "other"),
        ("spec.output.uri=a=b", lambda job: job.spec.output.uri == "a=b"),
    ],
)  # fmt: skip
def test_overrides(override: str, read: Any, tmp_path: Path) -> None:
    assert read(load_job(write(tmp_path, GOOD), [override]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("spec.rollout.maxTurns", "write path=value"),
        ("=3", "write path=value"),
        ("spec.environments[4].name=x", "has 1 items"),
        ("spec.environments.name=x", "is not an object"),
        ("metadata[0]=x", "is not a list"),
        ("spec.rollout={", "not a YAML value"),
        ("spec.rollout.maxTurns=many", "found the text many; it must be a whole number"),
        ("spec.rolout.maxTurns=3", "did you mean rollout?"),
    ],
)
def test_mistaken_overrides_name_themselves(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load_job(write(tmp_path, GOOD), [override])
    assert f"--set {override}" in str(caught.value)
    assert words in str(caught.value)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), value=_values)
def test_a_spoilt_manifest_never_crashes(
    data: st.DataObject, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = load_job(write(tmp_path_factory.mktemp("m"), GOOD)).model_dump(mode="json", by_alias=True)
    document = copy.deepcopy(base)
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
            node = inner
            continue
        node[key] = value
        break
    path = write(tmp_path_factory.mktemp("m"), json.dumps(document))
    with contextlib.suppress(ManifestError):
        load_job(path)


@given(st.binary(max_size=60))
def test_random_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with pytest.raises(ManifestError):
        load_job(write(tmp_path_factory.mktemp("m"), data))


def test_command(tmp_path: Path) -> None:
    good, bad = write(tmp_path, GOOD), tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("type: math", "typ: math"))
    result = CliRunner().invoke(main, ["validate", str(good)])
    assert (result.exit_code, result.output) == (0, f"{good}: ok (RolloutJob job)\n")
    result = CliRunner().invoke(main, ["validate", str(good), str(bad)])
    assert result.exit_code == 2
    assert f"{bad}:11: spec.environments[0].typ" in result.output


def test_help_lists_the_commands_of_the_other_packages() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert "validate" in result.output
    assert "run" in result.output


def test_a_command_whose_dependencies_are_missing_says_what_to_install() -> None:
    # As on a machine with the core package only.
    code = (
        "import sys; sys.modules['kuberoll_workers'] = None\nfrom kuberoll_api.cli import main\nmain(['run', 'x.yaml'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'kuberoll[workers]'" in done.stderr
