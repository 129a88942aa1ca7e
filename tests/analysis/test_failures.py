"""Failures in a terminal: where they were, and the commands that show more."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kuberoll_workers.analysis.failures import headline, print_causes, print_failures
from kuberoll_workers.data.failure_causes import FailureCauses
from tests.analysis.report.runs import failure


def test_the_commands_can_be_typed_whatever_the_run_is_called() -> None:
    causes = FailureCauses.of([failure(3, 1), replace(failure(4), cause="another")])
    short, long = io.StringIO(), io.StringIO()
    print_causes(causes.by_count(), "runs/my run", Console(file=short, width=40))
    assert short.getvalue().splitlines() == [
        "1 trajectory failed in generation: the endpoint is gone after 5 tries: connection refused",
        "  first: task 3, rollout 1",
        "  more:  kuberoll show 'runs/my run' --task 3 --rollout 1",
        "1 trajectory failed in generation: another",
        "  first: task 4, rollout 0",
        "  more:  kuberoll show 'runs/my run' --task 4 --rollout 0",
        "All failures: kuberoll show 'runs/my run' --failed",
    ]
    print_failures(causes, "runs/my run", Console(file=long, width=40))
    assert long.getvalue().endswith("\n\nWith its turns: kuberoll show 'runs/my run' --task 3 --rollout 1\n")


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        ("prompt", "in making the prompt"),
        ("generation", "in generation"),
        ("environment", "in environment puzzle"),
        ("trajectory", "in the rollout"),
        ("group", "with their prompt group"),
    ],
)
def test_the_place_of_a_failure(stage: str, place: str) -> None:
    (cause,) = FailureCauses.of([replace(failure(task), stage=stage) for task in range(2)]).by_count()
    assert headline(cause).startswith(f"2 trajectories failed {place}: the endpoint is gone")


def test_on_a_terminal_causes_stand_out_and_hints_do_not() -> None:
    causes = FailureCauses.of([failure(3, 1)])
    short, long = io.StringIO(), io.StringIO()
    print_causes(causes.by_count(), "run", Console(file=short, force_terminal=True, color_system="standard"))
    print_failures(causes, "run", Console(file=long, force_terminal=True, color_system="standard"))
    for out in (short, long):
        assert "\x1b[33m1 trajectory failed in generation: " in out.getvalue()
    assert "\x1b[2mWith its turns: kuberoll show run --task 3 --rollout 1\x1b[0m" in long.getvalue()
