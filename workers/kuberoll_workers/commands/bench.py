"""`kuberoll bench`: traces of runs, and their replay in virtual time."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.table import Table


class _Amount(click.FloatRange):
    """A number from 0 that clocks can count; `nan` and infinity are none."""

    def __init__(self) -> None:
        super().__init__(0, 1_000_000)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value} is no number", param, ctx)
        return found


_AMOUNT: Final = _Amount()
_FROM_0: Final = click.IntRange(0)
_FROM_1: Final = click.IntRange(1)

_DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "turns": "lognormal:4:0.8",
    "prompt": "lognormal:400:0.5",
    "response": "lognormal:300:1",
    "observation": "lognormal:100:1",
    "environment": "lognormal:0.2:1",
}
"""What `synthesize` draws, and the defaults."""

_DRAWN: Final[Mapping[str, tuple[click.ParamType[Any], Any]]] = {
    **{name: (click.STRING, default) for name, default in _DISTRIBUTIONS.items()},
    "group-size": (_FROM_1, 8),
    "most-turns": (_FROM_1, 256),
    "most-tokens": (click.IntRange(2), 32_768),
    "seed": (click.INT, 0),
}
"""Settings of `synthesize`: their types and defaults."""

_REPLAYED: Final[Mapping[str, tuple[click.ParamType[Any], Any]]] = {
    "window": (click.INT, 1024),
    "routing": (click.Choice(["Session", "LeastLoaded", "Hash", "Margin"]), "Session"),
    "scheduling": (click.Choice(["Concurrent", "Lockstep"]), "Concurrent"),
    "admission": (click.Choice(["Resident", "Unlimited", "Reserve"]), "Resident"),
    "margin": (_FROM_0, 8),
    "request-ms": (_AMOUNT, 0.0),
    "cold-start": (_AMOUNT, 0.0),
    "deaths-per-hour": (_AMOUNT, 0.0),
    "weights-every": (_AMOUNT, 0.0),
    "weights-seconds": (_AMOUNT, 1.0),
    "seed": (click.INT, 0),
    "max-num-seqs": (_FROM_1, 256),
    "max-num-batched-tokens": (_FROM_1, 8192),
    "kv-cache-tokens": (_FROM_1, 524_288),
    "block-tokens": (_FROM_1, 16),
    "prefix-caching": (click.BOOL, True),
    "chunked-prefill": (click.BOOL, True),
    "step-ms": (_AMOUNT, 6.0),
    "decode-us": (_AMOUNT, 80.0),
    "prefill-us": (_AMOUNT, 25.0),
    "attention-ns": (_AMOUNT, 0.0),
}
"""Settings of `replay`: their types and defaults."""

_set_option: Final = click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True, help="Change one of the settings above; repeatable."
)


def _parse(given: tuple[str, ...], known: Mapping[str, tuple[click.ParamType[Any], Any]]) -> dict[str, Any]:
    """The values of `--set`, and the defaults of the others.

    Raises:
        BadParameter: One is unknown, or its value is not of its type.
    """
    found = {name: default for name, (_, default) in known.items()}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            names = ", ".join(known)
            raise click.BadParameter(f"found {text!r}; it is NAME=VALUE, with one of {names}", param_hint="--set")
        try:
            found[name] = known[name][0].convert(value, None, None)
        except click.BadParameter as error:
            raise click.BadParameter(error.message, param_hint=f"--set {name}") from error
    return found


@click.group()
def bench() -> None:
    """Record runs, and replay them on fleets that do not exist, in virtual time."""


@bench.command()
@click.argument("run", metavar="DIR|URI")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace.  [default: trace.jsonl.zst]")
def record(run: str, output: Path | None) -> None:
    """Make a trace of the run in DIR or at URI: numbers of tokens and seconds, no text and no token ids.

    The exit code is 2 if there is no run, or the file exists.
    """
    from kuberoll_workers.data.record import RecordError
    from kuberoll_workers.output.run_files import NotARun, RunFiles
    from kuberoll_workers.output.storage import StorageError
    from kuberoll_workers.simulation.recording import record_run
    from kuberoll_workers.simulation.trace import write_trace

    path = output or Path("trace.jsonl.zst")
    try:
        found = record_run(RunFiles(run).read())
        write_trace(path, found.trajectories, origin="a recorded run")
    except (NotARun, RecordError, StorageError, OSError, ValueError) as error:
        _end(error)
    _say(f"{path}: {len(found.trajectories)} trajectories, {_turns(found.trajectories)} turns")
    for reason, number in found.left_out.items():
        _say(f"{number} {reason}: not in the trace")


@bench.command()
@click.argument("model")
@click.option(
    "-a",
    "--argument",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An engine argument, as in a job's spec.generation.engineArgs; may be repeated.",
)
def fit(model: str, arguments: tuple[str, ...]) -> None:
    """Measure what a step of vLLM costs with MODEL on this machine, and print it as options of `replay`.

    A second line has the engine's limits, also as options.

    The engine runs in this process, with random tokens. The exit code is 2 if it says too little.
    """
    from kuberoll_workers.simulation import fitting
    from kuberoll_workers.simulation.measuring import measure_steps

    given: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"found {argument!r}; it is NAME=VALUE, as in max_model_len=4096")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    try:
        measured = measure_steps(model, given)
        found = fitting.fit(measured.steps)
    except (OSError, ValueError) as error:
        _end(error)
    _say(
        f"--set step-ms={found.step_seconds * 1e3:.4g} --set decode-us={found.decode_seconds * 1e6:.4g} "
        f"--set prefill-us={found.prefill_seconds * 1e6:.4g} --set attention-ns={found.attention_seconds * 1e9:.4g}"
    )
    _say(
        f"--set max-num-seqs={measured.max_num_seqs} "
        f"--set max-num-batched-tokens={measured.max_num_batched_tokens} "
        f"--set kv-cache-tokens={measured.kv_cache_tokens} --set block-tokens={measured.block_tokens} "
        f"--set prefix-caching={str(measured.prefix_caching).lower()} "
        f"--set chunked-prefill={str(measured.chunked_prefill).lower()}"
    )
    click.echo(f"{found.steps} steps, from which these differ by {100 * found.error:.1f} %", err=True)


@bench.command()
@click.option("--trajectories", type=click.IntRange(1), required=True, help="Number of trajectories.")
@_set_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace.  [default: trace.jsonl.zst]")
def synthesize(trajectories: int, settings: tuple[str, ...], output: Path | None) -> None:
    """Draw a trace.

    The exit code is 2 if the file exists.

    \b
    With --set, and their defaults; a distribution is a number, exponential:MEDIAN,
    lognormal:MEDIAN:SIGMA or pareto:MEDIAN:EXPONENT:
      turns=lognormal:4:0.8          turns of a trajectory
      prompt=lognormal:400:0.5       tokens of a prompt
      response=lognormal:300:1       tokens of a response
      observation=lognormal:100:1    tokens of an observation
      environment=lognormal:0.2:1    seconds of a step
      group-size=8                   trajectories of a group
      most-turns=256                 of a trajectory
      most-tokens=32768              of a trajectory
      seed=0                         the same one draws the same trace
    """
    from kuberoll_workers.simulation import synthesis
    from kuberoll_workers.simulation.trace import write_trace

    given = _parse(settings, _DRAWN)
    drawn = {name: given[name] for name in _DISTRIBUTIONS}
    found: dict[str, synthesis.Distribution] = {}
    for name, text in drawn.items():
        try:
            found[name] = synthesis.Distribution.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=f"--set {name}") from error
    path = output or Path("trace.jsonl.zst")
    recipe = synthesis.Recipe(
        trajectories=trajectories,
        group_size=given["group-size"],
        turns=found["turns"],
        prompt=found["prompt"],
        generated=found["response"],
        observed=found["observation"],
        environment_seconds=found["environment"],
        most_turns=given["most-turns"],
        most_tokens=given["most-tokens"],
        seed=given["seed"],
    )
    try:
        made = synthesis.synthesize(recipe)
        written = ", ".join(f"{name} {text}" for name, text in drawn.items())
        write_trace(path, made, origin=f"drawn with seed {given['seed']}: {written}")
    except (OSError, ValueError) as error:
        _end(error)
    _say(f"{path}: {len(made)} trajectories, {_turns(made)} turns")


@bench.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--replicas", type=int, default=1, show_default=True, help="Replicas of the policy.")
@click.option("--workers", type=int, default=1, show_default=True, help="Workers, which share the trajectories.")
@click.option("--concurrency", type=int, default=64, show_default=True, help="Trajectories in flight in a worker.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, the same bytes each time.")
@_set_option
def replay(
    trace: Path,
    replicas: int,
    workers: int,
    concurrency: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Play TRACE in virtual time: real scheduling, admission and routing, modelled engines.

    The exit code is 1 if a trajectory failed, 2 if the trace or an option cannot be used.

    \b
    With --set, and their defaults:
      window=1024                    requests that a replica takes at once
      routing=Session                or LeastLoaded; candidates: Hash, Margin
      scheduling=Concurrent          or Lockstep
      admission=Resident             or candidates: Unlimited, Reserve
      margin=8                       of routing Margin, in trajectories
      request-ms=0                   of a request, outside of the engine
      cold-start=0                   seconds until a new replica answers
      deaths-per-hour=0              replicas of the fleet that die
      weights-every=0                seconds between new weights
      weights-seconds=1              pause for new weights
      seed=0                         of deaths and jitter
    \b
    Of a replica's engine, as `kuberoll bench fit` prints them:
      max-num-seqs=256               as vLLM's
      max-num-batched-tokens=8192    as vLLM's
      kv-cache-tokens=524288         of a replica
      block-tokens=16                of a block
      prefix-caching=true            reuse prefixes
      chunked-prefill=true           split prompts
      step-ms=6                      fixed time of a step
      decode-us=80                   more for each sequence
      prefill-us=25                  more for each prompt token
      attention-ns=0                 more for each token of the contexts
    """
    from kuberoll_workers.simulation.engine_model import EngineLimits
    from kuberoll_workers.simulation.replay import ReplaySettings
    from kuberoll_workers.simulation.replay import replay as play
    from kuberoll_workers.simulation.report import report_of
    from kuberoll_workers.simulation.trace import read_trace
    from kuberoll_workers.simulation.virtual_loop import NothingLeft, TimeEnds

    given = _parse(settings, _REPLAYED)
    try:
        replayed = ReplaySettings(
            engine=EngineLimits(
                max_num_seqs=given["max-num-seqs"],
                max_num_batched_tokens=given["max-num-batched-tokens"],
                kv_cache_tokens=given["kv-cache-tokens"],
                block_tokens=given["block-tokens"],
                prefix_caching=given["prefix-caching"],
                step_seconds=given["step-ms"] / 1e3,
                decode_seconds=given["decode-us"] / 1e6,
                prefill_seconds=given["prefill-us"] / 1e6,
                attention_seconds=given["attention-ns"] / 1e9,
                chunked_prefill=given["chunked-prefill"],
            ),
            replicas=replicas,
            workers=workers,
            concurrency=concurrency,
            window=given["window"],
            routing=given["routing"],
            margin=given["margin"],
            admission=given["admission"],
            scheduling=given["scheduling"],
            request_seconds=given["request-ms"] / 1e3,
            cold_start_seconds=given["cold-start"],
            deaths_per_hour=given["deaths-per-hour"],
            weights_every=given["weights-every"],
            weights_seconds=given["weights-seconds"],
            seed=given["seed"],
        )
        trajectories = read_trace(trace).trajectories
        began = time.perf_counter()
        with _quiet():
            found = play(trajectories, replayed)
        took = time.perf_counter() - began
    except (OSError, ValueError, NothingLeft, TimeEnds) as error:
        _end(error)
    report = report_of(trajectories, replayed, found)
    if as_json:
        import orjson

        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        from rich.console import Console

        Console(highlight=False).print(_table(report))
    click.echo(f"played in {took:.1f} s, {found.makespan / max(took, 1e-9):.0f} times faster than it is", err=True)
    sys.exit(1 if found.failures else 0)


def _table(report: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in report.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {_short(part)}" for key, part in value.items()) or "-"
        else:
            text = "-" if value is None else _short(value)
        table.add_row(name.replace("_", " "), Text(visible(text)))
    return table


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _turns(trajectories: Any) -> int:
    return sum(len(trajectory.turns) for trajectory in trajectories)


def _say(text: str) -> None:
    click.echo(visible(text))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log errors only: what happens to a fleet by order is no news."""
    log = logging.getLogger("kuberoll_workers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _end(error: Exception) -> NoReturn:
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    click.echo(visible(text), err=True)
    sys.exit(2)
