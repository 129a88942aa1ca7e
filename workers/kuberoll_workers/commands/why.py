"""`kuberoll why`: says what happened to a trajectory, and whose doing it was."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from kuberoll_workers.analysis.why import ReasonCount
    from kuberoll_workers.data.record import Partial, TrajectoryKey
    from kuberoll_workers.output.run_files import RunFiles

_KEY: Final = re.compile(r"(\d{1,18})[/-](\d{1,18})")


@click.command()
@click.argument("run", metavar="DIR|URI")
@click.argument("key", metavar="[TASK/ROLLOUT]", required=False)
def why(run: str, key: str | None) -> None:
    """Say what happened to a trajectory, in order, and whose doing it was.

    DIR|URI is the output of a run: a directory, or s3://…, gs://…. TASK/ROLLOUT names the trajectory, as 17/3; without
    it, what went wrong in the whole run is counted by its reason. The exit code is 1 if there is no such trajectory,
    and 2 if there is no run, or it cannot be read.
    """
    from kuberoll_workers.analysis.why import counted, story
    from kuberoll_workers.data.record import RecordError, TrajectoryKey
    from kuberoll_workers.output import records
    from kuberoll_workers.output.run_directory import RunRefused
    from kuberoll_workers.output.run_files import NotARun, RunFiles

    match = None if key is None else _KEY.fullmatch(key)
    if key is not None and match is None:
        raise click.BadParameter(f"{key!r} names no trajectory; give its task and rollout index, as 17/3")
    try:
        files = RunFiles(run)
        if match is None:
            click.echo(visible(_table(counted(files.read()), run)))
            return
        wanted = TrajectoryKey(int(match[1]), int(match[2]))
        end = next((record for record in files.read() if record.key == wanted), None)
        failures = (record for record in records.failures(files.storage) if record.key == wanted)
        earlier = sorted((record for record in failures if record != end), key=lambda record: record.attempt)
        partial = _partial(files, wanted) if end is None else None
    except (NotARun, RecordError, RunRefused, OSError) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    if end is None and partial is None and not earlier:
        click.echo(f"{run}: no such trajectory: it has not begun, or no turn of it is complete", err=True)
        sys.exit(1)
    click.echo(visible("\n".join(story(end, earlier, partial))))


def _partial(files: RunFiles, key: TrajectoryKey) -> Partial | None:
    """The journaled turns of a trajectory that has not ended, of a run in a directory; None: there are none."""
    from kuberoll_workers.output.storage import DirectoryStorage
    from kuberoll_workers.output.turn_log import read_turns

    if not isinstance(files.storage, DirectoryStorage):
        return None
    return read_turns(files.storage.path, key)


def _table(found: list[ReasonCount], run: str) -> str:
    return "\n".join(_lines(found, run))


def _lines(found: list[ReasonCount], run: str) -> Iterator[str]:
    from kuberoll_workers.data.causes import REASONS

    if not found:
        yield "nothing went wrong"
        return
    rows = [("whose", "reason", "failed", "went on", "seconds", "tokens", "example", "")]
    for one in found:
        known = REASONS.get(one.reason)
        rows.append(
            (
                one.kind,
                one.reason,
                str(one.failures),
                str(one.incidents),
                f"{one.seconds:.1f}",
                str(one.tokens),
                "/".join(map(str, one.example)),
                "" if known is None else known.words,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) if 2 <= column < 6 else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()
    example = "/".join(map(str, found[0].example))
    yield f"One of them in full: kuberoll why {run} {example}"
