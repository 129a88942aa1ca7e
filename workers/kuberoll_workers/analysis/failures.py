"""Failures in a terminal: each distinct cause with the person's own lines, the dataset row, and where to read on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.text import Text

from kuberoll_workers.data.failure_causes import FailureCause, FailureCauses
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.text import one_line, visible
from kuberoll_workers.data.tracebacks import excerpt, near_path

if TYPE_CHECKING:
    from kuberoll_workers.analysis.aggregation.environments import EnvironmentSummary

SHOWN_CAUSES = 5
_SHOWN_FRAMES = 3
_CAUSE = 300
_VALUE = 200
_METADATA = 2_000

_PLACES = {
    "prompt": "in making the prompt",
    "generation": "in generation",
    "trajectory": "in the rollout",
    "group": "with their prompt group",
}


def print_causes(causes: Sequence[FailureCause], location: str, console: Console) -> None:
    """Print the most frequent causes, the person's own frames, the first row of each, and commands that show more.

    Args:
        causes: The most frequent first.
        location: The run's directory or URI, for the commands.
    """

    def line(text: str, style: str = "") -> None:
        console.print(Text(visible(text), style=style), soft_wrap=True)

    place = shlex.quote(location)
    for cause in causes[:SHOWN_CAUSES]:
        first = cause.first
        line(headline(cause), "yellow")
        for text in excerpt(first.frames or (), _SHOWN_FRAMES):
            line(f"    {text}")
        line(f"  first: {origin(first)}")
        line(f"  more:  kuberoll show {place} --task {first.task_index} --rollout {first.rollout_index}")
    rest = sum(cause.count for cause in causes[SHOWN_CAUSES:])
    if rest:
        line(f"{rest} more failed for {len(causes) - SHOWN_CAUSES} other causes", "yellow")
    if causes:
        line(f"All failures: kuberoll show {place} --failed")


def print_failures(causes: FailureCauses, location: str, console: Console) -> None:
    """Print each distinct cause with the whole traceback, dataset row and episode state of its first failure."""
    shown = causes.by_count()
    for cause in shown:
        first = cause.first
        console.print()
        console.print(Text(visible(headline(cause)), style="yellow"), soft_wrap=True)
        line = f"first: {origin(first)}, attempt {first.attempt}"
        if first.metadata is not None:
            line = f"{line}\nmetadata: {json_line(first.metadata, _METADATA)}"
        for text in (*line.split("\n"), *visible(first.traceback or "").rstrip().split("\n")):
            console.print(Text(f"    {text}".rstrip()), soft_wrap=True)
    if causes.others:
        console.print(f"{causes.others} more failed for other causes", soft_wrap=True)
    first = shown[0].first
    line = f"--task {first.task_index} --rollout {first.rollout_index}"
    console.print(Text(f"\nWith its turns: kuberoll show {shlex.quote(location)} {line}", style="dim"), soft_wrap=True)


def print_metrics_failures(summaries: Mapping[str, EnvironmentSummary], location: str, console: Console) -> None:
    """Print which environments' own metrics are missing, and the frames of their code that failed."""
    from kuberoll_workers.analysis.aggregation.environments import MetricsFailure

    for name, summary in summaries.items():
        if isinstance(found := summary.metrics, MetricsFailure):
            text = f"environment {name}: its own metrics are missing: {one_line(found.error, _CAUSE)}"
            console.print(Text(visible(text), style="yellow"), soft_wrap=True)
            for frame in excerpt(found.traceback.frames if found.traceback else (), _SHOWN_FRAMES):
                console.print(Text(visible(f"    {frame}")), soft_wrap=True)
            if found.traceback is not None:
                again = f"kuberoll aggregate {shlex.quote(location)} --manifest JOB.yaml"
                console.print(
                    Text(f"  more:  environment_metrics in aggregate_metrics.json; again: {again}"), soft_wrap=True
                )


def headline(cause: FailureCause) -> str:
    """Number of failures, where, and why, on one line."""
    first, count = cause.first, cause.count
    if first.kind == "data":
        place = f"for an unusable dataset row of environment {first.task_name}"
    else:
        place = _PLACES.get(first.stage, f"in environment {first.task_name}")
    text = one_line(first.cause, _CAUSE)
    trajectories = "1 trajectory" if count == 1 else f"{count} trajectories"
    return f"{trajectories} failed {place}: {text}{'' if cause.same_text else ' (and similar messages)'}"


def origin(failure: FailureRecord) -> str:
    """The task, sample and dataset row of a failure, on one line."""
    parts = [f"task {failure.task_index}, rollout {failure.rollout_index}"]
    if failure.row is not None:
        parts.append(f"from {one_line(near_path(failure.row), _VALUE)}")
    if failure.idx is not None:
        parts.append(f"idx {json_line(failure.idx, _VALUE)}")
    return ", ".join(parts)


def json_line(value: object, limit: int) -> str:
    """The beginning of a value's JSON text, on one line."""
    return one_line(orjson.dumps(value).decode(), limit)
