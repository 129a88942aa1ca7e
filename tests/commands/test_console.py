"""The terminal during a run: plain lines, and a bar that fits 80 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from kuberoll_workers.commands.console import BarReporter, LogReporter, describe, sandboxes_text
from kuberoll_workers.local.reporter import RunProgress
from kuberoll_workers.worker.config import Progress

PROGRESS = RunProgress(
    planned=64,
    progress=Progress(
        trajectories=12, generating=40, stepping=3, turns=30, generated_tokens=300, ended_turns=51,
        received_tokens=600, reward_sum=9.0,
    ),
    seconds=10.0,
    tokens_in_flight=400,
)  # fmt: skip


def test_work_under_way_counts() -> None:
    text = describe(PROGRESS)
    assert text == "40 generating, 3 in environments, 5.1 turns/s, 100 tokens/s, reward 0.750, ETA 0:43"


SANDBOXES = {
    "kuberoll_sandboxes_in_use": 3.0,
    "kuberoll_sandboxes_waiting": 2.0,
    "kuberoll_sandboxes_lost_total": 1.0,
    "kuberoll_sandboxes_left": 0.0,
    "kuberoll_sandbox_starts_total{started}": 1204.0,
    "kuberoll_sandbox_starts_total{failed}": 5.0,
    "kuberoll_sandbox_removals_total{removed}": 1200.0,
    "kuberoll_sandbox_removals_total{failed}": 7.0,
}


def test_sandboxes_are_counted_where_there_are_some() -> None:
    assert "3 in environments (3 sandboxes, 2 starting, 1 lost), " in described(SANDBOXES)
    quiet = {**dict.fromkeys(SANDBOXES, 0.0), "kuberoll_sandboxes_in_use": 3.0}
    assert "3 in environments (3 sandboxes), " in described(quiet)
    assert sandboxes_text(SANDBOXES) == "sandboxes: 1204 started, 5 could not be, 1 lost, 7 left behind"
    assert sandboxes_text({}) == ""


def described(meters: dict[str, float]) -> str:
    progress = replace(PROGRESS.progress, meters=meters)
    return describe(replace(PROGRESS, progress=progress))


def test_a_log_repeats_a_long_phase_with_its_seconds() -> None:
    output = io.StringIO()
    reporter = LogReporter(Console(file=output))
    for seconds in range(32):
        reporter.starting("engine", float(seconds))
    reporter.phase("engine", 32.0)
    reporter.starting("proxy", 1.0)
    assert output.getvalue().splitlines() == [
        "engine: 5 s so far",
        "engine: 15 s so far",
        "engine: 25 s so far",
        "engine: 32.0 s",
    ]


def test_a_terminal_has_the_phase_with_a_clock_and_then_the_counts_below_the_bar() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, highlight=False)
    reporter = BarReporter(console)
    reporter.starting("engine", 75.0)
    reporter._bar.refresh()
    starting = _lines(output)
    reporter.progress(PROGRESS)
    reporter._bar.refresh()
    rollouts = _lines(output)
    reporter.close()
    assert any(line.startswith("starting: engine") and line.rstrip().endswith("1:15") for line in starting)
    assert any(line.startswith("rollouts") and "12/64" in line for line in rollouts)
    assert any(line.startswith("40 generating, 3 in environments") for line in rollouts)
    assert all(len(line) <= 80 for line in rollouts)


def test_a_long_url_is_short_on_a_terminal_and_whole_in_a_log() -> None:
    url = "http://127.0.0.1:9090/graph?" + "&".join(f"g{number}.expr=rate" for number in range(40))
    terminal, log = io.StringIO(), io.StringIO()
    reporter = BarReporter(Console(file=terminal, force_terminal=True, width=80))
    reporter.link("graphs", url)
    reporter.close()
    (line,) = [line for line in _lines(terminal) if "graphs: " in line]
    assert url in line
    assert len(re.sub(r"\x1b\]8;.*?\x1b\\", "", line)) < 80
    LogReporter(Console(file=log)).link("graphs", url)
    assert log.getvalue() == f"graphs: {url}\n"


def _lines(output: io.StringIO) -> list[str]:
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue()))
