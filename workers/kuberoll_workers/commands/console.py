"""Progress of a run: a bar and a table on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from kuberoll_api.metrics import Metric
from kuberoll_workers.analysis.failures import print_causes, print_metrics_failures
from kuberoll_workers.commands.environment_table import environment_table
from kuberoll_workers.data.text import clock, duration, visible
from kuberoll_workers.local.reporter import Reporter, RunProgress, RunResult
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.meters import series_name

if TYPE_CHECKING:
    from kuberoll_workers.analysis.aggregation.aggregates import EnvironmentSummary

LOG_SECONDS = 5.0
START_LOG_SECONDS = 10.0
FIRST_LOG_SECONDS = 1.0
_LINK_CHARACTERS = 60


def reporter_for(console: Console) -> Reporter:
    """The reporter for a console: a bar on a terminal, else log lines."""
    return BarReporter(console) if console.is_terminal else LogReporter(console)


class LogReporter:
    """Plain lines; progress every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._next_start = LOG_SECONDS

    def note(self, text: str) -> None:
        self._print(text)

    def link(self, name: str, url: str) -> None:
        self._print(f"{name}: {url}")

    def starting(self, name: str, seconds: float) -> None:
        if seconds >= self._next_start:
            self._next_start = seconds + START_LOG_SECONDS
            self._print(f"{name}: {seconds:.0f} s so far")

    def phase(self, name: str, seconds: float) -> None:
        self._next_start = LOG_SECONDS
        self._print(f"{name}: {seconds:.1f} s")

    def progress(self, totals: RunProgress) -> None:
        # The first line comes when there is something to count.
        if time.monotonic() >= self._next and totals.seconds >= FIRST_LOG_SECONDS:
            self._next = time.monotonic() + LOG_SECONDS
            of = "" if totals.planned is None else f"/{totals.planned}"
            self._print(f"{totals.completed}{of} trajectories, {describe(totals)}")

    def finish(self, result: RunResult) -> None:
        _print_result(self._console, result)

    def close(self) -> None:
        return None

    def _print(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)


class _Bar(Progress):
    """A bar with a line of counts below it, which needs the width of the terminal for itself."""

    counts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.counts:
            yield Text(self.counts, style="dim")


class BarReporter:
    """One bar at the bottom of the terminal, with everything else above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[clock]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, clock="")
        self._bar.start()

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)

    def link(self, name: str, url: str) -> None:
        # A terminal opens it from its short form.
        short = url if len(url) <= _LINK_CHARACTERS else url[: _LINK_CHARACTERS - 1] + "…"
        self._console.print(Text.assemble(f"{name}: ", (short, f"link {url}")), soft_wrap=True)

    def starting(self, name: str, seconds: float) -> None:
        self._bar.update(self._task, description=f"starting: {name}", clock=clock(seconds))

    def phase(self, name: str, seconds: float) -> None:
        self._console.print(Text(f"{name}: {seconds:.1f} s", style="dim"))

    def progress(self, totals: RunProgress) -> None:
        self._bar.counts = describe(totals)
        self._bar.update(
            self._task,
            description="rollouts",
            total=totals.planned,
            completed=totals.completed,
            clock=clock(totals.seconds),
        )

    def finish(self, result: RunResult) -> None:
        self.close()
        _print_result(self._console, result)

    def close(self) -> None:
        self._bar.stop()


def describe(totals: RunProgress) -> str:
    """Rates of this run without resumed trajectories, mean reward, failures and remaining time."""
    progress = totals.progress
    seconds = max(totals.seconds, 1e-9)
    tokens = progress.received_tokens + totals.tokens_in_flight
    parts = [
        f"{progress.generating} generating",
        f"{progress.stepping} in environments{_sandboxes_now(progress.meters)}",
        f"{progress.ended_turns / seconds:.1f} turns/s",
        f"{tokens / seconds:.0f} tokens/s",
    ]
    if progress.trajectories:
        parts.append(f"reward {progress.reward_sum / progress.trajectories:.3f}")
    if progress.failed:
        unscored = f" ({progress.unscored} unscored)" if progress.unscored else ""
        parts.append(f"{progress.failed} failed{unscored}")
    if progress.dropped:
        parts.append(f"{progress.dropped} dropped")
    remaining = totals.remaining_seconds
    if totals.planned is not None:
        parts.append("ETA " + ("-" if remaining is None else clock(remaining)))
    return ", ".join(parts)


def _sandboxes_now(meters: Mapping[str, float]) -> str:
    """Sandboxes in use, those that are waited for, and what has gone wrong with others; empty without sandboxes."""
    if metrics.SANDBOXES_IN_USE.name not in meters:
        return ""
    counts = {
        "sandboxes": meters[metrics.SANDBOXES_IN_USE.name],
        "starting": meters[metrics.SANDBOXES_WAITING.name],
        "lost": meters[metrics.SANDBOXES_LOST.name],
        "left": meters[metrics.SANDBOXES_LEFT.name],
    }
    return f" ({', '.join(f'{count:.0f} {name}' for name, count in counts.items() if count or name == 'sandboxes')})"


def sandboxes_text(meters: Mapping[str, float]) -> str:
    """What has become of the run's sandboxes; empty without sandboxes."""
    if metrics.SANDBOXES_IN_USE.name not in meters:
        return ""

    def count(metric: Metric, *labels: str) -> str:
        return f"{meters[series_name((metric.name, labels))]:.0f}"

    return (
        f"sandboxes: {count(metrics.SANDBOX_STARTS, 'started')} started, "
        f"{count(metrics.SANDBOX_STARTS, 'failed')} could not be, {count(metrics.SANDBOXES_LOST)} lost, "
        f"{count(metrics.SANDBOX_REMOVALS, 'failed')} left behind"
    )


def dropped_text(tail: DropReport) -> str:
    """Number of dropped trajectories by reason, and how they differ from those that were kept."""
    reasons = ", ".join(f"{lot.trajectories} {reason}" for reason, lot in sorted(tail.dropped.items()))
    lots = {"kept": tail.kept, **dict(sorted(tail.dropped.items()))}
    means = "; ".join(
        f"{name}: {lot.turns / lot.trajectories:.1f} turns, reward {lot.reward / lot.trajectories:.3f}"
        for name, lot in lots.items()
        if lot.trajectories
    )
    return f"dropped: {reasons} ({tail.unfinished} stopped before they ended). On average {means}"


def _print_result(console: Console, result: RunResult) -> None:
    if result.summaries:
        console.print(result_table(result.summaries))
        print_causes(result.causes, result.location, console)
        if result.unscored:
            text = (
                f"{result.unscored} of them only lack a score: kuberoll rescore {result.location} --failed --manifest "
                "JOB.yaml, or --resume, scores what is stored"
            )
            console.print(Text(visible(text), style="yellow"), soft_wrap=True)
        print_metrics_failures(result.summaries, result.location, console)
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    console.print(Text(f"time: {times}"), soft_wrap=True)
    for line in result.summary:
        console.print(Text(visible(line)), soft_wrap=True)
    if result.tail.dropped:
        console.print(Text(dropped_text(result.tail)), soft_wrap=True)
    if result.totals is not None and result.totals.progress.turns:
        console.print(Text(_turns(result.totals)), soft_wrap=True)
    if result.totals is not None and (text := sandboxes_text(result.totals.progress.meters)):
        console.print(Text(text), soft_wrap=True)
    for path in file_lines(result.files):
        console.print(Text(visible(f"  {path}")), soft_wrap=True)
    if result.problem:
        console.print(Text(visible(result.problem), style="bold red"), soft_wrap=True)


def file_lines(files: Sequence[str]) -> list[str]:
    """The files of a run in few lines: many shards share one."""
    shards = [path for path in files if "/shard-" in path]
    others = [path for path in files if "/shard-" not in path]
    if len(shards) > 3:
        shards = [f"{shards[0]} and {len(shards) - 1} more shards"]
    return [*shards, *others]


def _turns(totals: RunProgress) -> str:
    """Averages of a turn in this run, without earlier parts of it."""
    progress = totals.progress
    turns = progress.turns
    return (
        f"per trajectory: {turns / progress.trajectories:.1f} turns; "
        f"per turn: {progress.generated_tokens / turns:.1f} tokens, "
        f"{duration(progress.generation_seconds / turns)} waiting for generation, "
        f"{duration(progress.environment_seconds / turns)} for the environment"
    )


def result_table(summaries: Mapping[str, EnvironmentSummary]) -> Table:
    """Table of the environments of a run that has just ended."""
    return environment_table(
        summaries,
        {
            "done": lambda summary: str(summary.trajectories),
            "failed": lambda summary: str(summary.failed),
            "reward": lambda summary: "-" if summary.mean_reward is None else f"{summary.mean_reward:.3f}",
            "turns": lambda summary: str(summary.turns),
            "tokens": lambda summary: str(summary.generated_tokens),
            "stop reasons": lambda summary: "\n".join(
                f"{reason} {count}" for reason, count in sorted(summary.stop_reasons.items())
            ),
        },
    )
