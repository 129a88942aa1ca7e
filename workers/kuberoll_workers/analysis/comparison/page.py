"""Comparison of two runs as a self-contained HTML page."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.analysis.comparison.compare import ChangedTask, Comparison, EnvironmentComparison
from kuberoll_workers.analysis.report.page import assemble


def render(comparison: Comparison) -> bytes:
    """The page in UTF-8; see `assemble` for its safety."""
    first, second = comparison.runs
    document = {
        "runs": comparison.runs,
        "notes": comparison.settings.notes,
        "paired": comparison.settings.same_tasks,
        "settings": {"different": comparison.settings.different, "equal": comparison.settings.equal},
        "environments": [_environment(part) for part in comparison.environments],
    }
    return assemble(
        "comparison",
        f"{first['location']} and {second['location']}",
        document,
        [*comparison.browsed[0], *comparison.browsed[1]],
        offered=comparison.offered,
        runs=["A"] * len(comparison.browsed[0]) + ["B"] * len(comparison.browsed[1]),
    )


def _environment(part: EnvironmentComparison) -> dict[str, Any]:
    changes = part.changes
    return {
        "name": part.name,
        "metrics": [metric.as_json() for metric in part.metrics],
        "changes": None
        if changes is None
        else {
            "better": changes.better,
            "worse": changes.worse,
            "equal": changes.equal,
            "points": changes.points,
            "listed": [_task(task) for task in changes.listed],
        },
    }


def _task(task: ChangedTask) -> dict[str, Any]:
    return {
        "task": task.task,
        "environment": task.environment,
        "first": task.first,
        "second": task.second,
        "rollouts": task.rollouts,
    }
