"""`kuberoll report`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kuberoll_workers.commands.report import report
from kuberoll_workers.data.record import encode_line
from tests.analysis.report.runs import realistic, store, trajectory


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(report, list(map(str, arguments)))


def test_the_page_is_written_beside_the_run(tmp_path: Path) -> None:
    run = store(tmp_path / "run", realistic(6))
    done = typed(run)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"  {run}/report.html"
    page = (tmp_path / "run" / "report.html").read_bytes()
    assert page.startswith(b"<!doctype html>")
    # Once more replaces it; it is no part of the run.
    assert typed(run).exit_code == 0
    assert (tmp_path / "run" / "report.html").read_bytes() == page


def test_the_page_elsewhere(tmp_path: Path) -> None:
    run = store(tmp_path / "run", [trajectory(0)])
    done = typed(run, "--output", tmp_path / "new" / "page.html")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "1 trajectories, 0.1 MB")
    assert (tmp_path / "new" / "page.html").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_in_an_object_store() -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe_file("/reported/shard-00000/worker-00000001.jsonl", encode_line(trajectory(0)))
    try:
        done = typed("memory://reported")
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "  memory://reported/report.html"), done.output
        assert store.cat_file("/reported/report.html").startswith(b"<!doctype html>")
    finally:
        store.rm("/reported", recursive=True)


def test_what_cannot_be_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = typed(tmp_path)
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "give the output directory of a run" in nothing.stderr
    run = store(tmp_path / "run", [trajectory(0)])
    (tmp_path / "run" / "failures.jsonl").write_bytes(b"{}\n")
    broken = typed(run)
    # The line is set aside, with its place; the run is not refused.
    assert broken.exit_code == 0
    assert "failures.jsonl:1: not a FailureRecord" in caplog.text
    assert (tmp_path / "run" / "report.html").exists()
    (tmp_path / "run" / "failures.jsonl").unlink()
    (tmp_path / "run" / "manifest.json").write_text("[]")
    assert "not a run's manifest" in typed(run).stderr


def test_two_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, best in (("base", 0.0), ("new", 1.0)):
        records = [trajectory(task, rollout, rewards=[max(best, rollout)]) for task in range(4) for rollout in range(2)]
        store(tmp_path / name, records)
    done = typed("base", "new/")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[:2] == ["A: base, 8 trajectories", "B: new/, 8 trajectories"]
    assert lines[-1] == "  base-vs-new.html"
    assert any(line.split() == ["success", "rate", "50%", "100%", "+50", "+50", "to", "+50"] for line in lines), lines
    assert max(map(len, [line for line in lines if not line.startswith("note")])) <= 80
    assert b"KubeRoll comparison" in (tmp_path / "base-vs-new.html").read_bytes()
    # Nothing else is written, and nothing beside the runs.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "base-vs-new.html", "new"]
    assert not list(tmp_path.glob("*/report.html"))
    assert typed("base", "new", "--output", tmp_path / "other" / "page.html").exit_code == 0
    assert (tmp_path / "other" / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one", "one"], "give two different runs"),
        (["one", "maths"], "share no environment: one has puzzle; maths has math"),
        (["one", "nothing"], "give the output directory of a run"),
        (["one", "maths", "one"], "found 3 runs: give one to report, or two to compare"),
        (["one", "--tokenizer", "/nowhere"], "--tokenizer /nowhere: no tokenizer could be loaded"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "one", [trajectory(0)])
    store(tmp_path / "maths", [trajectory(0, environment="math")])
    done = typed(*arguments)
    assert (done.exit_code, words in done.output) == (2, True), done.output
    assert not list(tmp_path.glob("**/*.html"))
