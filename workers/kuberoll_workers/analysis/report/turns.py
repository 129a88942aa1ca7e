"""Trajectories in a terminal: as a table, or turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from kuberoll_workers.analysis.failures import json_line
from kuberoll_workers.analysis.paths import shared_messages
from kuberoll_workers.analysis.report.row import TrajectoryRow
from kuberoll_workers.analysis.why import story
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import Branch, DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import look
from kuberoll_workers.data.text import one_line, visible
from kuberoll_workers.output.precedence import EndedRecord

_ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "environment": "yellow", "tool": "yellow"}
_LOOKS = {"plain": "", "limit": "yellow", "failed": "red", "dropped": "dim"}
# Whether a column has numbers, by its title.
_COLUMNS = {
    "task": True,
    "rollout": True,
    "environment": False,
    "reward": True,
    "turns": True,
    "tokens": True,
    "stop reason": False,
}
_CAUSE = 100
_LEAST_CAUSE = 12
_NARROW = 100
_FACT = 400
_METADATA = 2_000


def trajectory_table(rows: Sequence[TrajectoryRow], width: int) -> Table:
    """Table with a row for each trajectory; with causes if any failed, cut to a console's width in characters."""
    padding = 1 if width < _NARROW else 2
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, padding - 1, 0, 1))
    for name, numeric in _COLUMNS.items():
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    causes = any(row.cause for row in rows)
    if causes:
        table.add_column("cause", no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = [
            Text(str(row.key.task_index)),
            Text(str(row.key.rollout_index)),
            Text(one_line(row.environment, 60)),
            Text(_number(row.reward)),
            Text(str(row.turns)),
            Text(str(row.tokens)),
            Text(row.outcome, style=_LOOKS[look(row.outcome)]),
        ]
        table.add_row(*cells, *([Text(_cause(row))] if causes else []))
    if causes:
        # Where a terminal is narrow, only the cause is cut.
        *others, cause = (_width(column) + 1 + padding for column in table.columns)
        table.columns[-1].max_width = max(_LEAST_CAUSE, min(cause, width - sum(others) - 3))
    return table


def _width(column: Column) -> int:
    return max(len(str(column.header)), *(cell.cell_len for cell in column.cells if isinstance(cell, Text)))


def _cause(row: TrajectoryRow) -> str:
    if row.cause is None:
        return ""
    kind, stage, cause = row.cause
    # The stage of a failure of the environment's code is nearly always the step.
    where = row.location or (kind if kind == stage else f"{kind} ({stage})")
    return one_line(f"{where}: {cause}", _CAUSE)


def print_trajectory(record: EndedRecord, row: TrajectoryRow, console: Console) -> None:
    """Print one trajectory: its results, its prompt, then each turn with reward and seconds."""
    title = Text(f"task {row.key.task_index}, rollout {row.key.rollout_index}", style="bold")
    title.append(f"  {one_line(row.environment, 60)}", style="not bold")
    console.print(title, soft_wrap=True)
    _print_facts(record, row, console)
    for turn, messages in groupby(record.messages, key=lambda message: message.turn):
        console.print()
        console.print(_heading(record, turn), soft_wrap=True)
        for message in messages:
            _print_message(message, console)
    for number, branch in enumerate((isinstance(record, TrajectoryRecord) and record.branches) or (), start=1):
        _print_branch(number, branch, console)
    if isinstance(record, FailureRecord):
        console.print()
        tries = "1 try" if record.tries == 1 else f"{record.tries} tries"
        console.print(Text(f"failed: {record.kind} ({record.stage}), after {tries}", style="bold red"))
        _print_text(visible(record.cause), console)
        if record.traceback is not None:
            console.print()
            _print_text(visible(record.traceback.rstrip()), console)
    if record.incidents is not None:
        console.print()
        console.print(Text("what happened on its way", style="bold"))
        _print_text(visible("\n".join(story(record)[1:])), console)


def _print_branch(number: int, branch: Branch, console: Console) -> None:
    """Print what a branch has beside earlier paths."""
    shared = shared_messages(branch)
    console.print()
    heading = Text(f"branch {number}", style="bold")
    if shared:
        tokens = sum(len(message.token_ids) for message in branch.messages[:shared])
        heading.append(f"  after {shared} messages, {tokens} tokens, of an earlier path", style="not bold dim")
    console.print(heading, soft_wrap=True)
    for message in branch.messages[shared:]:
        _print_message(message, console)


def _print_facts(record: EndedRecord, row: TrajectoryRow, console: Console) -> None:
    facts = {
        "reward": _number(row.reward),
        "stop reason": row.outcome,
        "turns": str(row.turns),
        "tokens": f"{row.prompt_tokens} prompt, {row.generated_tokens} generated, {row.environment_tokens} environment",
    }
    if isinstance(record, DroppedRecord):
        facts["stop reason"] = f"dropped ({record.reason}), {record.stop_reason or 'stopped on its way'}"
    if row.generation_seconds is not None and row.environment_seconds is not None:
        facts["seconds"] = f"{row.generation_seconds:.3f} generation, {row.environment_seconds:.3f} environment"
    if isinstance(record, TrajectoryRecord):
        facts |= {f"reward of {name}": _number(sum(values)) for name, values in record.reward_parts.items()}
        facts |= {} if record.answer is None else {"answer": record.answer}
        facts |= {} if not record.branches else {"branches": str(len(record.branches))}
        facts |= {} if not record.continuity else {"continuity": continuity_text(record.continuity)}
    facts |= {} if record.idx is None else {"idx": json_line(record.idx, _FACT)}
    if isinstance(record, FailureRecord) and record.row is not None:
        facts["row"] = record.row
    facts |= {} if record.metadata is None else {"metadata": json_line(record.metadata, _METADATA)}
    facts |= {"seed": "none" if record.seed is None else str(record.seed), "attempt": str(record.attempt)}
    for name, value in facts.items():
        line = Text(f"  {one_line(name, 40):<12} ", style="dim")
        style = f"not dim {_LOOKS[look(row.outcome)]}" if "stop" in name else "not dim"
        line.append(one_line(value, _METADATA), style=style)
        console.print(line, soft_wrap=True)


def _heading(record: EndedRecord, turn: int) -> Text:
    if turn == 0:
        return Text("prompt", style="bold")
    heading = Text(f"turn {turn}", style="bold")
    facts = []
    if not isinstance(record, FailureRecord) and turn <= len(record.rewards):
        facts.append(f"reward {_number(record.rewards[turn - 1])}")
    if isinstance(record, TrajectoryRecord):
        timing = record.timing
        for name, seconds in (("generation", timing.generation_seconds), ("environment", timing.environment_seconds)):
            if turn <= len(seconds):
                facts.append(f"{name} {seconds[turn - 1]:.3f} s")
    heading.append("".join(f"  {fact}" for fact in facts), style="not bold dim")
    return heading


def _print_message(message: Message, console: Console) -> None:
    label = Text(f"  {one_line(message.role, 40)}", style=f"bold {_ROLES.get(message.role, 'cyan')}")
    label.append(f"  {len(message.token_ids)} tokens", style="not bold dim")
    if message.truncated:
        label.append("  truncated", style="bold yellow")
    console.print(label, soft_wrap=True)
    _print_text(visible(message.content), console)


def _print_text(text: str, console: Console) -> None:
    if console.is_terminal:
        console.print(Padding(Text(text), (0, 0, 0, 4)))
    else:
        # The reader of a pipe expects unchanged lines.
        for line in text.split("\n"):
            console.print(Text(f"    {line}".rstrip()), soft_wrap=True)


def continuity_text(counts: Mapping[str, int]) -> str:
    """How an agent's calls continued others."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
