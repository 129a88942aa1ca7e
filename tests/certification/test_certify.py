"""`kuberoll certify` over real environments, and runs that demand what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.authoring.template import tokenizer_files
from kuberoll_workers.commands.certify import certify
from kuberoll_workers.commands.dataset_check import check_dataset
from kuberoll_workers.local.preflight import JobRefused, check

pytestmark = pytest.mark.slow

OWN = """
from kuberoll_workers.environments import EnvironmentReturn

class Own:
    def __init__(self, config):
        self.calls = 0

    def step(self, logs, metadata):
        rewards = []
        for log, state in zip(logs, metadata):
            said, truth = log[-1]["content"], state["truth"]
            self.calls += 1
            right = said.strip() == truth
            rewards.append({
                "good": float(right), "always": 1.0, "never": 0.0, "contains": float(truth in said),
                "flaky": float(right and self.calls % 3 != 0),
            }[state["kind"]])
        count = len(rewards)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * count, metadata, None, rewards, [True] * count
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def solution(self, episode):
        return [episode.metadata["truth"]]
"""
TESTS = {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("own", {"kind": "good", "truth": "41"}, "certified"),
    ("own", {"kind": "always", "truth": "42"}, "always_passes"),
    ("own", {"kind": "never", "truth": "43"}, "never_passes"),
    ("own", {"kind": "contains", "truth": "44"}, "passes_on"),
    ("own", {"kind": "flaky", "truth": "45"}, "flaky"),
    ("math", {"ground_truth": "42"}, "certified"),
    ("math", {"ground_truth": "41", "solution": r"6 * 7 = 42, so \boxed{42}"}, "wrong_truth"),
    ("code", {"tests": TESTS, "solution": "def double(x):\n    return 2 * x"}, "certified"),
    ("code", {"tests": TESTS, "solution": "def double(x):\n    return 3 * x"}, "never_passes"),
    ("code", {"tests": ["assert double(2) or True"], "solution": "def double(x):\n    return 2 * x"}, "passes_on"),
    ("code", {"tests": TESTS}, "unproven"),
    ("sql", {"script": "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2);", "query": "SELECT a FROM t"}, "certified"),
]
JOB = """
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata: {name: certified}
spec:
  generation: {engine: Simulated, model: {source: tiny}}
  dataset: {source: {uri: rows.jsonl}, certify: {mode: Require}}
  environments:
    - {name: own, entrypoint: "certified_own:Own", isolation: Process}
    - {name: math, type: math}
    - {name: code, type: code_execution}
    - {name: sql, type: sqlite}
"""


def written(directory: Path, rows: list[tuple[str, dict[str, Any], str]]) -> Path:
    lines = [
        json.dumps({"task_name": name, "prompt": f"question {number}?", "metadata": metadata})
        for number, (name, metadata, _) in enumerate(rows)
    ]
    (directory / "rows.jsonl").write_text("\n".join(lines))
    (directory / "certified_own.py").write_text(OWN)
    (directory / "job.yaml").write_text(JOB)
    return directory / "job.yaml"


def certificates(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rows.jsonl.certificates.jsonl").read_text().splitlines()]


def test_rows_are_certified_refused_or_unproven(tmp_path: Path) -> None:
    job = written(tmp_path, ROWS)
    result = CliRunner().invoke(certify, [str(job), "--repetitions", "5", "--parallel", "2"])
    assert result.exit_code == 1, result.output
    found = {one["where"]: one for one in certificates(tmp_path)}
    assert len(found) == len(ROWS)
    for number, (_, _, expected) in enumerate(ROWS, start=1):
        one = next(one for where, one in found.items() if where.endswith(f"rows.jsonl:{number}"))
        said = {finding["class"] for finding in one.get("findings", [])} or {one["verdict"]}
        assert expected in said or (expected == "flaky" and "depends_on_order" in said), (number, one)
    _, errors = check_dataset(load_job(job, ()), tmp_path)
    assert "never passes" in errors[0]


def test_a_broken_solution_contradicts_its_own_row_alone(tmp_path: Path) -> None:
    right, broken = "def double(x):\n    return 2 * x", "def triple(x):\n    return 3 * x"
    job = written(tmp_path, [("code", {"tests": TESTS, "solution": code}, "") for code in (right, broken)])
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lines[1]["prompt"] = lines[0]["prompt"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert CliRunner().invoke(certify, [str(job), "--repetitions", "2"]).exit_code == 1
    found = {one["where"].rpartition(":")[2]: one for one in certificates(tmp_path)}
    assert [found[line]["verdict"] for line in "12"] == ["certified", "refused"]
    # Of answers that were withstood the rewards say all.
    assert not any(trial.get("detail") for trial in found["1"]["trials"] if trial["kind"] == "attack")
    assert any(trial.get("detail") for trial in found["2"]["trials"] if trial["kind"] == "solution")


def test_a_worked_solution_counts_as_it_stands(tmp_path: Path) -> None:
    solutions = [r"First \boxed{13} plus 28, that is \boxed{41}.", r"It is \boxed{41}.", "Count on your fingers."]
    job = written(tmp_path, [("math", {"ground_truth": "41", "solution": text}, "") for text in solutions])
    assert CliRunner().invoke(certify, [str(job), "--repetitions", "2"]).exit_code == 1
    found = {one["where"].rpartition(":")[2]: one for one in certificates(tmp_path)}
    assert [found[line]["verdict"] for line in "123"] == ["refused", "certified", "certified"]


def test_two_rows_that_contradict_each_other_are_both_refused(tmp_path: Path) -> None:
    job = written(tmp_path, [("math", {"ground_truth": truth}, "") for truth in ("42", "43", "44")])
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lines[2]["prompt"] = lines[0]["prompt"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert CliRunner().invoke(certify, [str(job), "--repetitions", "2"]).exit_code == 1
    found = {one["where"].rpartition(":")[2]: one for one in certificates(tmp_path)}
    assert [found[line]["verdict"] for line in "123"] == ["refused", "certified", "refused"]
    assert "rows.jsonl:3' gets 0 of 1" in found["1"]["findings"][0]["text"]


def test_invalid_rows_are_refused_with_their_reasons_and_the_others_are_tried(tmp_path: Path) -> None:
    job = written(
        tmp_path,
        [
            ("math", {"ground_truth": "42"}, ""),
            ("math", {}, ""),
            ("math", {"ground_truth": "43"}, ""),
            ("math", {}, ""),
        ],
    )
    result = CliRunner().invoke(certify, [str(job), "--repetitions", "2"])
    assert result.exit_code == 1, result.output
    assert "refused, the row is invalid: 2 rows" in result.output
    assert "rows.jsonl:2: metadata.ground_truth" in result.output.replace("row None: ", "")
    assert "rows.jsonl:4: " in result.output
    assert [(one["where"].rpartition(":")[2], one["verdict"]) for one in certificates(tmp_path)] == [
        ("1", "certified"),
        ("3", "certified"),
    ]


def test_without_a_valid_row_the_job_cannot_be_read(tmp_path: Path) -> None:
    job = written(tmp_path, [("math", {}, "")])
    result = CliRunner().invoke(certify, [str(job)])
    assert result.exit_code == 2
    assert "rows.jsonl:1: " in result.output
    assert "there are no rows" in result.output


def test_a_demand_is_met_and_a_changed_row_is_not(tmp_path: Path) -> None:
    good = [row for row in ROWS if row[2] == "certified" and row[0] in ("own", "math")]
    job = written(tmp_path, good)
    _, errors = check_dataset(load_job(job, ()), tmp_path)
    assert "it has no certificate" in errors[0]
    assert CliRunner().invoke(certify, [str(job), "--repetitions", "5"]).exit_code == 0
    first = certificates(tmp_path)
    text, errors = check_dataset(load_job(job, ()), tmp_path)
    assert not errors
    assert "2 are certified" in text
    assert CliRunner().invoke(certify, [str(job), "--repetitions", "5"]).exit_code == 0
    assert certificates(tmp_path) == first
    (tmp_path / "certified_own.py").write_text(OWN + "# changed\n")
    _, errors = check_dataset(load_job(job, ()), tmp_path)
    assert "the grader's code has changed since" in errors[0]
    assert "rows.jsonl:1" in errors[0]


def test_a_run_is_refused_or_warned_before_an_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    job = written(tmp_path, [("math", {"ground_truth": "42"}, ""), ("math", {"ground_truth": "43"}, "")])
    (tmp_path / "tiny").mkdir()
    for name, text in tokenizer_files().items():
        (tmp_path / "tiny" / name).write_text(text)
    with pytest.raises(JobRefused, match=r"rows\.jsonl:1: it has no certificate"):
        check(load_job(job, ()), base=tmp_path)
    warned = check(load_job(job, ["spec.dataset.certify.mode=Warn"]), base=tmp_path)
    assert any("of 2 rows 0 are certified" in note for note in warned.notes)
    assert CliRunner().invoke(certify, [str(job)]).exit_code == 0
    met = check(load_job(job, ()), base=tmp_path)
    assert any("of 2 rows 2 are certified" in note for note in met.notes)
    # More is demanded than was done.
    with pytest.raises(JobRefused, match="graded only 5 times"):
        check(load_job(job, ["spec.dataset.certify.repetitions=6"]), base=tmp_path)
