"""`kuberoll bench`: traces of runs, and their replay in virtual time."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from kuberoll_workers.data.text import visible

if TYPE_CHECKING:
    from rich.table import Table

_Command = Callable[..., None]


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
        f"--step-ms {found.step_seconds * 1e3:.4g} --decode-us {found.decode_seconds * 1e6:.4g} "
        f"--prefill-us {found.prefill_seconds * 1e6:.4g} --attention-ns {found.attention_seconds * 1e9:.4g}"
    )
    _say(
        f"--max-num-seqs {measured.max_num_seqs} --max-num-batched-tokens {measured.max_num_batched_tokens} "
        f"--kv-cache-tokens {measured.kv_cache_tokens} --block-tokens {measured.block_tokens} "
        f"--{'' if measured.prefix_caching else 'no-'}prefix-caching "
        f"--{'' if measured.chunked_prefill else 'no-'}chunked-prefill"
    )
    click.echo(f"{found.steps} steps, from which these differ by {100 * found.error:.1f} %", err=True)


@bench.command()
@click.option("--trajectories", type=click.IntRange(1), required=True, help="Number of trajectories.")
@click.option("--group-size", type=click.IntRange(1), default=8, show_default=True, help="Trajectories of a group.")
@click.option("--turns", default="lognormal:4:0.8", show_default=True, metavar="DIST", help="Turns of a trajectory.")
@click.option("--prompt", default="lognormal:400:0.5", show_default=True, metavar="DIST", help="Tokens of a prompt.")
@click.option("--response", default="lognormal:300:1", show_default=True, metavar="DIST", help="Tokens of a response.")
@click.option("--observation", default="lognormal:100:1", show_default=True, metavar="DIST", help="Of an observation.")
@click.option("--environment", default="lognormal:0.2:1", show_default=True, metavar="DIST", help="Seconds of a step.")
@click.option("--most-turns", type=click.IntRange(1), default=256, show_default=True, help="Maximum turns.")
@click.option("--most-tokens", type=click.IntRange(2), default=32_768, show_default=True, help="Maximum length.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same one draws the same trace.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The trace.  [default: trace.jsonl.zst]")
def synthesize(
    trajectories: int,
    group_size: int,
    turns: str,
    prompt: str,
    response: str,
    observation: str,
    environment: str,
    most_turns: int,
    most_tokens: int,
    seed: int,
    output: Path | None,
) -> None:
    """Draw a trace.

    DIST is a number, exponential:MEDIAN, lognormal:MEDIAN:SIGMA or pareto:MEDIAN:EXPONENT. The exit code is 2 if the
    file exists.
    """
    from kuberoll_workers.simulation import synthesis
    from kuberoll_workers.simulation.trace import write_trace

    drawn = {
        "turns": turns,
        "prompt": prompt,
        "response": response,
        "observation": observation,
        "environment": environment,
    }
    found: dict[str, synthesis.Distribution] = {}
    for name, text in drawn.items():
        try:
            found[name] = synthesis.Distribution.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=f"--{name}") from error
    path = output or Path("trace.jsonl.zst")
    recipe = synthesis.Recipe(
        trajectories=trajectories,
        group_size=group_size,
        turns=found["turns"],
        prompt=found["prompt"],
        generated=found["response"],
        observed=found["observation"],
        environment_seconds=found["environment"],
        most_turns=most_turns,
        most_tokens=most_tokens,
        seed=seed,
    )
    try:
        made = synthesis.synthesize(recipe)
        written = ", ".join(f"{name} {text}" for name, text in drawn.items())
        write_trace(path, made, origin=f"drawn with seed {seed}: {written}")
    except (OSError, ValueError) as error:
        _end(error)
    _say(f"{path}: {len(made)} trajectories, {_turns(made)} turns")


def _engine_options(command: _Command) -> _Command:
    """Options that describe a replica's engine, with the defaults of `EngineLimits`."""
    options = (
        click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True, help="As vLLM's."),
        click.option(
            "--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True, help="As vLLM's."
        ),
        click.option(
            "--kv-cache-tokens", type=click.IntRange(1), default=524_288, show_default=True, help="Of a replica."
        ),
        click.option("--block-tokens", type=click.IntRange(1), default=16, show_default=True, help="Of a block."),
        click.option("--prefix-caching/--no-prefix-caching", default=True, help="Reuse prefixes.  [default: reuse]"),
        click.option("--step-ms", type=_AMOUNT, default=6.0, show_default=True, help="Fixed time of an engine's step."),
        click.option("--decode-us", type=_AMOUNT, default=80.0, show_default=True, help="More for each sequence."),
        click.option("--prefill-us", type=_AMOUNT, default=25.0, show_default=True, help="More for each prompt token."),
        click.option(
            "--attention-ns", type=_AMOUNT, default=0.0, show_default=True, help="More for each token of the contexts."
        ),
        click.option(
            "--chunked-prefill/--no-chunked-prefill", default=True, help="Split prompts.  [default: split them]"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@bench.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--replicas", type=int, default=1, show_default=True, help="Replicas of the policy.")
@click.option("--workers", type=int, default=1, show_default=True, help="Workers, which share the trajectories.")
@click.option("--concurrency", type=int, default=64, show_default=True, help="Trajectories in flight in a worker.")
@click.option("--window", type=int, default=1024, show_default=True, help="Requests that a replica takes at once.")
@click.option(
    "--routing",
    type=click.Choice(["Session", "LeastLoaded", "Hash", "Margin"]),
    default="Session",
    show_default=True,
    help="Hash and Margin are candidates that no worker uses.",
)
@click.option("--margin", type=click.IntRange(0), default=8, show_default=True, help="Of Margin, in trajectories.")
@click.option(
    "--admission",
    type=click.Choice(["Resident", "Unlimited", "Reserve"]),
    default="Resident",
    show_default=True,
    help="Of new trajectories; the others are candidates.",
)
@click.option("--scheduling", type=click.Choice(["Concurrent", "Lockstep"]), default="Concurrent", show_default=True)
@click.option("--request-ms", type=_AMOUNT, default=0.0, show_default=True, help="Of a request, outside of the engine.")
@click.option("--cold-start", type=_AMOUNT, default=0.0, metavar="SECONDS", help="Until a new replica answers.")
@click.option("--deaths-per-hour", type=_AMOUNT, default=0.0, help="Replicas of the fleet that die in an hour.")
@click.option("--weights-every", type=_AMOUNT, default=0.0, metavar="SECONDS", help="New weights for all replicas.")
@click.option("--weights-seconds", type=_AMOUNT, default=1.0, show_default=True, help="Pause for new weights.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of deaths and jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, the same bytes each time.")
@_engine_options
def replay(
    trace: Path,
    replicas: int,
    workers: int,
    concurrency: int,
    window: int,
    routing: Any,
    margin: int,
    admission: Any,
    scheduling: Any,
    request_ms: float,
    cold_start: float,
    deaths_per_hour: float,
    weights_every: float,
    weights_seconds: float,
    seed: int,
    as_json: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_tokens: int,
    block_tokens: int,
    prefix_caching: bool,
    step_ms: float,
    decode_us: float,
    prefill_us: float,
    attention_ns: float,
    chunked_prefill: bool,
) -> None:
    """Play TRACE in virtual time: real scheduling, admission and routing, modelled engines.

    The exit code is 1 if a trajectory failed, 2 if the trace or an option cannot be used.
    """
    from kuberoll_workers.simulation.engine_model import EngineLimits
    from kuberoll_workers.simulation.replay import ReplaySettings
    from kuberoll_workers.simulation.replay import replay as play
    from kuberoll_workers.simulation.report import report_of
    from kuberoll_workers.simulation.trace import read_trace
    from kuberoll_workers.simulation.virtual_loop import NothingLeft, TimeEnds

    try:
        settings = ReplaySettings(
            engine=EngineLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_tokens=kv_cache_tokens,
                block_tokens=block_tokens,
                prefix_caching=prefix_caching,
                step_seconds=step_ms / 1e3,
                decode_seconds=decode_us / 1e6,
                prefill_seconds=prefill_us / 1e6,
                attention_seconds=attention_ns / 1e9,
                chunked_prefill=chunked_prefill,
            ),
            replicas=replicas,
            workers=workers,
            concurrency=concurrency,
            window=window,
            routing=routing,
            margin=margin,
            admission=admission,
            scheduling=scheduling,
            request_seconds=request_ms / 1e3,
            cold_start_seconds=cold_start,
            deaths_per_hour=deaths_per_hour,
            weights_every=weights_every,
            weights_seconds=weights_seconds,
            seed=seed,
        )
        trajectories = read_trace(trace).trajectories
        began = time.perf_counter()
        with _quiet():
            found = play(trajectories, settings)
        took = time.perf_counter() - began
    except (OSError, ValueError, NothingLeft, TimeEnds) as error:
        _end(error)
    report = report_of(trajectories, settings, found)
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
