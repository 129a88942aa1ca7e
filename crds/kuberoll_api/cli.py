"""The `kuberoll` command: a small root; most subcommands come with the parts that are installed."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click

from kuberoll_api.manifest import ManifestError, load_jobs

COMMANDS = "kuberoll.commands"


class _Root(click.Group):
    """Loads a subcommand from its entry point when it is called, so that the others cost nothing."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_entries()})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        own = super().get_command(context, name)
        entry = _entries().get(name)
        if own is not None or entry is None:
            return own
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            return _missing(name, entry, error)
        if not isinstance(command, click.Command):
            raise TypeError(f"entry point {entry.value} is not a click command")
        return command


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMANDS)}


def _missing(name: str, entry: EntryPoint, error: ModuleNotFoundError) -> click.Command:
    """Stands in for a command whose dependencies are not installed."""
    extra = entry.module.partition(".")[0].removeprefix("kuberoll_")
    text = f"`kuberoll {name}` needs {error.name}: pip install 'kuberoll[{extra}]'"

    @click.command(
        name,
        help=text,
        short_help=f"(not installed: pip install 'kuberoll[{extra}]')",
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
    )
    @click.argument("arguments", nargs=-1)
    def command(arguments: tuple[str, ...]) -> None:  # noqa: ARG001
        click.echo(text, err=True)
        sys.exit(2)

    return command


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kuberoll"), prog_name="kuberoll")
def main() -> None:
    """Reinforcement-learning rollouts: one RolloutJob in, scored token-exact trajectories out."""


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def validate(files: tuple[Path, ...]) -> None:
    """Check RolloutJob manifests; exit code 2 when one has mistakes."""
    failed = False
    for file in files:
        try:
            jobs = load_jobs(file)
        except ManifestError as error:
            click.echo(str(error), err=True)
            failed = True
        else:
            names = ", ".join(job.metadata.name for job in jobs)
            click.echo(f"{file}: ok (RolloutJob {names})")
    sys.exit(2 if failed else 0)
