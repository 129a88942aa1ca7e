"""A task: its configuration, its steps with what each inherits, and a digest of all that decides its rewards."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kuberoll_api.manifest.tasks import is_task, tasks_in
from kuberoll_workers.harbor.configuration import (
    FILE,
    Artifact,
    Collect,
    Configuration,
    Environment,
    Healthcheck,
    Step,
    configuration_of,
    read_configuration,
)
from kuberoll_workers.harbor.files import TaskFiles, UnusableFile, tree_digest
from kuberoll_workers.harbor.given import KEY, NOWHERE, Given, merged
from kuberoll_workers.harbor.mistakes import Mistake, TaskError
from kuberoll_workers.harbor.phases import Network
from kuberoll_workers.harbor.setup import FILES, REQUIREMENTS, WHEELS, SetUp, bad_requirements, needs_index
from kuberoll_workers.harbor.setup import SCRIPT as SETUP_SCRIPT

INSTRUCTION: Final = "instruction.md"
SCRIPT: Final = "test.sh"
DOCKERFILE: Final = "Dockerfile"

_COMPOSE: Final = "docker-compose.yaml"
_CONTEXT: Final = "trajectory.json"
_Found = TypeVar("_Found")

# Marks of benchmarks, by which they are found in training data; no part of the instruction.
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of a task, and where its image comes from: `image`, or else a build of `context`, or else the job.

    Attributes:
        image: Reference of an image that is there.
        context: Directory with the Dockerfile.
        digest: SHA-256 of the context's content, as 64 hexadecimal digits.
        upload: Directory whose files are put into the working directory when the machine starts.
        setup: How it is set up then; None: it is ready.
    """

    environment: Environment
    image: str | None = None
    context: Path | None = None
    digest: str | None = None
    upload: Path | None = None
    setup: SetUp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the rewards of a step are made.

    Attributes:
        machine: The verifier's own; None: the agent's.
        tests: Directories that are put into /tests, in this order; the files of a later one win.
        files: Further files of /tests, which win over those: texts by path.
        script: Path of the script in /tests.
        timeout: In seconds.
        user: None: that of the image.
        network: What the machine may reach while tests run.
        collect: Commands that run in the agent's machine after the agent.
    """

    machine: Machine | None
    tests: tuple[Path, ...]
    files: Mapping[str, str]
    script: str
    timeout: float
    user: str | int | None
    env: dict[str, str]
    network: Network
    collect: tuple[Collect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a task with what it inherits; a task without steps is a single stage without a name.

    Attributes:
        timeout: Of the agent's work, in seconds; None: none.
        user: Of the agent; None: that of the image.
        network: What the machine may reach while the agent works.
        healthcheck: Of the step, beside the machine's.
        workdir: Directory whose files are put into the working directory before the step; a `setup.sh` in it runs then.
        solution: Directory with the reference solution.
        artifacts: What is kept after the step.
    """

    name: str | None
    instruction: str
    timeout: float | None
    user: str | int | None
    network: Network
    verification: Verification
    healthcheck: Healthcheck | None
    min_reward: float | dict[str, float] | None
    workdir: Path | None
    solution: Path | None
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that can be played.

    Attributes:
        name: `organization/name` of its [task] table, else that of its directory.
        machine: The agent's.
        stages: In their order, at least one.
        digest: SHA-256 of task.toml, instructions, tests, files of steps, and the machines' definitions, as 64
            hexadecimal digits. Solutions do not count.
    """

    directory: Path
    name: str
    configuration: Configuration
    machine: Machine
    stages: tuple[Stage, ...]
    digest: str


def find_tasks(directory: Path) -> list[Path]:
    """The task's directory itself, or the directories of the tasks in a folder, by name.

    Raises:
        TaskError: There is no task.
    """
    if is_task(directory):
        return [directory]
    if found := tasks_in(directory):
        return found
    message = f"holds no task: neither {FILE} nor {INSTRUCTION}, nor directories with one"
    nested = next(directory.glob(f"*/*/{FILE}"), None)
    if nested is not None:
        message += f"; name the folder {nested.parent.parent}"
    raise TaskError([Mistake(file=directory, message=message)])


def read_tasks(directory: Path) -> list[Task]:
    """All tasks of a folder, or the one that it is.

    Raises:
        TaskError: Some cannot be read or are not served, or two have one name; with the mistakes of all.
    """
    tasks: list[Task] = []
    mistakes: list[Mistake] = []
    names = TaskNames()
    for path in find_tasks(directory):
        try:
            task = read_task(path)
            names.add(task)
        except TaskError as error:
            mistakes += error.mistakes
        else:
            tasks.append(task)
    if mistakes:
        raise TaskError(mistakes)
    return tasks


class TaskNames:
    """The names of tasks, each of which is of one task only."""

    def __init__(self) -> None:
        self._places: dict[str, Path] = {}

    def add(self, task: Task) -> None:
        """Add a task.

        Raises:
            TaskError: Another one has its name.
        """
        if (other := self._places.setdefault(task.name, task.directory)) != task.directory:
            message = f"{task.name!r} is also the name of {other}: give one of the two another name"
            raise TaskError([Mistake(file=task.directory / FILE, field="task.name", message=message)])


def read_task(directory: Path | None, given: Given | None = None) -> Task:
    """Read a task; nothing in its directory is changed.

    Args:
        directory: None: it has none, and `given` says everything.
        given: What a row says of it.

    Raises:
        TaskError: It cannot be read, or KubeRoll does not serve it; with all mistakes.
    """
    if directory is not None and not directory.is_dir():
        raise TaskError([Mistake(file=directory, message="is no directory: a task has one")])
    configuration, is_harbor_s = _configuration(directory, Given() if given is None else given)
    return _Reader(directory or NOWHERE, configuration, given or Given(), is_harbor_s=is_harbor_s).task()


def _configuration(directory: Path | None, given: Given) -> tuple[Configuration, bool]:
    """A task's configuration, and whether it is one for Harbor: that a task without an image is not."""
    # Harbor's tasks reach everything unless they say something else; those that it does not read reach nothing.
    document: dict[str, Any] = {"environment": {"network_mode": "no-network"}}
    is_harbor_s = False
    if directory is not None and (directory / FILE).exists():
        own = read_configuration(directory / FILE)
        has_image = own.environment.docker_image is not None or (directory / "environment" / DOCKERFILE).is_file()
        is_harbor_s = has_image and "setup" not in own.model_fields_set
        if not given.tables:
            return own, is_harbor_s
        document = tomllib.loads((directory / FILE).read_text(encoding="utf-8"))
    return configuration_of(merged(document, given.tables), "", Path(f"metadata.{KEY}")), is_harbor_s


class _Reader:
    """Reads what belongs to a configuration, and notes what is missing."""

    def __init__(self, directory: Path, configuration: Configuration, given: Given, *, is_harbor_s: bool) -> None:
        """`is_harbor_s`: it has an image of its own, and is played as Harbor does."""
        self._directory = directory
        self._configuration = configuration
        self._given = given
        self._is_harbor_s = is_harbor_s
        self._files = TaskFiles(directory)
        self._mistakes: list[Mistake] = []
        self._contexts: dict[Path, str] = {}
        self._uploaded: list[str] = []

    def task(self) -> Task:
        """
        Raises:
            TaskError: With all mistakes.
        """
        machine = self._agent_machine()
        steps = self._configuration.steps or []
        stages = [self._stage(machine, step) for step in steps] or [self._stage(machine, None)]
        digest = self._digest()
        if self._mistakes:
            raise TaskError(list(dict.fromkeys(self._mistakes)))
        package = self._configuration.task
        return Task(
            directory=self._directory,
            name=self._name() if package is None else package.name,
            configuration=self._configuration,
            machine=machine,
            stages=tuple(stages),
            digest=digest,
        )

    def _name(self) -> str:
        if self._given.name is not None:
            return self._given.name
        return "task" if self._directory == NOWHERE else self._directory.resolve().name

    def _agent_machine(self) -> Machine:
        environment, directory = self._configuration.environment, self._directory / "environment"
        self._refuse_services(directory)
        setup = self._setup()
        if environment.docker_image is None and (directory / DOCKERFILE).is_file():
            return replace(self._built(environment, directory), setup=setup)
        has_files = directory.is_dir() and not (directory / DOCKERFILE).exists() and any(directory.iterdir())
        upload = directory if has_files else None
        own = self._directory / FILES
        if not self._is_harbor_s and own.is_dir():
            if upload is not None:
                self._note(own, f"and {directory.name} both have files for the working directory: keep one of them")
            upload = own
        if upload is not None:
            self._uploaded.append(upload.name)
        return Machine(environment=environment, image=environment.docker_image, upload=upload, setup=setup)

    def _setup(self) -> SetUp | None:
        """What sets machines up: what a row says, and what the directory has, unless the task is Harbor's."""
        given, options = self._given, self._configuration.setup
        own = not self._is_harbor_s
        script, named, wheels = (self._directory / name for name in (SETUP_SCRIPT, REQUIREMENTS, WHEELS))
        requirements = named if own and named.exists() else None
        text = self._text(requirements)
        has_wheels = own and wheels.is_dir()
        setup = SetUp(
            options=options,
            files=given.files,
            requirements=requirements,
            packages=given.packages,
            wheels=wheels if has_wheels else None,
            script=script if own and script.exists() else None,
            commands=given.commands,
            network=options.network,
            indexed=not has_wheels and needs_index(f"{text}\n{given.packages}"),
        )
        for path in (setup.requirements, setup.script):
            if path is not None and not path.is_file():
                self._note(path, "is no file")
        places = [(named, None, text), (Path(f"metadata.{KEY}"), "requirements", given.packages)]
        self._mistakes += [
            Mistake(file=place, line=line, field=field, message=message)
            for place, field, given_text in places
            for line, message in bad_requirements(given_text)
        ]
        if own:
            found = (setup.script, setup.requirements, setup.wheels)
            self._uploaded += [path.name for path in found if path is not None]
        return None if setup.is_empty else setup

    def _text(self, file: Path | None) -> str:
        """The text of a file of the set-up; empty after a note, or if there is none."""
        if file is None or not file.is_file():
            return ""
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self._note(file, "not UTF-8; save the file as UTF-8")
        except OSError as error:
            self._note(file, f"cannot be read: {error.strerror or error}")
        return ""

    def _built(self, environment: Environment, context: Path) -> Machine:
        if context not in self._contexts:
            self._contexts[context] = self._tried(partial(tree_digest, context)) or ""
        return Machine(environment=environment, context=context, digest=self._contexts[context])

    def _stage(self, machine: Machine, step: Step | None) -> Stage:
        configuration = self._configuration
        directory = self._directory if step is None else self._directory / "steps" / step.name
        agent = configuration.agent if step is None else step.agent
        for path in () if step is None else (directory, directory / INSTRUCTION):
            self._tried(partial(self._files.check_inside, path))
        if (directory / _CONTEXT).exists():
            self._note(
                directory / _CONTEXT,
                "is what an agent has done before; KubeRoll's agents begin with the instruction: remove it, or leave "
                "the task out",
            )
        return Stage(
            name=None if step is None else step.name,
            instruction=self._instruction(directory / INSTRUCTION, step),
            timeout=agent.timeout_sec if agent.timeout_sec is not None else configuration.agent.timeout_sec,
            user=agent.user if agent.user is not None else configuration.agent.user,
            network=agent.network or configuration.agent.network or machine.environment.network,
            verification=self._verification(machine, directory, step),
            healthcheck=None if step is None else step.healthcheck,
            min_reward=None if step is None else step.min_reward,
            workdir=None if step is None else _directory(directory / "workdir"),
            solution=_directory(directory / "solution") or _directory(self._directory / "solution"),
            artifacts=(*configuration.artifacts, *(() if step is None else step.artifacts)),
        )

    def _instruction(self, file: Path, step: Step | None) -> str:
        if self._given.has_prompt and step in (None, *(self._configuration.steps or ())[:1]):
            return ""
        if self._directory == NOWHERE:
            self._note(Path(f"metadata.{KEY}"), "has no directory with an instruction.md, and the row has no prompt")
            return ""
        try:
            text = _without_canary(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._note(file, "is missing; it is what the agent is told")
        except OSError as error:
            self._note(file, f"cannot be read: {error.strerror or error}")
        except UnicodeDecodeError:
            self._note(file, "not UTF-8; save the file as UTF-8")
        else:
            if not text.strip():
                self._note(file, "is empty; it is what the agent is told")
            return text
        return ""

    def _verification(self, machine: Machine, directory: Path, step: Step | None) -> Verification:
        common = self._configuration.verifier
        verifier = common if step is None else step.verifier
        separate = (verifier.mode or common.mode) == "separate"
        own, bundled = self._verifier_machine(machine, directory, step) if separate else (None, False)
        places = [self._directory / "tests", *([] if step is None else [directory / "tests"])]
        if not bundled:
            self._check_script(places)
        return Verification(
            machine=own,
            tests=() if bundled else tuple(place for place in places if place.is_dir()),
            files=self._given.tests,
            script=SCRIPT,
            # Steps do not inherit it.
            timeout=verifier.timeout_sec,
            user=verifier.user if verifier.user is not None else common.user,
            env={**common.env, **verifier.env},
            network=verifier.network or common.network or (own or machine).environment.network,
            collect=(*common.collect, *(() if step is None else verifier.collect)),
        )

    def _verifier_machine(self, machine: Machine, directory: Path, step: Step | None) -> tuple[Machine, bool]:
        """The verifier's own machine, and whether its image has the tests already.

        A step's image or Dockerfile comes before the task's, and both before a second machine like the agent's.
        """
        common = self._configuration.verifier.environment
        own = None if step is None else step.verifier.environment
        environment = own or common or self._configuration.environment
        places = [*([] if step is None else [(own, directory / "tests")]), (common, self._directory / "tests")]
        for table, tests in places:
            self._refuse_services(tests)
            if table is not None and table.docker_image is not None:
                return Machine(environment=environment, image=table.docker_image), True
            if (tests / DOCKERFILE).is_file():
                return self._built(environment, tests), True
        return (
            Machine(
                environment=environment,
                image=machine.image,
                context=machine.context,
                digest=machine.digest,
                upload=machine.upload,
                setup=machine.setup,
            ),
            False,
        )

    def _check_script(self, places: Sequence[Path]) -> None:
        """Note that no directory has the tests' script, or that rules leave it out."""
        if SCRIPT in self._given.tests:
            return
        script = next((place / SCRIPT for place in reversed(places) if (place / SCRIPT).exists()), None)
        if script is None:
            self._note(places[-1] / SCRIPT, "is missing; it writes the reward into /logs/verifier")
        elif self._tried(partial(self._files.is_left_out, script)):
            self._note(script, "is left out by a rule of .harborignore: it writes the reward")

    def _refuse_services(self, directory: Path) -> None:
        if (directory / _COMPOSE).exists():
            self._note(
                directory / _COMPOSE,
                "a task of KubeRoll has one machine, and no services beside it: put what they do into the image of the "
                "Dockerfile and remove the file, or leave the task out",
            )

    def _digest(self) -> str:
        """Digest of the task, of all that the machines' contexts hold, too."""
        trees = [(name, self._directory / name) for name in (FILE, "tests", *self._uploaded)]
        if not self._configuration.steps:
            trees.append((INSTRUCTION, self._directory / INSTRUCTION))
        for step in self._configuration.steps or ():
            place = f"steps/{step.name}"
            trees += [(f"{place}/{name}", self._directory / place / name) for name in (INSTRUCTION, "tests", "workdir")]
            # Only to see that no link of it leads out of the task.
            self._tried(partial(self._files.selected, self._directory / place))
        self._tried(partial(self._files.selected, self._directory / "solution"))
        own = self._tried(partial(self._files.digest, trees))
        if (given := asdict(self._given)) != asdict(Given(has_prompt=self._given.has_prompt, name=self._given.name)):
            # Without its name: a row of the same content is the same task.
            given["name"] = None
            own = f"{own} {json.dumps(given, sort_keys=True)}"
        return hashlib.sha256(" ".join([own or "", *sorted(self._contexts.values())]).encode()).hexdigest()

    def _note(self, path: Path, message: str) -> None:
        if path.is_relative_to(NOWHERE):
            # A row says what a directory would have.
            path, message = Path(f"metadata.{KEY}"), f"{path.relative_to(NOWHERE)} {message}"
        self._mistakes.append(Mistake(file=path, message=message))

    def _tried(self, look: Callable[[], _Found]) -> _Found | None:
        """What a look at files finds; None after a note of what cannot be used."""
        try:
            return look()
        except UnusableFile as error:
            self._note(error.path, str(error))
        except OSError as error:
            self._note(Path(error.filename or self._directory), f"cannot be read: {error.strerror or error}")
        return None


def _directory(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _without_canary(text: str) -> str:
    """An instruction without the marks that begin it, and the empty lines after them."""
    lines = text.split("\n")
    begin = 0
    while begin < len(lines) and _CANARY.fullmatch(lines[begin].strip()):
        begin += 1
    while begin < len(lines) and not lines[begin].strip():
        begin += 1
    return "\n".join(lines[begin:])
