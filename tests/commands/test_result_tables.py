"""Tables of a run's result fit a terminal of 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.commands import aggregate as aggregate_command
from kuberoll_workers.commands import console as run_command
from kuberoll_workers.data.stop_reasons import StopReason
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.report.runs import store, trajectory

REASONS: tuple[StopReason, ...] = ("terminated", "truncated", "max_turns")


@pytest.fixture
def aggregates(tmp_path: Path) -> Aggregates:
    names = ("sliding_puzzle", "an_environment_with_a_name_that_is_long")
    records = [
        trajectory(
            2 * task + number, rollout, environment=name, rewards=[float(rollout % 2)], stop_reason=REASONS[rollout % 3]
        )
        for number, name in enumerate(names)
        for task in range(40)
        for rollout in range(8)
    ]
    return aggregate([RunFiles(store(tmp_path / "run", records))])


def test_the_result_of_a_run(aggregates: Aggregates) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(run_command.result_table(aggregates.summaries))
    text = out.getvalue()
    assert "…" not in text
    assert all(f"{reason} " in text for reason in REASONS)
    assert text.splitlines()[1].split() == [
        "environment", "done", "failed", "reward", "turns", "tokens", "stop", "reasons",
    ]  # fmt: skip


def test_the_aggregates(aggregates: Aggregates) -> None:
    out = io.StringIO()
    aggregate_command.show(aggregates, [], "runs/one", Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text
    assert all(cell in text for cell in ("0.45 to 0.55", "pass@1 50.0%", "pass@8 100.0%"))
