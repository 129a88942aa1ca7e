"""The environment that is tested or played: where it comes from, its instances, its rows and its declared cases."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import traceback_of
from kuberoll_workers.dataset.reading import read_rows
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.interface import EnvironmentInterface, ScoringCase
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.processes import ProcessEnvironment
from kuberoll_workers.environments.registry import (
    PlainSpec,
    UnusableEnvironment,
    create,
    instantiate,
    resolve,
)
from kuberoll_workers.worker.environments import isolated_environment_factory, process_access_of

DECLARATIONS = "kuberoll_workers.authoring.subject:Declarations"

RowSource = Callable[[int], list[Row]]
"""Reads the first rows, at most as many as its argument."""


class NoRows(ValueError):
    """There are no dataset rows to play; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Case:
    """A declared case, checked.

    Attributes:
        lowest, highest: Bounds of the right reward, inclusive.
        seed: Seed of the episode.
    """

    row: Row
    responses: tuple[str, ...]
    lowest: float
    highest: float
    seed: int

    @property
    def expected(self) -> str:
        """The right reward, for messages."""
        return f"{self.lowest:g}" if self.lowest == self.highest else f"{self.lowest:g} to {self.highest:g}"


@dataclass(frozen=True, slots=True)
class Declared:
    """What an environment declares about itself, as plain data.

    Attributes:
        generates: True if it has `generate_dataset`.
        checks_rows: True if it has `check_row`.
        cases: Its `scoring_cases`, unchecked.
    """

    generates: bool
    checks_rows: bool
    cases: list[Any]

    @classmethod
    def of(cls, environment: Any) -> Self:
        """Read an environment's declarations; runs its code.

        Raises:
            TypeError: `scoring_cases` is no list.
        """
        cases = getattr(environment, "scoring_cases", ())
        if callable(cases):
            cases = cases()
        if isinstance(cases, str | bytes | Mapping) or not hasattr(cases, "__iter__"):
            raise TypeError("scoring_cases must be a list of ScoringCase, or a method that returns one")
        return cls(
            generates=_has_own(type(environment), "generate_dataset"),
            checks_rows=_has_own(type(environment), "check_row"),
            cases=[_plain_case(case) for case in cases],
        )


class Declarations:
    """Stand-in for an environment in a process of its own, whose only row is what the environment declares."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._environment = create(PlainSpec(**config))

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - one row
        declared = Declared.of(self._environment)
        return [{name: getattr(declared, name) for name in ("generates", "checks_rows", "cases")}]

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        raise NotImplementedError

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An environment under test.

    Attributes:
        title: What it is, for the report.
        name: Name of the environment: the `task_name` of its rows.
        make: Creates an instance in this process.
        spec: Description for isolation Process; None: only Inline.
        isolation: `Inline`, `Process` or `Remote`, with a server of its own.
        access: Files and variables of processes.
        timeout: Time limit of a call, in seconds.
        dataset: Reads rows of a dataset; None: they are generated.
        seed: Seed of generated rows and of episodes.
    """

    title: str
    name: str
    make: Callable[[], Any]
    spec: PlainSpec | None = None
    isolation: str = "Inline"
    access: ProcessAccess = field(default_factory=ProcessAccess)
    timeout: float = 30.0
    dataset: RowSource | None = None
    seed: int = 0

    @classmethod
    def of_class(
        cls,
        environment: type | str,
        config: Mapping[str, Any] | None = None,
        *,
        isolation: str = "Inline",
        timeout: float = 30.0,
        dataset: RowSource | None = None,
        seed: int = 0,
    ) -> Self:
        """The subject for a class, a built-in type, or `module:Class`.

        Raises:
            UnusableEnvironment: It does not exist, or cannot run in this isolation.
        """
        if isinstance(environment, str):
            built_in = environment if ":" not in environment else None
            spec = PlainSpec(
                name=built_in or environment.rpartition(":")[2],
                type=built_in,
                entrypoint=None if built_in else environment,
                config=dict(config or {}),
            )
            if isolation == "Inline":
                resolve(type=spec.type, entrypoint=spec.entrypoint)
            return cls(
                title=environment, name=spec.name, make=spec, spec=spec, isolation=isolation, timeout=timeout,
                dataset=dataset, seed=seed,
            )  # fmt: skip
        if isolation != "Inline":
            raise UnusableEnvironment(
                f'isolation {isolation} needs the entrypoint as text: "module:{environment.__name__}"'
            )
        given = copy.deepcopy(dict(config or {}))
        return cls(
            title=f"{environment.__module__}:{environment.__qualname__}",
            name=environment.__name__,
            make=lambda: instantiate(environment, given),
            timeout=timeout,
            dataset=dataset,
            seed=seed,
        )

    @classmethod
    def of_job(
        cls, job: RolloutJob, base: Path, name: str | None, *, isolation: str | None = None, seed: int | None = None
    ) -> Self:
        """The subject for an environment of a job, with the job's dataset.

        Args:
            base: Directory of the manifest.
            name: Name of the environment; None if the job has only one.
            isolation: Another isolation than the job's.
            seed: Another seed than 0 of episodes.

        Raises:
            UnusableEnvironment: The job has no such environment.
        """
        names = [spec.name for spec in job.spec.environments]
        if name is None and len(names) > 1:
            raise UnusableEnvironment(f"--environment: the job has several; name one of {', '.join(names)}")
        name = name or names[0]
        if name not in names:
            raise UnusableEnvironment(f"--environment {name}: the job's environments are {', '.join(names)}")
        spec = next(spec for spec in job.spec.environments if spec.name == name)
        if spec.agent is not None:
            raise UnusableEnvironment(
                f"environment {name!r} is an agent, which needs a policy: try it with `kuberoll run` and a small limit"
            )
        if spec.type is None and spec.entrypoint is None:
            raise UnusableEnvironment(
                f"environment {name!r} is on servers elsewhere, without type or entrypoint: test it where its code is"
            )
        plain = PlainSpec.of(spec)

        def rows(count: int) -> list[Row]:
            read = read_rows(
                job.spec.dataset,
                base=base,
                task_names=names,
                environment=isolated_environment_factory(job, protected=()),
            )
            return list(itertools.islice((row for row in read if row.task_name == name), count))

        return cls(
            title=f"{spec.type or spec.entrypoint}, environment {name} of job {job.metadata.name}",
            name=name,
            make=plain,
            spec=plain,
            isolation=isolation or spec.isolation,
            access=process_access_of(spec, protected=()),
            timeout=spec.step_timeout_seconds,
            dataset=rows,
            seed=seed or 0,
        )

    def executor(self) -> tuple[Executor, Any]:
        """A new instance's executor; with isolation Inline also the instance.

        Raises:
            UnusableEnvironment: It cannot be created.
        """
        if self.isolation != "Inline":
            assert self.spec is not None
            return make_executor(
                self.spec, isolation=self.isolation, processes=1, timeout=self.timeout, access=self.access
            ), None
        environment = self.make()
        made = make_executor(lambda: environment, isolation="Inline", processes=1, timeout=self.timeout)
        return made, environment

    def declared(self) -> Declared:
        """The environment's declarations.

        Raises:
            UnusableEnvironment: It cannot be created, or its `scoring_cases` cannot be read.
        """
        try:
            if self.isolation == "Inline":
                return Declared.of(self.make())
            assert self.spec is not None
            config = {name: getattr(self.spec, name) for name in ("name", "type", "entrypoint", "config")}
            asked = PlainSpec(name=self.spec.name, type=None, entrypoint=DECLARATIONS, config=config)
            [row] = ProcessEnvironment(asked, self.access).generate_dataset(1, 0)
            return Declared(row["generates"], row["checks_rows"], row["cases"])
        except UnusableEnvironment:
            raise
        except EnvironmentFault as fault:
            raise UnusableEnvironment(f"scoring_cases: {fault}", fault.traceback) from fault
        except (Exception, SystemExit) as error:
            raise UnusableEnvironment(
                f"scoring_cases: {type(error).__name__}: {message_of(error)}", traceback_of(error)
            ) from error

    def generated(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Rows of `generate_dataset`, of a new instance.

        Raises:
            UnusableEnvironment: The instance cannot be created.
            Exception: Whatever the generator raises; an EnvironmentFault with isolation Process.
        """
        if self.isolation != "Inline":
            assert self.spec is not None
            return ProcessEnvironment(self.spec, self.access).generate_dataset(count, seed)
        return iter(self.make().generate_dataset(count, seed))

    def row(self, given: Any, place: RowPosition) -> Row:
        """A row of this environment.

        Raises:
            DatasetError: It is invalid.
        """
        made = {**given, "task_name": self.name} if isinstance(given, Mapping) else given
        return parse_row(made, place=place, task_names=[self.name], template=None)

    def rows(self, count: int) -> list[Row]:
        """The first rows of the dataset, else of the generator.

        Raises:
            NoRows: There are none.
            DatasetError, UnusableEnvironment: They cannot be read or generated.
        """
        if self.dataset is not None:
            if not (rows := self.dataset(count)):
                raise NoRows(f"the dataset has no row for environment {self.name}")
            return rows
        if not self.declared().generates:
            raise NoRows(
                "the environment has no generate_dataset: give rows with --dataset rows.jsonl, or test an environment "
                "of a manifest"
            )
        try:
            made = list(itertools.islice(self.generated(count, self.seed), count + 1))[:count]
        except (EnvironmentFault, UnusableEnvironment) as error:
            raise DatasetError(str(error), error.traceback) from error
        except (Exception, SystemExit) as error:
            text = f"generate_dataset raised {type(error).__name__}: {message_of(error)}"
            raise DatasetError(text, traceback_of(error)) from error
        rows = [self.row(row, RowPosition("generated row ", number)) for number, row in enumerate(made)]
        if not rows:
            raise NoRows(f"generate_dataset({count}, {self.seed}) returned no rows")
        return rows

    def cases(self) -> list[Case]:
        """The declared cases.

        Raises:
            UnusableEnvironment, DatasetError, ValueError: They cannot be read, or one is invalid.
        """
        return [self._case(given, number) for number, given in enumerate(self.declared().cases)]

    def _case(self, given: Any, number: int) -> Case:
        place = RowPosition("scoring_cases[", number, "]")
        if not isinstance(given, dict) or not {"row", "responses", "reward"} <= given.keys():
            raise ValueError(f"{place}: a case has row, responses and reward; found {str(given)[:80]}")
        row, responses, reward, seed = given["row"], given["responses"], given["reward"], given.get("seed", 0)
        if not isinstance(row, dict):
            raise ValueError(f"{place}.row: it must be a dataset row, such as {{'metadata': {{…}}}}")
        if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
            raise ValueError(f"{place}.responses: it must be a list of at least one text")
        bounds = reward if isinstance(reward, list) else [reward, reward]
        if len(bounds) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in bounds):
            raise ValueError(f"{place}.reward: it must be a number, or the lowest and the highest that are right")
        if not {"messages", "prompt"} & row.keys():
            row = {**row, "prompt": "(no prompt)"}
        return Case(self.row(row, place), tuple(responses), float(bounds[0]), float(bounds[1]), int(seed))


def _has_own(environment: type, name: str) -> bool:
    """True if a class has an optional method other than the interface's."""
    method = getattr(environment, name, None)
    return callable(method) and method is not getattr(EnvironmentInterface, name)


def _plain_case(case: Any) -> Any:
    """A case as JSON's types."""
    if isinstance(case, ScoringCase):
        case = {"row": case.row, "responses": case.responses, "reward": case.reward, "seed": case.seed}
    return json.loads(
        json.dumps(case, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """What `kuberoll env list` says about a type.

    Attributes:
        text: First line of its module.
        metadata: Fields of the metadata of its rows, each with a few words.
        generates: True if it generates rows.
        library: The library that it needs; None for a built-in.
    """

    text: str
    metadata: Mapping[str, str]
    generates: bool
    library: Library | None

    @classmethod
    def of(cls, name: str) -> Self:
        """Read a type's class; its library need not be installed."""
        found = resolve(type=name)
        return cls(
            text=(inspect.getdoc(inspect.getmodule(found)) or "").partition("\n")[0].rstrip("."),
            metadata=getattr(found, "row_metadata", {}),
            generates=_has_own(found, "generate_dataset"),
            library=getattr(found, "library", None),
        )
