"""`kuberoll export`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kuberoll_workers.commands.export import export
from tests.analysis.test_export import run_of, trajectory


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(export, list(map(str, arguments)))


def test_a_run_is_exported_beside_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", trajectory(0), trajectory(1, reward=0.0), trajectory(2, turns=0))
    result = typed("run", "--to", "openai-chat", "--min-reward", 0.5)
    assert result.exit_code == 0, result.output
    assert result.output == (
        "1 trajectories, 1 left out: of less reward, 1 left out: without a response\n  run.openai-chat.jsonl\n"
    )
    (line,) = (tmp_path / "run.openai-chat.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][-1] == {"role": "assistant", "content": "move 2"}
    again = typed("run", "--to", "openai-chat")
    assert (again.exit_code, "--force" in again.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--to", "trl"], "give the output directory of a run"),
        (["run", "--to", "openai-chat", "--environment-role", "tool"], "--environment-role user"),
        (["run", "--to", "trl", "--output", "a.json"], ".parquet or .jsonl"),
        (["run", "--to", "trl", "--environment", "x"], "the run has puzzle"),
        (["run", "--to", "llama"], "is not one of"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", trajectory(0))
    result = typed(*arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_in_an_object_store(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from kuberoll_workers.data.record import encode_line

    store = fsspec.filesystem("memory")
    store.pipe_file("/exported/shard-00000/worker-00000001.jsonl", encode_line(trajectory(0)))
    try:
        result = typed("memory://exported", "--to", "sharegpt", "--output", tmp_path / "chat.jsonl")
        assert result.exit_code == 0, result.output
        assert len((tmp_path / "chat.jsonl").read_text().splitlines()) == 1
    finally:
        store.rm("/exported", recursive=True)
