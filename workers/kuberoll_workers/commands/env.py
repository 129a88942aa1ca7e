"""`kuberoll env`: lists, writes, tests, plays and serves environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kuberoll_api.model.rolloutjob import RolloutJob
    from kuberoll_workers.authoring.subject import Subject, Summary

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TOKEN_VARIABLE = "KUBEROLL_ENVIRONMENT_TOKEN"
# Of a server, for calls that would wait for one that hangs.
_SPARE_PROCESSES = 1
# Of an episode that is played without a job.
_MOST_TURNS = 100


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def env() -> None:
    """List, write, test, play and serve environments.

    \b
    Examples:
      kuberoll env new guess-word
      kuberoll env play guess_word.yaml
      kuberoll env test guess_word.yaml
    """


def _target(command: _Command) -> _Command:
    """The argument and the options of commands for one environment."""
    for option in reversed(
        [
            click.argument("target"),
            click.option("--config", metavar="JSON", help="Argument of the constructor.  [default: {}]"),
            click.option("--environment", metavar="NAME", help="With a manifest: this one of its environments."),
            click.option(
                "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the manifest."
            ),
            click.option("--dataset", metavar="FILE|URI", help="Rows to use.  [default: generated, or the job's]"),
            click.option(
                "--seed",
                type=click.IntRange(min=0),
                metavar="N",
                help="Seed of generated rows and of episodes.  [default: the job's, or 0]",
            ),
            click.option("--isolation", type=click.Choice(["Inline", "Process", "Remote"]),
                         help="Where it runs.  [default: the job's, or Inline]"),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


@env.command("list")
def list_() -> None:
    """List the built-in environments and the adapters for other libraries, and what their dataset rows need."""
    from kuberoll_workers.authoring.subject import Summary
    from kuberoll_workers.environments import BUILT_INS, LIBRARIES

    for name in sorted(BUILT_INS):
        _list_one(name, Summary.of(name))
    click.echo("\nEnvironments of other libraries (docs/how-to/environment-libraries.md):\n")
    for name in sorted(LIBRARIES):
        _list_one(name, Summary.of(name))
    click.echo("\nWrite your own: kuberoll env new NAME")


def _list_one(name: str, summary: Summary) -> None:
    click.echo(f"{name}\n    {summary.text}.")
    for field, words in summary.metadata.items():
        click.echo(f"    metadata.{field}: {words}")
    click.echo(f"    {'generates rows' if summary.generates else 'needs a dataset'}")
    if (library := summary.library) is not None:
        version = library.version
        state = "is not installed" if version is None else f"{version} is installed"
        click.echo(f"    {library.distribution} {state}{'' if version else f': {library.command}'}")


@env.command()
@click.argument("path", metavar="[DIR/]NAME", type=click.Path(path_type=Path))
@click.option("--model", metavar="DIR|HUB-ID", help="Model of the job.  [default: a tokenizer of bytes, beside it]")
def new(path: Path, model: str | None) -> None:
    """Write a small environment that runs, a job for it, and its test.

    They are written into DIR, or the working directory. Nothing is overwritten: the exit code is 2 if one of the files
    is there.
    """
    from kuberoll_workers.authoring.template import MODEL, FilesExist, NameRefused, Names, files_of, write_new

    directory = path.parent
    try:
        names = Names.of(path.name)
        written = write_new(files_of(names, model), directory)
    except (FilesExist, NameRefused, OSError) as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    for file in written:
        if not file.startswith(f"{MODEL}/"):
            click.echo(f"wrote {directory / file}")
    if any(file.startswith(f"{MODEL}/") for file in written):
        click.echo(f"wrote {directory / MODEL}, a tokenizer for the Simulated engine")
    job = directory / f"{names.module}.yaml"
    click.echo(f"\nNext:\n  kuberoll env play {job}\n  kuberoll env test {job}\n  kuberoll run {job}")


@env.command("test")
@_target
@click.option("--rows", type=click.IntRange(min=1), default=6, show_default=True, help="Dataset rows to play.")
@click.option("--skip", multiple=True, metavar="CHECK", help="Leave out this check; repeatable.")
@click.option("--timeout", type=click.FloatRange(min=0.1), help="Seconds of one call.  [default: the job's, or 30]")
def test_(rows: int, skip: tuple[str, ...], timeout: float | None, **target: Any) -> None:
    """Check that an environment keeps the contract of environments.

    TARGET is a built-in type, a class module:Class, or a manifest job.yaml. Prints one line for each check, and for a
    failed one the input that did it, and the lines of your code. The exit code is 0 if no check failed, 1 if one did,
    and 2 if there is no such environment.

    \b
    Examples:
      kuberoll env test guessing:Guess --config '{"limit": 5}'
      kuberoll env test job.yaml --environment guess --isolation Process
      kuberoll env test math --dataset rows.jsonl
    """
    import dataclasses

    subject, _ = _subject(**target)
    from kuberoll_workers.authoring.contract import CHECKS, run_contract
    from kuberoll_workers.data.text import visible

    if unknown := [name for name in skip if name not in CHECKS]:
        raise click.UsageError(f"--skip {unknown[0]}: the checks are {', '.join(CHECKS)}")
    if timeout is not None:
        subject = dataclasses.replace(subject, timeout=timeout)
    click.echo(visible(f"{subject.title} ({subject.isolation})"))
    results = run_contract(subject, skip=skip, rows=rows, report=lambda result: _echo(result.lines()))
    failed = sum(result.status == "failed" for result in results)
    done = sum(result.status == "ok" for result in results)
    click.echo(f"{failed} failed, {done} passed" if failed else f"all {done} checks passed")
    sys.exit(1 if failed else 0)


@env.command()
@_target
@click.option("--row", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the dataset row.")
@click.option("--tokenizer", metavar="DIR|HUB-ID", help="Show prompts as this model's chat template writes them.")
def play(row: int, tokenizer: str | None, **target: Any) -> None:
    """Play an environment in the terminal, in the place of the policy.

    TARGET is a built-in type, a class module:Class, or a manifest job.yaml. A response ends with one of its stop
    strings, an empty line or Ctrl-D. An episode has as many turns as the job allows, or 100. Commands: :state shows the
    metadata, :restart, :help, :quit.

    \b
    Examples:
      kuberoll env play sliding_puzzle --config '{"size": 2}'
      kuberoll env play job.yaml --row 3
      kuberoll env play job.yaml --tokenizer Qwen/Qwen2.5-0.5B-Instruct
    """
    subject, job = _subject(**target)
    from kuberoll_workers.authoring.instance import Harness
    from kuberoll_workers.authoring.session import Session, clean
    from kuberoll_workers.authoring.subject import NoRows
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.environments.registry import UnusableEnvironment

    try:
        rendering = _rendering(tokenizer, job)
        rows = subject.rows(row + 1)
        if len(rows) <= row:
            raise NoRows(f"--row {row}: there are only {len(rows)} rows, counted from 0")
        with Harness.open(subject) as harness:
            session = Session(
                harness.instance(),
                rows[row],
                seed=subject.seed,
                max_turns=_MOST_TURNS if job is None else job.spec.rollout.max_turns,
                rendering=rendering,
                write=lambda text: click.echo(clean(text)),
            )
            done = session.run(iter(sys.stdin.readline, ""))
    except (DatasetError, NoRows, UnusableEnvironment) as error:
        click.echo(clean(with_frames(error)), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("")
        sys.exit(130)
    sys.exit(0 if done else 1)


@env.command("serve")
@click.argument("target")
@click.option("--config", metavar="FILE|JSON", help="Argument of the constructor.  [default: {}]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8700, show_default=True, help="0: any that is free.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the bearer token that requests need.  [default: the variable KUBEROLL_ENVIRONMENT_TOKEN, or none]",
)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="Instances.")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=300.0, show_default=True, help="Most seconds of one call."
)
@click.option("--variable", multiple=True, metavar="NAME", help="Let the environment see this variable; repeatable.")
@click.option("--readable", multiple=True, metavar="PATH", help="Let the environment read this; repeatable.")
@click.option("--writable", multiple=True, metavar="PATH", help="Let the environment change this; repeatable.")
def serve_(
    target: str,
    config: str | None,
    token_file: Path | None,
    variable: tuple[str, ...],
    readable: tuple[str, ...],
    writable: tuple[str, ...],
    **settings: Any,
) -> None:
    """Serve an environment over HTTP, for jobs with isolation Remote.

    TARGET is a built-in type or a class module:Class. The environment runs in child processes, as with isolation
    Process. SIGTERM gives open episodes 25 seconds to end; one that nobody has used for an hour is closed. The exit
    code is 2 if the environment or the address cannot be used.

    \b
    Examples:
      kuberoll env serve sliding_puzzle --config '{"size": 2}'
      kuberoll env serve guessing:Guess --host 0.0.0.0 --token-file token --processes 4
    """
    import asyncio
    import os

    given = _json_object(config if config is None or config.lstrip().startswith("{") else _read(Path(config)))
    token = os.environ.pop(_TOKEN_VARIABLE, None) or None
    if token_file is not None and not (token := _read(token_file).strip()):
        raise click.UsageError(f"--token-file {token_file}: it is empty")

    from kuberoll_workers.data.text import visible
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.environments.outcome import EnvironmentFault
    from kuberoll_workers.environments.process_access import ProcessAccess
    from kuberoll_workers.environments.registry import PlainSpec
    from kuberoll_workers.environments.remote.serving import Serving, serve

    sys.path.insert(0, str(Path.cwd()))
    own = ":" in target
    spec = PlainSpec(
        name=target.rpartition(":")[2],
        type=None if own else target,
        entrypoint=target if own else None,
        config=given,
    )
    protected = [] if token_file is None else [str(token_file.resolve())]
    access = ProcessAccess(protected=protected, readable=readable, writable=writable, variables=variable)
    serving = Serving(spec=spec, access=access, token=token, spare=_SPARE_PROCESSES, **settings)
    try:
        asyncio.run(serve(serving, lambda url: click.echo(f"{spec.name} at {url}")))
    except (EnvironmentFault, OSError) as error:
        click.echo(visible(with_frames(error)), err=True)
        sys.exit(2)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: {error}") from error


def _subject(
    *,
    target: str,
    config: str | None,
    environment: str | None,
    overrides: tuple[str, ...],
    dataset: str | None,
    seed: int | None,
    isolation: str | None,
) -> tuple[Subject, RolloutJob | None]:
    """The environment that was named, and the job that it is part of; exits with 2 if there is none."""
    import dataclasses

    from kuberoll_api.manifest.loading import ManifestError, load_job

    file = Path(target)
    manifest = file.suffix in (".yaml", ".yml", ".json") or (file.is_file() and ":" not in target)
    if manifest and config is not None:
        raise click.UsageError("--config is for a type or a class; with a manifest use --set")
    if not manifest and (environment or overrides):
        raise click.UsageError("--environment and --set are for a manifest")
    given = _json_object(config)
    job = None
    if manifest:
        try:
            job = load_job(file, overrides)
            source = job.spec.dataset.source
            if seed is not None and source is not None and source.generator is not None:
                job = load_job(file, (*overrides, f"spec.dataset.source.generator.seed={seed}"))
        except (ManifestError, OSError) as error:
            click.echo(str(error), err=True)
            sys.exit(2)

    from kuberoll_workers.authoring.subject import Subject
    from kuberoll_workers.data.text import visible
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.environments.registry import UnusableEnvironment

    base = file.parent if manifest else Path()
    # Modules beside the manifest, or in the working directory.
    sys.path[:0] = list(dict.fromkeys([str(base.resolve()), str(Path.cwd())]))
    try:
        if job is not None:
            subject = Subject.of_job(job, base, environment, isolation=isolation, seed=seed)
        else:
            subject = Subject.of_class(target, given, isolation=isolation or "Inline", seed=seed or 0)
    except UnusableEnvironment as error:
        click.echo(visible(with_frames(error)), err=True)
        sys.exit(2)
    if dataset is not None:
        subject = dataclasses.replace(subject, dataset=_rows_of(dataset, subject))
    return subject, job


def _rows_of(uri: str, subject: Subject) -> Any:
    """A source of the rows of a file."""
    import itertools

    from kuberoll_api.model.dataset import Dataset
    from kuberoll_workers.dataset.reading import read_rows
    from kuberoll_workers.environments.registry import UnusableEnvironment

    def refuse(name: str) -> Any:
        raise UnusableEnvironment(name)

    def rows(count: int) -> Any:
        job = Dataset.model_validate({"source": {"uri": uri}})
        read = read_rows(job, base=Path(), task_names=[subject.name], environment=refuse)
        return list(itertools.islice(read, count))

    return rows


def _rendering(tokenizer: str | None, job: RolloutJob | None) -> Any:
    from kuberoll_workers.authoring.session import Rendering

    if tokenizer is None:
        return Rendering()
    from kuberoll_workers.data.tokenization import TemplateRefused
    from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
    from kuberoll_workers.worker.settings import job_tokenizer, observation_template

    try:
        found = HuggingFaceTokenizer.load(tokenizer)
        found = found if job is None else job_tokenizer(job, found)
    except TemplateRefused as error:
        click.echo(f"--tokenizer {tokenizer}: {error}", err=True)
        sys.exit(2)
    except (OSError, ValueError) as error:
        click.echo(f"--tokenizer {tokenizer}: {str(error).splitlines()[0] if str(error) else error!r}", err=True)
        sys.exit(2)
    if job is None or job.spec.rollout.observation_template != "ChatTemplate":
        return Rendering(tokenizer=found)
    try:
        return Rendering(tokenizer=found, observations=observation_template(job, found))
    except TemplateRefused as error:
        click.echo(f"--tokenizer {tokenizer}: {error}", err=True)
        sys.exit(2)


def _json_object(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--config: it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError("--config: it must be a JSON object, such as '{\"size\": 2}'")
    return found


def _echo(lines: list[str]) -> None:
    from kuberoll_workers.data.text import visible

    for line in lines:
        click.echo(visible(line))
