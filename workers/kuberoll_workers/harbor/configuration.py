"""What stands in task.toml, Harbor's format 1.4: tables, defaults, old spellings, and what is refused."""

from __future__ import annotations

import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from kuberoll_workers.harbor.mistakes import Key, Mistake, TaskError, deepest, field_name, line_of
from kuberoll_workers.harbor.phases import Hosts, Network, NetworkMode, Phase
from kuberoll_workers.harbor.servers import McpServer
from kuberoll_workers.harbor.setup import Setup
from kuberoll_workers.harbor.tables import (
    Command,
    Directory,
    Limit,
    NotServed,
    Table,
    User,
    Variables,
    Wait,
    not_served,
)

FILE: Final = "task.toml"
MOST_BYTES: Final = 1 << 20
MACHINE: Final = "main"
"""Name of the agent's machine among the services of a task."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICES = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[1-9¹²³])", re.IGNORECASE)
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_MOST_MEGABYTES = 1 << 40

_NO_SERVICES = (
    "a task of KubeRoll has one machine, and no services of docker compose beside it: put what the service does into "
    "the image"
)


class Author(Table):
    name: str
    email: str | None = None


class Package(Table):
    """`[task]`: what the task is called, `organization/name`, and by whom it is."""

    name: str
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: list[Author] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)

    @field_validator("name")
    @classmethod
    def _of_an_organization(cls, name: str) -> str:
        if not _NAME.fullmatch(name) or ".." in name:
            raise ValueError(
                "write organization/name, of letters, digits, -, _ and ., beginning with a letter or digit"
            )
        return name


class Agent(Phase):
    """`[agent]`.

    Attributes:
        timeout_sec: Limit of its whole work; None: none.
    """

    timeout_sec: Limit | None = None


class Healthcheck(Table):
    """A command that succeeds when the machine is ready; failures before `start_period_sec` do not count.

    Attributes:
        retries: Failures in a row after which the machine is given up; at least one.
    """

    command: Command
    interval_sec: Wait = 5.0
    timeout_sec: Limit = 30.0
    start_period_sec: Wait = 0.0
    start_interval_sec: Wait = 5.0
    retries: Annotated[int, Field(le=10**6, ge=-(10**6))] = 3


class Environment(Hosts):
    """`[environment]`: the machine, its image and its limits.

    Attributes:
        build_timeout_sec: Limit of the build of its image, and of its pull and start.
        docker_image: Image to take, in place of the Dockerfile; None: environment/Dockerfile is built.
        cpus: Number of CPUs; None: as much as there is, so with the others.
        env: Of all processes of the machine.
        workdir: None: that of the image.
    """

    build_timeout_sec: Limit = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[int | float, Field(gt=0, le=10**6)] | None = None
    memory_mb: Annotated[int, Field(gt=0, le=_MOST_MEGABYTES)] | None = None
    storage_mb: Annotated[int, Field(gt=0, le=_MOST_MEGABYTES)] | None = None
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    gpu_types: list[str] | None = None
    tpu: Annotated[None, not_served("KubeRoll has no machines with TPUs: remove the table, or leave the task out")] = (
        None
    )
    mcp_servers: list[McpServer] = Field(default_factory=list)
    env: Variables = Field(default_factory=dict)
    skills_dir: Directory | None = None
    healthcheck: Healthcheck | None = None
    workdir: Directory | None = None
    network_mode: NetworkMode = "public"
    allow_internet: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_sizes(cls, data: Any) -> Any:
        """`memory = "2G"` as `memory_mb = 2048`; without a unit it says nothing."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old in ("memory", "storage"):
            size = data.pop(old, None)
            if not isinstance(size, str):
                continue
            megabytes, new = _megabytes(size, old), f"{old}_mb"
            if data.setdefault(new, megabytes) != megabytes:
                raise ValueError(f"{old} = {size!r} is {megabytes}, and {new} is {data[new]!r}: keep {new}")
        return data

    @field_validator("docker_image")
    @classmethod
    def _image(cls, image: str | None) -> str | None:
        return image or None

    @field_validator("os", mode="before")
    @classmethod
    def _any_case(cls, os: object) -> object:
        return os.lower() if isinstance(os, str) else os

    @field_validator("os")
    @classmethod
    def _linux(cls, os: str) -> str:
        if os != "linux":
            raise NotServed("KubeRoll's machines run Linux: give the task an image for it, or leave the task out")
        return os

    @field_validator("cpus")
    @classmethod
    def _whole(cls, cpus: int | float | None) -> int | float | None:
        return int(cpus) if isinstance(cpus, float) and cpus.is_integer() else cpus

    @model_validator(mode="after")
    def _hosts_of_a_list(self) -> Self:
        self.check_hosts(self.network_mode, given=bool(self.allowed_hosts))
        return self

    @property
    def network(self) -> Network:
        """What the machine may reach; the old `allow_internet` counts where nothing newer is set."""
        unset = "network_mode" not in self.model_fields_set and self.allowed_hosts is None
        if self.allow_internet is not None and unset:
            return Network(mode="public" if self.allow_internet else "no-network")
        return Network(mode=self.network_mode, hosts=list(self.allowed_hosts or ()))


def _megabytes(size: str, field: str) -> int:
    text = size.strip().upper()
    try:
        number = float(text[:-1]) * _SIZES[text[-1:]]
        return int(number)
    except (KeyError, ValueError, OverflowError) as error:
        raise ValueError(f'{field}: found {size!r}; write {field}_mb = 2048, or "2G", "2048M"') from error


def _service(name: str) -> str:
    name = name.strip()
    if not _SERVICE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a service")
    if name != MACHINE:
        raise NotServed(f"{name!r}: {_NO_SERVICES}")
    return name


class Collect(Table):
    """A command that runs in the machine after the agent, to write what the verifier shall read."""

    command: Command
    service: Annotated[str, AfterValidator(_service)] = MACHINE
    timeout_sec: Limit = 60.0
    user: User | None = None


class Verifier(Phase):
    """`[verifier]`.

    Attributes:
        environment_mode: `shared`: in the agent's machine; `separate`: in one of its own. None: in its own if
            `environment` says which.
    """

    timeout_sec: Limit = 600.0
    env: Variables = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_machine(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                "environment is the verifier's own machine, and environment_mode = \"shared\" is the agent's"
            )
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """Which machine this table asks for; None if it says nothing."""
        if self.environment_mode is None and self.environment is not None:
            return "separate"
        return self.environment_mode


class Artifact(Table):
    """A file or directory of the machine that is kept, and that a verifier in its own machine gets.

    Attributes:
        destination: Path below the directory of artifacts; None: the source without its root.
        exclude: Patterns of `tar --exclude`.
    """

    source: str
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: Annotated[str, AfterValidator(_service)] | None = None

    @field_validator("source")
    @classmethod
    def _inside(cls, source: str) -> str:
        if ".." in PurePosixPath(source).parts:
            raise ValueError("has the part ..; write the path that is meant")
        return source

    @field_validator("destination")
    @classmethod
    def _below(cls, destination: str | None) -> str | None:
        if not destination:
            return None
        path = PurePosixPath(destination)
        if "\\" in destination or path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError("must be a relative path with / between its parts, none of which is ..")
        if destination.rstrip("/") == "manifest.json":
            raise ValueError("manifest.json lists what was collected: give it another name")
        return destination


def _artifact(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[Artifact, BeforeValidator(_artifact)]]


class Solution(Table):
    """`[solution]`: variables of the reference solution."""

    env: Variables = Field(default_factory=dict)


class Step(Table):
    """One of `[[steps]]`: an instruction, an agent's work and its verification, in the machine of the steps before.

    Attributes:
        name: Of its directory below steps/.
        min_reward: Least reward with which the next step begins; of several rewards, by their names.
    """

    name: str
    agent: Agent = Field(default_factory=Agent)
    verifier: Verifier = Field(default_factory=Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = Field(default_factory=list)

    @field_validator("name")
    @classmethod
    def _a_directory(cls, name: str) -> str:
        stem = name.partition(".")[0].rstrip(" ")
        if not name.strip() or name.endswith((".", " ")) or _NOT_PORTABLE.search(name) or _DEVICES.fullmatch(stem):
            raise ValueError(
                'is no name of a directory on every system: no / \\ : * ? " < > |, no dot or space at the end'
            )
        if len(name.encode()) > 255:
            raise ValueError("is longer than the 255 bytes of a directory's name")
        return name

    @field_validator("min_reward")
    @classmethod
    def _finite(cls, given: float | dict[str, float] | None) -> float | dict[str, float] | None:
        numbers = given.values() if isinstance(given, dict) else [given or 0.0]
        if not all(map(math.isfinite, numbers)):
            raise NotServed("must be a finite number; without a least reward all steps are played")
        return given


class Configuration(Table):
    """The whole of task.toml."""

    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: Verifier = Field(default_factory=Verifier)
    agent: Agent = Field(default_factory=Agent)
    environment: Environment = Field(default_factory=Environment)
    solution: Solution = Field(default_factory=Solution)
    setup: Setup = Field(default_factory=Setup)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] | None = None
    artifacts: Artifacts = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _old_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
            data.pop("version", None)
        return data

    @field_validator("schema_version")
    @classmethod
    def _known(cls, version: str) -> str:
        major = version.partition(".")[0]
        if major.isdecimal() and int(major[:9]) > 1:
            raise NotServed(f"KubeRoll reads format 1, and knows 1.4; found {version!r}: a newer KubeRoll may read it")
        return version

    @field_validator("steps")
    @classmethod
    def _distinct(cls, steps: list[Step] | None) -> list[Step] | None:
        seen: dict[str, str] = {}
        for step in steps or ():
            # Some file systems do not tell upper case from lower, nor the ways of writing an accent.
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(f"{step.name!r} and {seen[key]!r} are one directory on some systems: rename one")
            seen[key] = step.name
        return steps


def read_configuration(file: Path) -> Configuration:
    """Read a task.toml.

    Raises:
        TaskError: It cannot be read, is not TOML, or something in it is invalid or not served; with all mistakes.
    """
    return parse_configuration(_text(file), file)


def parse_configuration(text: str, file: Path) -> Configuration:
    """Read the text of a task.toml.

    Args:
        file: Its path, for errors.

    Raises:
        TaskError: As `read_configuration`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError([_syntax_mistake(text, file, error)]) from error
    except (ValueError, RecursionError) as error:
        reason = "tables or lists are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise TaskError([Mistake(file=file, message=f"not TOML that can be read: {reason}")]) from error
    return configuration_of(document, text, file)


def configuration_of(document: dict[str, Any], text: str, file: Path) -> Configuration:
    """The configuration that a document has.

    Args:
        text: The document as TOML, for the lines of mistakes; empty: it has none.
        file: What it comes from.

    Raises:
        TaskError: Something in it is invalid or not served; with all mistakes.
    """
    try:
        return Configuration.model_validate(document)
    except ValidationError as error:
        raise TaskError(list(_mistakes(error, document, text, file))) from error
    except RecursionError as error:
        raise TaskError([Mistake(file=file, message="tables or lists are nested too deep")]) from error


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise TaskError([Mistake(file=file, message=f"is larger than {MOST_BYTES >> 20} MiB, which no task needs")])
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError([Mistake(file=file, message=error.strerror or str(error))]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TaskError([Mistake(file=file, line=line, message="not UTF-8; save the file as UTF-8")]) from error


def _syntax_mistake(text: str, file: Path, error: tomllib.TOMLDecodeError) -> Mistake:
    place = re.search(r"\(at line (\d+), column \d+\)$", str(error))
    line = text.count("\n") + 1 if place is None else int(place[1])
    return Mistake(file=file, line=line, message=f"not TOML: {error}")


def _mistakes(error: ValidationError, document: dict[str, Any], text: str, file: Path) -> Iterator[Mistake]:
    """The mistakes of a document, one for each field."""
    found: dict[tuple[Key, ...], list[Any]] = {}
    for one in error.errors(include_url=False):
        path = _path(one["loc"], document, missing=one["type"] == "missing")
        found.setdefault(path, []).append(one)
    for line, path in sorted(((line_of(text, path) or 0, path) for path in found), key=lambda place: place[0]):
        yield Mistake(file=file, line=line or None, field=field_name(path), message=_message(found[path]))


def _path(location: Sequence[Key], document: dict[str, Any], *, missing: bool) -> tuple[Key, ...]:
    """A field's path without the names of types, which stand in it where a field may be of several."""
    if location == ("schema_version",) and "version" in document:
        return ("version",)
    path: tuple[Key, ...] = ()
    for index, key in enumerate(location):
        if len(deepest(document, (*path, key))) > len(path) or (missing and index == len(location) - 1):
            path = (*path, key)
    return path


def _message(found: Sequence[Any]) -> str:
    """Words about one field, which may be of several types."""
    first = found[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return "is missing; it must be set"
    said = dict.fromkeys(f"{one['msg'][:1].lower()}{one['msg'][1:]}" for one in found)
    return f"found {_shown(first['input'])}; {' or '.join(said)}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value).__name__)
    return text if len(text) <= 60 else f"{text[:59]}…"
