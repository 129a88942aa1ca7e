"""The `kuberoll` command: a small root; most subcommands come with the installed extras."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path

import click

from kuberoll_api.manifest.loading import ManifestError, load_jobs

COMMANDS = "kuberoll.commands"
"""Group of the subcommands' entry points: `kuberoll_<extra>.module:command`, or `package.module:command [extra]`."""

# Requirements of an extra, except for those of some platforms only.
_OF_EXTRA = re.compile(r"""(?P<name>[\w.-]+)[^;]*;\s*extra == ['"](?P<extra>[\w.-]+)['"]""")


class _Root(click.Group):
    """Loads a subcommand from its entry point when it is called, so that the others cost nothing."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_entries()})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        own = super().get_command(context, name)
        entry = _entries().get(name)
        if own is not None or entry is None:
            return own
        # Commands import their dependencies when they run, so a successful load would not prove anything.
        if (missing := next(_missing(entry), None)) is not None:
            return _stand_in(entry, missing)
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            return _stand_in(entry, str(error.name))
        if not isinstance(command, click.Command):
            raise TypeError(f"entry point {entry.value} is not a click command")
        return command


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMANDS)}


def _extra(entry: EntryPoint) -> str:
    return entry.extras[0] if entry.extras else entry.module.partition(".")[0].removeprefix("kuberoll_")


def _missing(entry: EntryPoint) -> Iterator[str]:
    """Distributions that the command's extra requires and that are not installed."""
    for line in (entry.dist.requires if entry.dist else None) or ():
        requirement = _OF_EXTRA.fullmatch(line)
        if requirement is not None and requirement["extra"] == _extra(entry):
            try:
                importlib.metadata.distribution(requirement["name"])
            except PackageNotFoundError:
                yield requirement["name"]


def _stand_in(entry: EntryPoint, missing: str) -> click.Command:
    """Placeholder for a command that cannot run here; it prints how to install it."""
    remedy = f"pip install 'kuberoll[{_extra(entry)}]'"
    text = f"`kuberoll {entry.name}` needs {missing}, which is not installed: {remedy}"

    def say() -> None:
        click.echo(text, err=True)
        sys.exit(2)

    return click.Command(
        entry.name,
        callback=say,
        help=text,
        short_help=f"(not installed: {remedy})",
        # Whatever the arguments, even --help, the placeholder prints what is missing.
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kuberoll", prog_name="kuberoll")
def main() -> None:
    """Reinforcement-learning rollouts: one RolloutJob in, scored token-exact trajectories out."""


@main.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def validate(files: tuple[Path, ...]) -> None:
    """Check RolloutJob manifests.

    Prints the line and field of each mistake, what was found and what is allowed. The exit code is 0
    if all files are valid, and 2 if one has a mistake.
    """
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


@main.command()
@click.option("--reference", is_flag=True, help="Print the reference of all fields instead, in Markdown.")
def crd(reference: bool) -> None:
    """Print the CustomResourceDefinition of the RolloutJob.

    `kuberoll crd | kubectl apply -f -` installs it.
    """
    # Imported here because no other command needs these modules.
    if reference:
        from kuberoll_api.schema.reference import page

        click.echo(page(), nl=False)
    else:
        from kuberoll_api.schema.crd import definition, to_yaml

        click.echo(to_yaml(definition()), nl=False)
