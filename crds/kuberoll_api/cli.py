"""The `kuberoll` command: a small root; most subcommands come with the installed extras."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kuberoll_api.plugins import CHECKS, COMMANDS, installed

if TYPE_CHECKING:
    from kuberoll_api.manifest.loading import Manifest

SUMMARIES = {
    "aggregate": "Compute the numbers of a run again.",
    "apply": "Apply a manifest to a cluster, with the files beside it.",
    "bench": "Record runs, and replay them in virtual time.",
    "certify": "Grade right and wrong answers to the rows of a job, before a run.",
    "crd": "Print the CustomResourceDefinition of the RolloutJob.",
    "env": "List, write, test and play environments.",
    "export": "Write a run in a format of a trainer's library.",
    "get": "Copy the output of a RolloutJob from a cluster.",
    "images": "Build the images that tasks need.",
    "logs": "Show the logs of a RolloutJob in a cluster.",
    "render": "Print the objects that the operator creates for a job.",
    "report": "Write a run as an HTML page.",
    "rescore": "Compute the rewards of a run again.",
    "run": "Run a RolloutJob on this machine.",
    "serve": "Keep the engine of a RolloutJob up on this machine.",
    "show": "Show the trajectories of a run.",
    "tasks": "Try tasks that are played in machines of their own.",
    "top": "Show the RolloutJobs of a cluster and their throughput.",
    "validate": "Check manifests.",
    "why": "Say what happened to a trajectory.",
}
"""Lines of `kuberoll --help` for our own commands, which it would otherwise import."""

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

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Options are click's to report.
        if name.isidentifier() and self.get_command(context, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(context), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            context.fail(f"there is no command {name}{hint}")
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.NoSuchOption as error:
            from kuberoll_api.removed_options import sentence

            command = "" if error.ctx is None else error.ctx.command_path.removeprefix(f"{context.command_path} ")
            if (said := sentence(command, error.option_name)) is not None:
                raise click.UsageError(said, error.ctx) from error
            raise

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(context, name)) for name in self.list_commands(context)])

    def _summary(self, context: click.Context, name: str) -> str:
        entry = _entries().get(name)
        if entry is not None and next(_missing(entry), None) is not None:
            return f"(not installed: {_remedy(entry)})"
        if name in SUMMARIES:
            return SUMMARIES[name]
        command = self.get_command(context, name)
        return "" if command is None else command.get_short_help_str(limit=80)


def _remedy(entry: EntryPoint) -> str:
    return f"pip install 'kuberoll[{_extra(entry)}]'"


def _entries() -> Mapping[str, EntryPoint]:
    return installed(COMMANDS)


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
    text = f"`kuberoll {entry.name}` needs {missing}, which is not installed: {_remedy(entry)}"

    def say() -> None:
        click.echo(text, err=True)
        sys.exit(2)

    return click.Command(
        entry.name,
        callback=say,
        help=text,
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
@click.option("--set", "overrides", metavar="PATH=VALUE", multiple=True, help="Change a field; repeatable.")
@click.option("--cluster", is_flag=True, help="Also check whether a cluster can run them; needs no cluster.")
@click.option("--dataset", is_flag=True, help="Also read and check every row of their datasets; needs no model.")
def validate(files: tuple[Path, ...], overrides: tuple[str, ...], cluster: bool, dataset: bool) -> None:
    """Check RolloutJob manifests.

    Prints the line and field of each mistake, what was found and what is allowed. With --cluster also what would be
    missing in a cluster, and, as notes, what the cluster must have. With --dataset also the first invalid rows, by file
    and line, among them those that lack what their environment needs to score them. The exit code is 0 if all files are
    valid, and 2 if one has a mistake.

    
    Examples:
      kuberoll validate job.yaml examples/*/rolloutjob.yaml
      kuberoll validate --cluster job.yaml
      kuberoll validate --dataset job.yaml
    """
    from kuberoll_api.manifest.loading import ManifestError, load_manifest

    failed = False
    for file in files:
        try:
            manifest = load_manifest(file, overrides)
            if cluster:
                _check_for_cluster(manifest, file)
            rows = _check_datasets(manifest, file) if dataset else []
        except (ManifestError, _InvalidRows, OSError) as error:
            click.echo(str(error), err=True)
            failed = True
        else:
            names = ", ".join(item.job.metadata.name for item in manifest.jobs)
            click.echo("\n".join([f"{file}: ok (RolloutJob {names})", *rows]))
    sys.exit(2 if failed else 0)


def _check_for_cluster(manifest: Manifest, file: Path) -> None:
    """Print what the manifest's jobs need in a cluster.

    Raises:
        ManifestError: No cluster can run one of them.
        OSError: A file beside the manifest cannot be read.
    """
    from kuberoll_api.manifest.cluster import check_for_cluster
    from kuberoll_api.manifest.loading import ManifestError

    others = [document.value for document in manifest.others]
    checks = [(item, check_for_cluster(item.job, file.parent, others=others)) for item in manifest.jobs]
    for item, check in checks:
        for note in check.notes:
            click.echo(str(item.mistake(note.path, f"note: {note.message}")))
        if check.beside.files:
            click.echo(f"{file}: note: `kuberoll apply` ships {check.beside}")
    if mistakes := [item.mistake(*problem) for item, check in checks for problem in check.problems]:
        raise ManifestError(mistakes)


class _InvalidRows(Exception):
    """Rows of a dataset are invalid; one line for each."""


def _check_datasets(manifest: Manifest, file: Path) -> list[str]:
    """Read the datasets of the manifest's jobs; returns a line about each.

    Raises:
        _InvalidRows: Rows are invalid.
        UsageError: The packages that read them are not installed.
    """
    entry = installed(CHECKS)["dataset"]
    if (missing := next(_missing(entry), None)) is not None:
        raise click.UsageError(f"--dataset needs {missing}, which is not installed: {_remedy(entry)}")
    check = entry.load()
    lines: list[str] = []
    errors: list[str] = []
    for item in manifest.jobs:
        summary, invalid = check(item.job, file.parent)
        lines.append(f"  dataset of {item.job.metadata.name}: {summary}")
        errors += invalid
    if errors:
        raise _InvalidRows("\n".join(errors))
    return lines


@main.command()
def crd() -> None:
    """Print the CustomResourceDefinition of the RolloutJob.

    `kuberoll crd | kubectl apply -f -` installs it.
    """
    # Imported here because no other command needs this module.
    from kuberoll_api.schema.crd import definition, to_yaml

    click.echo(to_yaml(definition()), nl=False)
