"""`kuberoll certify`: shows before a run whether the rewards of each row can be trusted."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_workers.dataset.certificates import Certificate

_MOST_ROWS = 5


@click.command()
@click.argument("manifest", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest.")
@click.option(
    "--certificates", metavar="FILE", help="File of the certificates.  [default: dataset.certify.file, or beside it]"
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1, max=1000),
    metavar="K",
    help="How often each answer is graded.  [default: dataset.certify.repetitions]",
)
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="Rows at a time.  [default: processors]")
@click.option("--force", is_flag=True, help="Try rows again that have a valid certificate.")
@click.option("--strict", is_flag=True, help="Exit with 1 also if something of a row is unproven.")
def certify(
    manifest: Path,
    overrides: tuple[str, ...],
    certificates: str | None,
    repetitions: int | None,
    parallel: int | None,
    force: bool,
    strict: bool,
) -> None:
    """Grade right and wrong answers to each row of a job, before any engine runs.

    The reference solution of a row must get the full reward, each time; no answer, and known evasions, must not. What
    was found is written as a certificate of each row, beside the dataset. Rows that have a valid one are not tried
    again. `dataset.certify` in the job has a run demand them.

    The exit code is 0 if no row is refused, 1 if one is or is invalid, and 2 if the job cannot be read.

    \b
    Examples:
      kuberoll certify job.yaml
      kuberoll certify job.yaml --repetitions 20 --parallel 1
    """
    from kuberoll_api.manifest.loading import ManifestError, load_job

    try:
        job = load_job(manifest, overrides)
    except ManifestError as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)

    import asyncio
    import os

    from rich.console import Console

    from kuberoll_workers.certification.files import NotWritable
    from kuberoll_workers.certification.jobs import certify_job
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.dataset.certificates import location_of
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.dataset.sources import resolve_uri
    from kuberoll_workers.environments.registry import UnusableEnvironment
    from kuberoll_workers.local.options import import_directories

    base = manifest.parent
    # A module of an environment may be next to the manifest, or in the working directory.
    sys.path[:0] = import_directories(base)
    console = Console(highlight=False, stderr=True)
    location = location_of(job, base) if certificates is None else resolve_uri(certificates, Path.cwd())
    found: list[Certificate] = []
    invalid: list[str] = []
    try:
        with console.status("certifying") as status:

            def done(some: Sequence[Certificate], *, tried: bool) -> None:
                found.extend(some)
                status.update(f"certifying: {len(found):,} rows{'' if tried else ', with certificates so far'}")

            asyncio.run(
                certify_job(
                    job,
                    base,
                    location,
                    repetitions=repetitions or job.spec.dataset.certify.repetitions,
                    parallel=parallel or os.cpu_count() or 1,
                    force=force,
                    done=done,
                    invalid=lambda error: invalid.append(with_frames(error)),
                )
            )
    except (DatasetError, UnusableEnvironment) as error:
        # That rows are invalid may be why there are none.
        click.echo(visible("\n".join([*invalid[:_MOST_ROWS], with_frames(error)])), err=True)
        sys.exit(2)
    except NotWritable as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    _print(Console(highlight=False), job, found, invalid, location)
    wrong = bool(invalid) or any(one.verdict == "refused" or (strict and one.verdict == "unproven") for one in found)
    sys.exit(1 if wrong else 0)


def _print(
    console: Console, job: RolloutJob, found: Sequence[Certificate], invalid: Sequence[str], location: str
) -> None:
    """Print a table by environment, and what was found by its class."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("environment", overflow="ellipsis", no_wrap=True, min_width=12)
    for name in ("rows", "certified", "refused", "unproven", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for spec in job.spec.environments:
        own = [one for one in found if one.environment == spec.name]
        if not own:
            continue
        counts = Counter(one.verdict for one in own)
        verdicts = (f"{counts[verdict]:,}" for verdict in ("certified", "refused", "unproven"))
        table.add_row(spec.name, f"{len(own):,}", *verdicts, f"{sum(one.seconds for one in own):,.1f}")
    console.print(table)
    if invalid:
        console.print(Text(visible(f"refused, the row is invalid: {_rows(len(invalid))}")), soft_wrap=True)
    for line in itertools.chain(_first(invalid), _lines(found)):
        console.print(Text(visible(line)), soft_wrap=True)
    console.print(Text(f"  {location}"), soft_wrap=True)


def _lines(found: Sequence[Certificate]) -> Iterator[str]:
    """What was found, by its class, each with the first rows."""
    from kuberoll_workers.certification.verdicts import CLASSES

    refusals: dict[str, dict[str, str]] = defaultdict(dict)
    warnings: dict[str, str] = {}
    unproven: dict[str, list[str]] = defaultdict(list)
    for one in found:
        for finding in one.findings:
            refusals[finding.kind].setdefault(one.where, finding.text)
        for finding in one.warnings:
            warnings.setdefault(one.where, finding.text)
        for reason in one.unproven:
            unproven[reason].append(one.where)
    for kind, words in CLASSES.items():
        if rows := refusals.get(kind):
            yield f"refused, {words} ({kind}): {_rows(len(rows))}"
            yield from _first(_placed(rows))
    if warnings:
        yield f"to look at: {_rows(len(warnings))}"
        yield from _first(_placed(warnings))
    for reason, places in unproven.items():
        more = f" and {len(places) - _MOST_ROWS:,} more" if len(places) > _MOST_ROWS else ""
        yield f"unproven, {reason}: {_rows(len(places))} ({', '.join(places[:_MOST_ROWS])}{more})"


def _placed(rows: Mapping[str, str]) -> list[str]:
    return [f"{where}: {text}" for where, text in rows.items()]


def _first(lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:_MOST_ROWS]:
        yield f"  {line}"
    if len(lines) > _MOST_ROWS:
        yield f"  and {len(lines) - _MOST_ROWS:,} more"


def _rows(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"
