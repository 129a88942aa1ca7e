"""The contract of environments: checks as plain functions, for `kuberoll env test` and for tests of one's own.

from kuberoll_workers.authoring import check_environment

def test_contract():
    check_environment(MyEnvironment, {"limit": 5})
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kuberoll_workers.authoring.instance import (
    CallFailed,
    Harness,
    Instance,
    Play,
    Script,
    json_text,
    shown,
)
from kuberoll_workers.authoring.responses import NONSENSE, plausible, scripts_of
from kuberoll_workers.authoring.subject import Case, NoRows, RowSource, Subject
from kuberoll_workers.data.plain import NotPlain, own_copy, plain
from kuberoll_workers.data.tracebacks import Traceback, excerpt
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault, StepOutcome, fault_of
from kuberoll_workers.environments.registry import UnusableEnvironment

ROWS = 6
"""Default number of dataset rows that are played."""
SCRIPTS = 2
"""Sequences of responses played to each row."""
TURNS = 5
"""Maximum number of turns of an episode."""
NONSENSE_ROWS = 2
"""Number of rows that nonsense is played to."""
_LEAK = 8
_SHOWN_FAILURES = 3

Status = Literal["ok", "failed", "skipped"]


class CheckFailed(AssertionError):
    """The environment breaks the contract.

    Attributes:
        lines: What failed, with the input that did it: details, one line each.
        traceback: Of the exception that the environment's code raised; None if it raised none.
        cause: What several checks may find, and only the first of them reports.
    """

    def __init__(
        self,
        message: str,
        lines: Iterable[str] = (),
        traceback: Traceback | None = None,
        *,
        of_call: bool = False,
    ) -> None:
        """`of_call`: a call failed, so that the message begins with the field that is invalid, or with the method."""
        super().__init__(message)
        self.lines = list(lines)
        self.traceback = traceback
        frames = excerpt(traceback.frames) if traceback is not None else []
        # Such as `metadata.seen`: the value differs from call to call.
        self.cause = frames[-1] if frames else message.partition(" ")[0] if of_call else message


class CheckSkipped(Exception):
    """The check does not apply; the message says why."""


class ContractBroken(AssertionError):
    """At least one check failed; the message is the report.

    Attributes:
        results: Of all checks.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        super().__init__("\n".join(line for result in results if result.status == "failed" for line in result.lines()))
        self.results = results


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check.

    Attributes:
        note: What was checked, why it was not, or what failed.
        details: The input that failed, and the frames of one's own code.
    """

    check: str
    status: Status
    note: str
    details: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Text of the result: one line, and the details of a failure."""
        word = {"ok": "ok", "failed": "FAIL", "skipped": "skip"}[self.status]
        return [f"{word:<5} {self.check:<12} {self.note}", *(f"        {line}" for line in self.details)]


class Bench:
    """What the checks share.

    Attributes:
        rows: Dataset rows to play.
        cases: Declared cases.
        trouble: Why there are no rows, or no valid cases, by check.
        reported: The check that has reported a cause, by cause: the others need not report it again.
        failed: Checks that have failed.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.rows: list[Row] = []
        self.cases: list[Case] = []
        self.trouble: dict[str, CheckFailed] = {}
        self.reported: dict[str, str] = {}
        self.failed: set[str] = set()
        self._first: Instance | None = None

    @property
    def subject(self) -> Subject:
        return self.harness.subject

    @property
    def first(self) -> Instance:
        """An instance that the checks share."""
        if self._first is None:
            self._first = self.harness.instance()
        return self._first

    def compare_repeated(self) -> None:
        """Skip a check that compares plays, if an episode differs whenever it is played."""
        if "determinism" in self.failed:
            raise CheckSkipped("episodes differ whenever they are played: see determinism")

    @property
    def scripts(self) -> list[Script]:
        """All episodes to play: plausible responses to rows, and those of the declared cases."""
        found = [
            Script(f"row-{number}-{index}", row, responses, seed=self.subject.seed + number)
            for number, row in enumerate(self.rows)
            for index, responses in enumerate(scripts_of(row, count=SCRIPTS, turns=TURNS, seed=self.subject.seed))
        ]
        found += [
            Script(f"case-{number}", case.row, case.responses, case.seed) for number, case in enumerate(self.cases)
        ]
        if not found:
            raise CheckSkipped("there are no rows to play: see generator")
        return found


Check = Callable[[Bench], str]
"""Checks something; returns what was checked.

Raises:
    CheckFailed, CheckSkipped, CallFailed: See there.
"""


def creation(bench: Bench) -> str:
    """Two instances can be created from the same config."""
    hooks = bench.first.hooks
    bench.harness.instance()
    names = [name for name in ("reset", "close", "shutdown") if getattr(hooks, name)] or ["no episodes"]
    names += ["score_group"] if hooks.score_group else []
    return f"two instances; recovery {hooks.recovery}, {', '.join(names)}"


def generator(bench: Bench) -> str:
    """`generate_dataset` returns as many valid rows as asked for, the same ones for the same seed."""
    if (trouble := bench.trouble.get("generator")) is not None:
        raise trouble
    subject, count = bench.subject, max(ROWS, len(bench.rows))
    if not subject.declared().generates:
        raise CheckSkipped("there is no generate_dataset")
    try:
        once, again = (list(itertools.islice(subject.generated(count, subject.seed), count + 1)) for _ in range(2))
    except (UnusableEnvironment, EnvironmentFault) as error:
        raise CheckFailed(str(error), traceback=error.traceback) from error
    except (Exception, SystemExit) as error:
        fault = fault_of(error, "generate_dataset")
        raise CheckFailed(
            str(fault), [f"call:     generate_dataset({count}, {subject.seed})"], fault.traceback
        ) from error
    call = f"generate_dataset({count}, {subject.seed})"
    if len(once) != count:
        raise CheckFailed(f"{call} returned {'more than ' * (len(once) > count)}{min(len(once), count)} rows")
    for number, (one, two) in enumerate(zip(once, again, strict=False)):
        try:
            plain(one, f"row {number}")
            subject.row(one, RowPosition("row ", number))
        except (DatasetError, NotPlain) as error:
            raise CheckFailed(f"{call}: {error}") from error
        if one != two:
            raise CheckFailed(
                f"{call} returned another row {number} the second time",
                [f"first:    {json_text(one)}", f"second:   {json_text(two)}"],
            )
    if len(again) != len(once):
        raise CheckFailed(f"{call} returned {len(again)} rows the second time instead of {len(once)}")
    return f"the same {count} valid rows twice"


def rows(bench: Bench) -> str:
    """`check_row` accepts every row that is played, and changes nothing."""
    if not bench.subject.declared().checks_rows:
        raise CheckSkipped("there is no check_row")
    environment = bench.first.environment
    if environment is None:
        raise CheckSkipped("isolation Process: checked with Inline")
    given = [*bench.rows, *(case.row for case in bench.cases)]
    if not given:
        raise CheckSkipped("there are no rows to check: see generator")
    for row in given:
        metadata = own_copy(row.metadata)
        place = [f"row:      {row.where}, metadata {json_text(row.metadata)}"]
        try:
            environment.check_row(metadata)
        except (Exception, SystemExit) as error:
            fault = fault_of(error, "check_row")
            raise CheckFailed(str(fault), place, fault.traceback) from error
        if _frozen(metadata) != _frozen(row.metadata):
            raise CheckFailed(f"check_row changed the metadata: {json_text(metadata)}", place)
    return f"{len(given)} rows"


def returns(bench: Bench) -> str:
    """`reset` and `step` return values of the right shapes."""
    outcomes: list[StepOutcome] = []
    for script in bench.scripts:
        try:
            outcomes += bench.first.play(script).outcomes
        except CallFailed as failed:
            if not _about_state(failed):
                raise
    notes = [f"{len(outcomes)} steps of {len(bench.scripts)} episodes"]
    if any(message["role"] == "assistant" for outcome in outcomes for message in outcome.observation):
        notes.append("observations of the role assistant are context, and never learned from")
    if any("reward1" in outcome.reward_parts for outcome in outcomes):
        notes.append("rewards is a matrix, whose columns are named reward1, reward2, …: their sum counts")
    return "; ".join(notes)


def plain_data(bench: Bench) -> str:
    """Metadata is plain data that JSON can hold."""
    for script in bench.scripts:
        try:
            bench.first.play(script)
        except CallFailed as failed:
            if _about_state(failed):
                raise
    return f"metadata of {len(bench.scripts)} episodes is JSON"


def state(bench: Bench) -> str:
    """With recovery metadata, the metadata is all of the state: another instance goes on from its JSON."""
    if bench.first.hooks.recovery != "metadata":
        raise CheckSkipped(f"recovery is {bench.first.hooks.recovery}")
    bench.compare_repeated()
    instances = (bench.first, bench.harness.instance())
    turns = 0
    for script in bench.scripts:
        expected = bench.first.play(script)
        [play] = bench.first.begin([script])
        while not play.ended:
            play.pass_through_json()
            # The instance that did not take the turn before.
            instance = instances[(len(play.outcomes) + 1) % 2]
            try:
                instance.step([play])
            except CallFailed as failed:
                raise CheckFailed(
                    f"another instance cannot go on from the metadata: {failed}",
                    [*failed.place, f"metadata: {json_text(play.metadata)}", *_other_recoveries()],
                    failed.traceback,
                ) from failed
        try:
            instances[1].close([play.end()], script.place())
        except CallFailed as failed:
            text = f"another instance than that of the reset cannot close the episode: {failed}"
            raise CheckFailed(text, [*failed.place, *_other_recoveries()], failed.traceback) from failed
        if (difference := expected.difference(play)) is not None:
            raise CheckFailed(
                f"another instance goes on differently from the metadata: {difference}",
                [*script.place(), *_other_recoveries()],
            )
        turns += len(play.outcomes)
    return f"{turns} turns by two instances in turn"


def determinism(bench: Bench) -> str:
    """The same row, seed and responses give the same observations and rewards, in any instance."""
    stateful_only = bench.first.hooks.recovery == "restart"
    other = bench.harness.instance()
    for script in bench.scripts:
        if stateful_only:
            script = Script(script.id, script.row, script.responses[:0], script.seed)
        first = bench.first.play(script)
        for instance, where in ((bench.first, "the second time"), (other, "in another instance")):
            if (difference := first.difference(instance.play(script))) is not None:
                raise CheckFailed(f"{where}, {difference}", script.place())
        _check_group(bench.first, script)
    if stateful_only:
        return "recovery restart: only how episodes begin"
    return f"{len(bench.scripts)} episodes, three times in two instances"


def _check_group(instance: Instance, script: Script) -> None:
    """Episodes of a prompt group differ in their names only, and begin alike."""
    if not instance.hooks.reset:
        return
    pair = [Script(f"{script.id}-{sample}", script.row, (), script.seed) for sample in range(2)]
    one, two = (instance.play(script) for script in pair)
    if (difference := one.difference(two)) is not None:
        raise CheckFailed(f"two episodes of the same seed begin differently: {difference}", script.place())


def batches(bench: Bench) -> str:
    """A batch gives what single steps give, in any order."""
    scripts = bench.scripts
    alone = [bench.first.play(script) for script in scripts]
    again = [bench.first.play(script) for script in scripts]
    stateful = bench.first.hooks.stateful
    how = "side by side" if stateful else "in one batch"
    for order, text in ((scripts, how), (scripts[::-1], f"{how}, in the reverse order")):
        together = {play.script.id: play for play in bench.first.play_together(order)}
        for one, two in zip(alone, again, strict=True):
            # What changes by itself, such as a time, is not compared.
            if one.difference(two) is not None:
                continue
            stable = one.difference(two, states=True) is None
            if (difference := one.difference(together[one.script.id], states=stable)) is not None:
                raise CheckFailed(f"{text} with {len(scripts) - 1} others: {difference}", one.script.place())
    return f"{len(scripts)} episodes {how} as alone, in two orders"


def replay(bench: Bench) -> str:
    """With recovery replay, another instance that replays the responses comes to the same state."""
    if bench.first.hooks.recovery != "replay":
        raise CheckSkipped(f"recovery is {bench.first.hooks.recovery}")
    bench.compare_repeated()
    other = bench.harness.instance()
    turns = 0
    for script in bench.scripts:
        whole = bench.first.play(script)
        played = len(whole.outcomes)
        # Lost before each of its turns, while other episodes are open in the other instance.
        neighbor = Script("neighbor", script.row, script.responses, script.seed + 1)
        [beside] = other.begin([neighbor])
        other.step([beside])
        [again] = other.begin([script])
        for turn in range(played):
            other.step([again])
            if not beside.ended:
                other.step([beside])
            if (difference := whole.difference(again, turns=turn + 1)) is not None:
                raise CheckFailed(f"replayed in another instance, {difference}", script.place())
        other.close([again.end("lost"), beside.end("lost")], script.place())
        turns += played
    return f"{turns} turns of {len(bench.scripts)} episodes in another instance"


def groups(bench: Bench) -> str:
    """Groups of one and of several trajectories get one score each, the same ones again and in another instance."""
    instance = bench.first
    other = bench.harness.instance()
    count = 0
    for _, of_row in itertools.groupby(bench.scripts, key=lambda script: script.row):
        scripts = list(of_row)
        members = [instance.play(script).member() for script in scripts]
        for some in (members[:1], members):
            place = [f"a group of {len(some)}", *scripts[0].place()]
            scores = instance.score_group(some, place)
            for again, how in ((instance, "the second time"), (other, "in another instance")):
                found = again.score_group(some, place)
                if found != scores:
                    first = next(n for n, (one, two) in enumerate(zip(scores, found, strict=True)) if one != two)
                    raise CheckFailed(
                        f"score_group scored the same group otherwise {how}: {found[first]} instead of {scores[first]}",
                        place,
                    )
            count += 1
    return f"{count} groups, each scored three times"


def nonsense(bench: Bench) -> str:
    """No response makes `step` fail."""
    rows = bench.rows[:NONSENSE_ROWS] or [case.row for case in bench.cases[:NONSENSE_ROWS]]
    if not rows:
        raise CheckSkipped("there are no rows to play: see generator")
    failures: list[tuple[str, CallFailed]] = []
    for number, row in enumerate(rows):
        for index, (name, text) in enumerate(NONSENSE.items()):
            # After a plausible response, too: later turns may read the response in another way.
            turns = [(text, text)] if index % 2 else [(text,), (plausible(row)[0], text)]
            for responses in turns:
                script = Script(f"nonsense-{number}", row, responses, bench.subject.seed + number)
                try:
                    bench.first.play(script)
                except CallFailed as failed:
                    failures.append((name, failed))
    if failures:
        raise _nonsense_failure(failures)
    return f"{len(NONSENSE)} responses to {len(rows)} rows"


def _nonsense_failure(failures: Sequence[tuple[str, CallFailed]]) -> CheckFailed:
    name, first = failures[0]
    names = list(dict.fromkeys(name for name, _ in failures))
    hint = []
    if isinstance(first.fault, RowFault):
        hint = ["UnusableRow says that the dataset is at fault, whatever the policy writes"]
    others = f"; also {', '.join(names[1 : _SHOWN_FAILURES + 1])}" if names[1:] else ""
    rest = f" and {len(names) - _SHOWN_FAILURES - 1} more" if len(names) > _SHOWN_FAILURES + 1 else ""
    return CheckFailed(f"{first} ({name}{others}{rest})", [*first.place, *hint], first.traceback, of_call=True)


def inputs(bench: Bench) -> str:
    """`step` changes neither the messages nor the metadata that it gets."""
    if bench.first.environment is None:
        raise CheckSkipped("a process of its own gets copies")
    for script in bench.scripts:
        changes: list[str] = []
        bench.first.play(script, functools.partial(_WatchedBatch, changes=changes))
        if changes:
            raise CheckFailed(f"step changed {changes[0]}", script.place())
    return f"messages and metadata of {len(bench.scripts)} episodes are as before"


@dataclass(frozen=True, slots=True)
class _WatchedBatch(StepBatch):
    """Steps that note changes of their arguments."""

    changes: list[str] = field(default_factory=list)

    def invoke(self, environment: Any) -> Any:
        logs, states = self.arguments()
        before = [_frozen(log) for log in logs], [_frozen(state) for state in states]
        awaitable = environment.step(logs, states)

        def compare() -> None:
            for index, (log, metadata) in enumerate(zip(logs, states, strict=False)):
                if _frozen(log) != before[0][index]:
                    self.changes.append(f"the messages: {before[0][index]} became {_frozen(log)}"[:600])
                if _frozen(metadata) != before[1][index]:
                    self.changes.append(f"the metadata: {before[1][index]} became {_frozen(metadata)}"[:600])

        if hasattr(awaitable, "__await__"):

            async def watched() -> Any:
                result = await awaitable
                compare()
                return result

            return watched()
        compare()
        return awaitable


def closing(bench: Bench) -> str:
    """Every episode that was reset can be closed, whatever happened, and leaves nothing behind."""
    instance = bench.first
    hooks = instance.hooks
    if not (hooks.reset or hooks.close or hooks.stateful):
        raise CheckSkipped("there are no episodes: neither reset nor close")
    if hooks.stateful and hooks.reset and not hooks.close:
        raise CheckFailed("there is reset but no close: what an episode holds is never freed")
    scripts = bench.scripts
    before = _sizes(instance.environment)
    for script in scripts[:_LEAK]:
        # Dropped before its first step.
        [play] = instance.begin([script])
        instance.close([play.end("interrupted")], ["closed right after its reset", *script.place()])
        # Its step failed.
        [play] = instance.begin([script])
        item = play.item(named=hooks.stateful)
        broken = StepBatch([type(item)([*item.log[:-1], {"role": "assistant"}], None, item.episode)])
        try:
            instance.run(broken, [[]])
        except CallFailed:
            reason = "closed after a step that failed"
        else:
            reason = "closed after a step without state"
        instance.close([play.end("failed")], [reason, *script.place()])
        # Lost, and reset again under its name.
        instance.play(script)
        instance.play(script)
    many = [
        Script(f"leak-{number}", script.row, script.responses, script.seed)
        for number, script in zip(range(_LEAK), itertools.cycle(scripts[:1]), strict=False)
    ]
    for script in many:
        instance.play(script)
    for name, size in _sizes(instance.environment).items():
        if size - before.get(name, 0) >= _LEAK:
            raise CheckFailed(f"self.{name} has {size - before.get(name, 0)} more items after its episodes were closed")
    return f"{min(len(scripts), _LEAK) * 4 + _LEAK} episodes: at their end, at once, after a failed step, twice"


def scoring(bench: Bench) -> str:
    """The declared cases get the rewards that they declare."""
    if (trouble := bench.trouble.get("cases")) is not None:
        raise trouble
    if not bench.cases:
        raise CheckSkipped("no scoring_cases are declared: right and wrong responses with their rewards")
    wrong: list[str] = []
    for number, case in enumerate(bench.cases):
        script = Script(f"case-{number}", case.row, case.responses, case.seed)
        play = bench.first.play(script)
        where = f"scoring_cases[{number}] {' then '.join(shown(text, 120) for text in case.responses)}"
        if len(play.outcomes) < len(case.responses):
            wrong.append(f"{where}: it ended after {len(play.outcomes)} of {len(case.responses)} responses")
        elif not case.lowest - 1e-9 <= play.reward <= case.highest + 1e-9:
            parts = f" {json_text(dict(play.outcomes[-1].reward_parts))}" if play.outcomes[-1].reward_parts else ""
            wrong.append(
                f"{where}: reward {play.reward:g}{parts} instead of {case.expected}, "
                f"metadata {json_text(case.row.metadata, 120)}"
            )
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(bench.cases)} cases", wrong)
    return f"{len(bench.cases)} cases"


def metrics(bench: Bench) -> str:
    """`global_post_process_and_metrics` takes finished trajectories, and none, and returns metrics."""
    environment = bench.first.environment
    if environment is None:
        raise CheckSkipped("isolation Process: its metrics are computed elsewhere")
    plays = [bench.first.play(script) for script in bench.scripts]
    for some in (plays, []):
        try:
            returned = environment.global_post_process_and_metrics(_columns(some, bench.subject.name))
        except (Exception, SystemExit) as error:
            fault = fault_of(error, "global_post_process_and_metrics")
            raise CheckFailed(f"{fault}, with {len(some)} trajectories", traceback=fault.traceback) from error
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise CheckFailed(
                f"global_post_process_and_metrics returned {shown(returned)}; it must return the batch and a dict"
            )
    return f"of {len(plays)} trajectories, and of none"


CHECKS: Mapping[str, Check] = {
    "creation": creation,
    "generator": generator,
    "rows": rows,
    "returns": returns,
    "plain": plain_data,
    "nonsense": nonsense,
    "closing": closing,
    "determinism": determinism,
    "state": state,
    "batches": batches,
    "inputs": inputs,
    "replay": replay,
    "groups": groups,
    "scoring": scoring,
    "metrics": metrics,
}
"""The checks by name, in their order."""


def run_contract(
    subject: Subject,
    *,
    skip: Iterable[str] = (),
    rows: int = ROWS,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run all checks; the others are left out if no instance can be created, and `groups` without a `score_group`.

    Args:
        skip: Names of checks to leave out.
        rows: Number of dataset rows that are played.
        report: Called with each result as soon as it is there.

    Raises:
        ValueError: There is no check of a name to skip.
    """
    left_out = set(skip)
    if unknown := left_out - CHECKS.keys():
        raise ValueError(f"there is no check {sorted(unknown)[0]}; the checks are {', '.join(CHECKS)}")
    results = []
    with Harness.open(subject) as harness:
        bench = Bench(harness)
        for name, check in CHECKS.items():
            if name == "groups" and not bench.first.hooks.score_group:
                continue
            result = Result(name, "skipped", "left out") if name in left_out else _result(name, check, bench)
            results.append(result)
            if report is not None:
                report(result)
            if name == "creation":
                if result.status == "failed":
                    break
                _gather(bench, rows)
    return results


def check_environment(
    environment: type | str,
    config: Mapping[str, Any] | None = None,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    isolation: str = "Inline",
    timeout: float = 30.0,
    seed: int = 0,
    skip: Iterable[str] = (),
) -> list[Result]:
    """Run the contract, for tests of one's own.

    Args:
        environment: A class, the name of a built-in, or `module:Class`.
        config: Argument of its constructor.
        rows: Dataset rows to play; None: those of its generator.
        isolation: `Inline`, or `Process` or `Remote` for one that is given as text.
        timeout: Time limit of a call, in seconds.
        skip: Names of checks to leave out, see `CHECKS`.

    Raises:
        ContractBroken: A check failed; the message says what, with which input, and in which line.
    """
    given = None if rows is None else list(rows)
    source: RowSource | None = None
    if given is not None:

        def read(count: int) -> list[Row]:
            found = enumerate(given[:count])
            return [subject.row(row, RowPosition("rows[", number, "]")) for number, row in found]

        source = read
    subject = Subject.of_class(environment, config, isolation=isolation, timeout=timeout, dataset=source, seed=seed)
    results = run_contract(subject, skip=skip)
    if any(result.status == "failed" for result in results):
        raise ContractBroken(results)
    return results


def _gather(bench: Bench, count: int) -> None:
    """Read rows and cases; what is wrong with them is reported by their checks."""
    try:
        bench.cases = bench.subject.cases()
    except (DatasetError, UnusableEnvironment, ValueError) as error:
        bench.trouble["cases"] = CheckFailed(str(error), traceback=getattr(error, "traceback", None))
    try:
        bench.rows = bench.subject.rows(count)
    except NoRows as error:
        # The rows of the cases are enough.
        if not bench.cases:
            bench.trouble["generator"] = CheckFailed(str(error))
    except (DatasetError, UnusableEnvironment) as error:
        bench.trouble["generator"] = CheckFailed(str(error), traceback=error.traceback)


def _result(name: str, check: Check, bench: Bench) -> Result:
    try:
        return Result(name, "ok", check(bench))
    except CheckSkipped as skipped:
        return Result(name, "skipped", str(skipped))
    except UnusableEnvironment as error:
        failed = CheckFailed(str(error), traceback=error.traceback)
    except CallFailed as error:
        failed = CheckFailed(str(error), error.place, error.traceback, of_call=True)
    except CheckFailed as error:
        failed = error
    frames = excerpt(failed.traceback.frames) if failed.traceback is not None else []
    if (reporter := bench.reported.setdefault(failed.cause, name)) != name:
        return Result(name, "skipped", f"it fails as {reporter} does")
    bench.failed.add(name)
    return Result(name, "failed", str(failed), [*failed.lines, *frames])


def _about_state(failed: CallFailed) -> bool:
    return str(failed.fault).startswith("metadata")


def _other_recoveries() -> list[str]:
    return ['an environment that keeps state in its object says so: recovery = "replay" or "restart"']


def _frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _sizes(environment: Any) -> dict[str, int]:
    """Lengths of the containers that an instance holds."""
    held = getattr(environment, "__dict__", {})
    return {name: len(value) for name, value in held.items() if isinstance(value, dict | list | set)}


def _columns(plays: Sequence[Play], name: str) -> dict[str, list[Any]]:
    return {
        "message_log": [play.log for play in plays],
        "extra_env_info": [play.metadata for play in plays],
        "idx": [play.script.row.idx for play in plays],
        "answer": [play.outcomes[-1].answer for play in plays],
        "task_name": [name] * len(plays),
        "task_index": list(range(len(plays))),
        "rollout_index": [0] * len(plays),
        "total_reward": [play.reward for play in plays],
        "stop_reason": ["terminated" if play.outcomes[-1].terminated else "max_turns" for play in plays],
        "turn_count": [len(play.outcomes) for play in plays],
    }
