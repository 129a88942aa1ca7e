"""`kuberoll show`, as it is typed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.commands.show import show
from kuberoll_workers.data.tracebacks import Frame
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.report.runs import dropped, failure, message, store, trajectory


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(show, list(map(str, arguments)))


def names(result: Result) -> list[str]:
    """`task.rollout` of the rows of the table."""
    return [f"{row[1]}.{row[2]}" for row in re.finditer(r"^ *(\d+) +(\d+) ", result.stdout, re.MULTILINE)]


@pytest.fixture
def run(tmp_path: Path) -> str:
    return store(
        tmp_path / "run",
        [
            trajectory(0, 0, rewards=[0.5]),
            trajectory(0, 1, rewards=[0.25, 0.5], stop_reason="max_turns"),
            trajectory(1, 0, environment="math", rewards=[0.0], stop_reason="truncated"),
            trajectory(2, 0, rewards=[2.0]),
            failure(3),
            failure(2),  # finished later
            dropped(4),
        ],
    )


def test_the_table(run: str) -> None:
    done = typed(run)
    assert done.exit_code == 0, done.output
    assert names(done) == ["0.0", "0.1", "1.0", "2.0", "3.0", "4.0"]
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert lines[0] == ["task", "rollout", "environment", "reward", "turns", "tokens", "stop", "reason", "cause"]
    assert lines[3] == ["0", "1", "puzzle", "0.75", "2", "2", "max_turns"]
    assert lines[6][:7] == ["3", "0", "puzzle", "-", "0", "1", "failed"]
    assert "infrastructure (generation): the endpoint is gone" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--limit", 2], ["0.0", "0.1"]),
        (["--environment", "math"], ["1.0"]),
        (["--stop-reason", "truncated", "--stop-reason", "max_turns"], ["0.1", "1.0"]),
        (["--failed"], ["3.0"]),
        (["--sort", "best"], ["2.0", "0.1", "0.0", "1.0", "4.0", "3.0"]),
        (["--sort", "worst", "--limit", 2], ["1.0", "4.0"]),
    ],
)
def test_rows_that_are_asked_for(run: str, arguments: list[object], found: list[str]) -> None:
    done = typed(run, *arguments)
    assert names(done) == found
    assert ("--limit N" in done.stdout) == ("--limit" in arguments)


def test_turn_by_turn(tmp_path: Path) -> None:
    messages = [
        message("user", "How\nmany?", 0),
        message("assistant", "I [bold]look[/bold].", 1),
        message("environment", "Three.", 1, truncated=True),
        message("assistant", "Three \x1b]0;title\x07 it is.", 2),
    ]
    run = store(tmp_path, [trajectory(3, 1, messages=messages, rewards=[0.25, 1.0], seconds=[(1.5, 0.01), (2, 3)])])
    done = typed(run, "--task", 3, "--rollout", 1)
    assert done.exit_code == 0, done.output
    assert (
        done.stdout
        == f"""\
task 3, rollout 1  puzzle
  reward       1.25
  stop reason  terminated
  turns        2
  tokens       3 prompt, 12 generated, 2 environment
  seconds      3.500 generation, 3.010 environment
  idx          "row-3"
  metadata     {{"moves":2}}
  seed         {2**62 + 3}
  attempt      0

prompt
  user  3 tokens
    How
    many?

turn 1  reward 0.25  generation 1.500 s  environment 0.010 s
  assistant  6 tokens
    I [bold]look[/bold].
  environment  2 tokens  truncated
    Three.

turn 2  reward 1  generation 2.000 s  environment 3.000 s
  assistant  6 tokens
    Three ␛]0;title␇ it is.
"""
    )


def test_failures_and_what_was_dropped_turn_by_turn(run: str) -> None:
    failed = typed(run, "--task", 3)
    assert "failed: infrastructure (generation), after 5 tries\n    the endpoint is gone" in failed.stdout
    assert "  reward       -\n" in failed.stdout
    assert "dropped (oversampled), stopped on its way" in typed(run, "--task", 4).stdout
    both = typed(run, "--task", 0)
    assert re.findall(r"^task .*", both.stdout, re.MULTILINE) == [
        "task 0, rollout 0  puzzle", "task 0, rollout 1  puzzle",
    ]  # fmt: skip


def test_failures_by_their_line_of_code(tmp_path: Path) -> None:
    frames = [Frame("/home/me/guess.py", 18, "grade", 'state["answers"]')]
    text = "Traceback (most recent call last):\n  the call\nKeyError: \x1b[31m'answers'"
    bad = [
        replace(
            failure(task),
            kind="environment",
            stage="environment",
            cause=f"step raised KeyError: 'answers {task}'",
            idx={"name": task},
            row=f"data.jsonl:{task + 1}",
            metadata={"hint": task},
            frames=frames,
            traceback=text,
        )
        for task in range(3)
    ]
    done = typed(store(tmp_path / "run", [trajectory(9), failure(7), *bad]), "--failed", "--limit", 2)
    assert done.exit_code == 0, done.output
    found = done.stdout.partition("These are 2 of 4")[2]
    assert "me/guess.py:18 in grade: step raised KeyError: 'answers 0'" in done.stdout
    assert found.count("Traceback") == 1
    assert (
        "3 trajectories failed in environment puzzle: step raised KeyError: 'answers 0' (and similar messages)" in found
    )
    assert 'first: task 0, rollout 0, from data.jsonl:1, idx {"name":0}, attempt 0\n    metadata: {"hint":0}\n' in found
    assert "KeyError: ␛[31m'answers'" in found
    assert "1 trajectory failed in generation: the endpoint is gone" in found
    one = typed(str(tmp_path / "run"), "--task", 2).stdout
    assert "  row          data.jsonl:3\n" in one
    assert "\n    Traceback (most recent call last):\n      the call\n    KeyError: ␛[31m'answers'\n" in one


def test_failures_of_former_versions_are_shown(tmp_path: Path) -> None:
    run = Path(store(tmp_path / "run", [trajectory(0), failure(1)]))
    old = json.loads((run / "failures.jsonl").read_text())
    for name in ("row", "frames", "traceback"):
        del old[name]
    (run / "failures.jsonl").write_text(json.dumps(old) + "\n")
    assert "1 trajectory failed in generation: the endpoint is gone" in typed(str(run), "--failed").stdout
    assert "the endpoint is gone" in typed(str(run), "--task", 1).stdout
    assert aggregate([RunFiles(str(run))]).failed == 1


def test_a_line_that_cannot_be_read_is_named_where_it_is_reached(run: str, caplog: pytest.LogCaptureFixture) -> None:
    with (Path(run) / "shard-00000.jsonl").open("ab") as file:
        file.write(b"broken\n")
    # Reading ends where showing does.
    assert typed(run, "--limit", 3).exit_code == 0
    assert caplog.text == ""
    broken = typed(run)
    assert broken.exit_code == 0
    assert "shard-00000.jsonl:5: not a TrajectoryRecord" in caplog.text


def test_mistakes(run: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "give the output directory of a run" in typed(tmp_path / "empty").stderr
    assert typed(tmp_path / "empty").exit_code == 2
    nothing = typed(run, "--task", 99)
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "no such trajectory" in nothing.stderr
    assert "--rollout needs --task" in typed(run, "--rollout", 1).stderr


@pytest.mark.slow
@pytest.mark.parametrize("colourless", [False, True])
def test_colours_on_a_terminal(run: str, colourless: bool) -> None:
    terminal, side = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        **({"NO_COLOR": "1"} if colourless else {}),
    }
    code = "from kuberoll_workers.commands.show import show; show()"
    done = subprocess.run(
        [sys.executable, "-c", code, run, "--task", "3"], env=environment, stdout=side, check=False, timeout=240
    )
    os.close(side)
    printed = b""
    # The end of a terminal nobody holds any more is an error.
    try:
        while chunk := os.read(terminal, 65536):
            printed += chunk
    except OSError:
        pass
    finally:
        os.close(terminal)
    assert done.returncode == 0
    coloured = re.search(rb"\x1b\[[0-9;]*3[1-7]m", printed) is not None
    assert coloured is not colourless
