"""`kuberoll images`: images of tasks' machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from kuberoll_workers.harbor.building import Built


@click.group()
def images() -> None:
    """Build the images that tasks need."""


@images.command()
@click.argument("tasks", type=click.Path(path_type=Path))
@click.option("--tag", "prefix", metavar="PREFIX", required=True, help="Name of the images; digests become their tags.")
@click.option(
    "--builder",
    "builder_name",
    type=click.Choice(["docker", "podman", "buildah"]),
    help="The program that builds.  [default: the first of these that is installed]",
)
@click.option("--push", is_flag=True, help="Push them to the registry that PREFIX names.")
@click.option("--layout", type=click.Path(path_type=Path), metavar="DIR", help="Add them to an OCI layout.")
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Builds at a time.")
@click.option(
    "--option", "options", multiple=True, metavar="TEXT", help="Argument for the builder's `build`; repeatable."
)
def build(
    tasks: Path,
    prefix: str,
    builder_name: Literal["docker", "podman", "buildah"] | None,
    push: bool,
    layout: Path | None,
    parallel: int,
    options: tuple[str, ...],
) -> None:
    """Build the images of Harbor's tasks: of each Dockerfile once, as PREFIX:DIGEST.

    TASKS is a task's directory or a folder of tasks, in which nothing is written. An image that is there already is not
    built again: its digest is that of the Dockerfile's directory. Without --push and --layout the images stay in the
    builder's own store. Tasks with a docker_image need none.
    """
    import asyncio

    from kuberoll_workers.harbor.builders import BuildError, find_builder
    from kuberoll_workers.harbor.building import Target, build_images
    from kuberoll_workers.harbor.images import builds_of, checked_prefix
    from kuberoll_workers.harbor.mistakes import TaskError
    from kuberoll_workers.harbor.task import read_tasks

    if push and layout is not None:
        raise click.UsageError("--push and --layout exclude each other: run the command once for each")
    try:
        target = Target(prefix=checked_prefix(prefix), push=push, layout=layout)
        builder = find_builder(builder_name, options)
        if layout is not None:
            builder.check_layout()
        found = read_tasks(tasks)
    except (BuildError, TaskError, ValueError) as error:
        click.echo(visible(str(error)), err=True)
        sys.exit(2)
    made: list[Built] = []

    def done(one: Built) -> None:
        made.append(one)
        if one.problem is not None:
            click.echo(visible(f"{one.build.context}: {one.problem}"), err=True)

    builds = builds_of(found)
    asyncio.run(build_images(builds, builder, target, parallel=parallel, done=done))
    order = {one.digest: number for number, one in enumerate(builds)}
    click.echo(_table(sorted(made, key=lambda one: order[one.build.digest]), len(found)))
    if any(one.outcome == "broken" for one in made):
        sys.exit(1)


def _table(made: list[Built], tasks: int) -> str:
    """Lines for the images, and their number: `3 tasks: 2 images built, 1 there`."""
    rows = [
        ("image", "outcome", "seconds", "tasks"),
        *((one.reference, one.outcome, f"{one.seconds:.1f}", _names(one.build.tasks)) for one in made),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{image:<{widths[0]}}  {outcome:<{widths[1]}}  {seconds:>{widths[2]}}  {names}"
        for image, outcome, seconds, names in rows
    ]
    outcomes = [one.outcome for one in made]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    summary = f"{tasks} tasks, {len(made)} images" + (f": {counts}" if counts else ": none is to be built")
    return visible("\n".join([*(lines if made else ()), summary]))


def _names(tasks: tuple[str, ...]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{tasks[0]} and {len(tasks) - 1} more"
