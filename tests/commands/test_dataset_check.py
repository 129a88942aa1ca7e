"""`kuberoll validate --dataset`: every row read, no model loaded, nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kuberoll_api.cli import main

JOB: dict[str, Any] = {
    "apiVersion": "kuberoll.io/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "job"},
    "spec": {
        # A model that is nowhere: it is not looked for.
        "generation": {"model": {"source": "nobody/nothing"}},
        "environments": [{"name": "math", "type": "math"}],
        "dataset": {"source": {"uri": "rows.jsonl"}, "repeats": 4},
    },
}


def validated(directory: Path, rows: list[Any], *options: str, **dataset: Any) -> Result:
    """The command's result for a job beside a file of rows."""
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {**JOB["spec"], "dataset": {**JOB["spec"]["dataset"], **dataset}}
    (directory / "job.yaml").write_text(json.dumps({**JOB, "spec": spec}))
    return CliRunner().invoke(main, ["validate", "--dataset", str(directory / "job.yaml"), *options])


def test_a_dataset_is_counted(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(1500)]
    columns = {"prompt": "question", "metadata.ground_truth": "answer"}
    result = validated(tmp_path, rows, columns=columns)
    assert result.output == (
        f"{tmp_path}/job.yaml: ok (RolloutJob job)\n"
        "  dataset of job: 1,500 rows, 1,500 tasks, 6,000 trajectories (math 6,000)\n"
    )
    sources = [
        {"name": "file", "source": {"uri": "rows.jsonl"}, "columns": columns, "weight": 3},
        {"name": "made", "source": {"generator": {"count": 10}}, "weight": 1},
    ]
    result = validated(tmp_path, rows, source=None, sources=sources)
    assert "42 rows, 42 tasks, 168 trajectories (math 168); sources: file 32, made 10" in result.output


def test_what_scoring_needs_and_a_row_lacks_is_named_with_its_remedy(tmp_path: Path) -> None:
    result = validated(tmp_path, [{"question": "2+2?", "answer": "4"}], promptTemplate={"user": "{question}"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"{tmp_path}/rows.jsonl:1: metadata.ground_truth: found None; it must be the right answer, a number, LaTeX or "
        "words. The environment 'math' cannot score the row without it. The row has answer, question; if one of these "
        "fields has it, map it: dataset.columns: {metadata.ground_truth: FIELD}\n"
    )


def test_the_first_invalid_rows_are_listed(tmp_path: Path) -> None:
    good = {"prompt": "x", "metadata": {"ground_truth": 1}}
    result = validated(tmp_path, [good, {"prompt": 3}, good, {"prompt": "x", "metadata": {"ground_truth": "?!"}}, good])
    assert result.exit_code == 2
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == [
        f"{tmp_path}/rows.jsonl:{line}" for line in (2, 4)
    ]
    result = validated(tmp_path, [{}] * 30)
    lines = result.stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "these are the first 10 invalid rows; later ones were not read"
    result = validated(tmp_path, [{}])
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"source": {"uri": "nowhere.jsonl"}}, "spec.dataset.source.uri: "),
        ({"source": {"configMap": {"name": "a"}}}, "spec.dataset.source.configMap can only be read in a cluster"),
        ({"source": {"rows": []}}, "spec.dataset: there are no rows"),
        ({"columns": {"promt": "a"}}, "/job.yaml:1: spec.dataset.columns.promt: is not a field"),
    ],
)
def test_datasets_that_cannot_be_read(tmp_path: Path, dataset: dict[str, Any], message: str) -> None:
    result = validated(tmp_path, [], **dataset)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_environment_s_module_is_found_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "wordy_environment.py").write_text(
        "from kuberoll_workers.environments import UnusableRow\n"
        "class Wordy:\n"
        "    def __init__(self, config): pass\n"
        "    def step(self, logs, metadata): pass\n"
        "    def global_post_process_and_metrics(self, batch): return batch, {}\n"
        "    def check_row(self, metadata):\n"
        "        if 'word' not in (metadata or {}): raise UnusableRow('metadata.word: missing')\n"
    )
    before = sys.path[:]
    change = "spec.environments=[{name: words, entrypoint: 'wordy_environment:Wordy'}]"
    result = validated(tmp_path, [{"prompt": "x"}], "--set", change)
    assert f"{tmp_path}/rows.jsonl:1: metadata.word: missing. The environment 'words' cannot score" in result.stderr
    assert sys.path == before


@pytest.mark.slow
def test_neither_tokenizer_nor_engine_is_loaded(tmp_path: Path) -> None:
    validated(tmp_path, [{"prompt": "x", "metadata": {"ground_truth": 1}}])
    program = (
        "import sys\n"
        "from kuberoll_api.cli import main\n"
        f"main(['validate', '--dataset', {str(tmp_path / 'job.yaml')!r}], standalone_mode=False)\n"
    )
    checked = (
        "print([n for n in ('torch', 'transformers', 'tokenizers', 'ray', 'vllm', 'aiohttp') if n in sys.modules])"
    )
    code = f"import sys\ntry:\n{''.join(f'    {line}' for line in program.splitlines(True))}finally:\n    {checked}\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stdout + ended.stderr
