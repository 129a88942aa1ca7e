"""The table of trajectories in terminals of every width."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kuberoll_workers.analysis.report.row import row_of
from kuberoll_workers.analysis.report.turns import print_trajectory, trajectory_table
from kuberoll_workers.data.tracebacks import Frame
from kuberoll_workers.output.precedence import EndedRecord
from tests.analysis.report.runs import agent_trajectory, dropped, failure, message, trajectory


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_trajectory_is_one_line(width: int) -> None:
    records: list[EndedRecord] = [
        trajectory(12345, 678, environment="an environment of a long name", stop_reason="max_turns"),
        failure(2),
        dropped(3, environment="a b"),
    ]
    out = io.StringIO()
    Console(file=out, width=width).print(trajectory_table([row_of(record) for record in records], width))
    head, rule, *lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert set(rule.strip()) == {"─"}
    assert len(lines) == len(records)
    assert all(len(line) <= width for line in (head, rule, *lines))


def test_a_narrow_terminal_cuts_nothing_but_the_cause() -> None:
    frames = [Frame("/home/me/guess.py", 18, "grade", 'state["answers"]')]
    rows = [
        row_of(trajectory(0, 1, environment="guess", stop_reason="max_turns")),
        row_of(replace(failure(2), cause="KeyError: 'answers' " * 9, frames=frames)),
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(trajectory_table(rows, 80))
    head, _, first, second = [line for line in out.getvalue().splitlines() if line.strip()]
    titles = ["task", "rollout", "environment", "reward", "turns", "tokens", "stop", "reason", "cause"]
    assert head.split() == titles
    assert first.split() == ["0", "1", "guess", "1", "1", "2", "max_turns"]
    assert "me/guess.py:" in second


def test_numbers_end_where_their_titles_end() -> None:
    out = io.StringIO()
    rows = [row_of(trajectory(7, 3, rewards=[0.5])), row_of(failure(123456, 99))]
    Console(file=out, width=200).print(trajectory_table(rows, 200))
    head, _, first, second = [line for line in out.getvalue().splitlines() if line.strip()]
    for title, one, other in (("task", "7", "123456"), ("rollout", "3", "99"), ("reward", "0.5", "-")):
        end = head.index(title) + len(title)
        assert first[:end].split()[-1] == one
        assert second[:end].split()[-1] == other
    for title, one, other in (("environment", "puzzle", "puzzle"), ("stop reason", "terminated", "failed")):
        start = head.index(title)
        assert first[start:].startswith(one)
        assert second[start:].startswith(other)
    assert second.rstrip().endswith(
        "infrastructure (generation): the endpoint is gone after 5 tries: connection refused"
    )


def test_titles_stand_out_on_a_terminal() -> None:
    out = io.StringIO()
    record = trajectory(7, 3, stop_reason="truncated")
    print_trajectory(record, row_of(record), Console(file=out, force_terminal=True, color_system="standard"))
    text = out.getvalue()
    assert text.startswith("\x1b[1mtask 7, rollout 3\x1b[0m  puzzle")
    for bold in ("prompt", "turn 1", "task 7, rollout 3"):
        assert f"\x1b[1m{bold}\x1b[0m" in text
    assert "\x1b[33mtruncated\x1b[0m" in text
    assert "\x1b[1;32m  assistant\x1b[0m" in text


def test_a_branch_is_what_it_has_beside_earlier_paths() -> None:
    record = agent_trajectory()
    out = io.StringIO()
    print_trajectory(record, row_of(record), Console(file=out, width=100))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert [line for line in lines if line.startswith(("  branches", "  continuity"))] == [
        "  branches     2", "  continuity   2 new, 2 clean",
    ]  # fmt: skip
    first = lines.index("branch 1  after 2 messages, 3 tokens, of an earlier path")
    assert lines[first + 1 : first + 6] == ["  user  2 tokens", "    or so?", "  assistant  2 tokens", "    maybe", ""]
    assert lines[lines.index("branch 2") + 1] == "  user  3 tokens"


def test_a_text_is_indented_by_four_columns_on_a_terminal_and_in_a_pipe() -> None:
    words = "one two three four five six seven eight nine ten"
    record = trajectory(7, 3, messages=[message("user", words, 0), message("assistant", f"  {words}", 1)])
    for terminal in (True, False):
        out = io.StringIO()
        print_trajectory(
            record, row_of(record), Console(file=out, width=20, force_terminal=terminal, color_system=None)
        )
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        if terminal:
            wrapped = ["    one two three", "    four five six", "    seven eight nine", "    ten"]
            assert lines[lines.index(wrapped[0]) :][:4] == wrapped
            assert "      one two three" in lines
        else:
            assert f"    {words}" in lines
            assert f"      {words}" in lines
