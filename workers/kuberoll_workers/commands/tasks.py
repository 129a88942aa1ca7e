"""`kuberoll tasks`: tasks whose trajectories have machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from kuberoll_workers.harbor.checking import Checked, Played


@click.group()
def tasks() -> None:
    """Try tasks that are played in machines of their own."""


@tasks.command()
@click.argument("directory", metavar="TASKS", type=click.Path(path_type=Path))
@click.option("--images", metavar="PREFIX", help="Where images are that `kuberoll images build` has made.")
@click.option(
    "--network",
    type=click.Choice(["None", "All"]),
    help="The most that machines may reach; absent: tasks that ask for a network are refused.",
)
@click.option(
    "--allow",
    metavar="HOST",
    multiple=True,
    help="A host that machines may reach, by a proxy; any number. Not with --network.",
)
@click.option("--parallel", type=click.IntRange(min=1), default=2, show_default=True, help="Tasks at a time.")
def check(directory: Path, images: str | None, network: str | None, allow: tuple[str, ...], parallel: int) -> None:
    """Play tasks with their solution, and without any agent; no model is needed.

    TASKS is a task's directory or a folder of tasks, Harbor's or without images. Exits with 1 if a task cannot be
    played, or if its solution is worth no more than doing nothing.
    """
    import asyncio

    from pydantic import ValidationError

    from kuberoll_api.model.sandboxes import Sandbox
    from kuberoll_workers.harbor.checking import check_tasks
    from kuberoll_workers.harbor.mistakes import TaskError
    from kuberoll_workers.harbor.task import read_tasks
    from kuberoll_workers.sandboxes.drivers import find_sandboxes
    from kuberoll_workers.sandboxes.errors import SandboxUnavailable

    if allow and network is not None:
        raise click.UsageError("--allow names what machines may reach, and --network does, too: remove one of them")
    given: dict[str, object] = {"builtImages": images} if images else {}
    if network is not None:
        given["network"] = {"mode": network}
    elif allow:
        given["network"] = {"mode": "Allowlist", "allowedHosts": list(allow)}
    try:
        options = Sandbox.model_validate(given)
    except ValidationError as error:
        raise click.BadParameter("; ".join(one["msg"] for one in error.errors()), param_hint="--allow") from error
    found: list[Checked] = []

    async def run() -> None:
        sandboxes = find_sandboxes("")
        try:
            await check_tasks(read, options, sandboxes, parallel=parallel, done=done)
        finally:
            await sandboxes.close()

    def done(one: Checked) -> None:
        found.append(one)
        if one.problem is not None:
            click.echo(visible(f"{one.task}: {one.problem}"), err=True)

    try:
        read = read_tasks(directory)
        asyncio.run(run())
    except (TaskError, SandboxUnavailable) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    order = {task.name: number for number, task in enumerate(read)}
    click.echo(_table(sorted(found, key=lambda one: order[one.task])))
    if any(one.problem is not None for one in found):
        sys.exit(1)


def _table(found: Sequence[Checked]) -> str:
    rows = [("task", "solution", "nothing", "seconds")]
    rows += [
        (one.task, _reward(one.solution), _reward(one.nothing), f"{one.solution.seconds + one.nothing.seconds:.1f}")
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {solution:>{widths[1]}}  {nothing:>{widths[2]}}  {seconds:>{widths[3]}}"
        for name, solution, nothing, seconds in rows
    ]
    wrong = sum(one.problem is not None for one in found)
    return visible("\n".join([*lines, f"{len(found)} tasks: {len(found) - wrong} good, {wrong} not"]))


def _reward(played: Played) -> str:
    return "failed" if played.reward is None else f"{played.reward:g}"
