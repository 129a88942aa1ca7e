"""Tasks that rows describe themselves: `metadata.task` of a row, which may name a directory.

directory       a task's directory, relative to the manifest's, or absolute; its task.toml may be missing
files           object of texts by path: put into the machine before the agent, below the working directory or absolute
tests           object of texts by path: put into /tests after the agent, over the directory's; test.sh writes the
                reward
setup           text of a script that sets the machine up; or {script, timeout_sec, user, env, network_mode,
                allowed_hosts}
requirements    text, or list of lines, of a requirements.txt
environment, agent, verifier, solution
                tables of task.toml: what they say comes before the directory's

At least one of `directory` and `tests` is there. The row's prompt is the instruction; without one it is the directory's
instruction.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kuberoll_workers.harbor.configuration import Agent, Environment, Solution, Verifier
from kuberoll_workers.harbor.mistakes import Mistake, TaskError
from kuberoll_workers.harbor.setup import Files, Setup, TestFiles

KEY: Final = "task"
"""Field of a row's metadata."""
NOWHERE: Final = Path(os.devnull)
"""The directory of a task that has none: nothing is below it."""

_PLACE: Final = Path(f"metadata.{KEY}")
_TABLES: Final[dict[str, type[BaseModel]]] = {
    "environment": Environment, "agent": Agent, "verifier": Verifier, "solution": Solution, "setup": Setup,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a row says of its task, beside what the task's directory does.

    Attributes:
        tables: Tables of task.toml, by name.
        has_prompt: True if the row has the instruction.
        name: The task's name; None: the directory's.
    """

    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)
    commands: str = ""
    packages: str = ""
    has_prompt: bool = False
    name: str | None = None


class _TaskRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str | None = Field(default=None, min_length=1)
    files: Files = Field(default_factory=dict)
    tests: TestFiles = Field(default_factory=dict)
    setup: dict[str, Any] = Field(default_factory=dict)
    requirements: str = ""
    environment: dict[str, Any] = Field(default_factory=dict)
    agent: dict[str, Any] = Field(default_factory=dict)
    verifier: dict[str, Any] = Field(default_factory=dict)
    solution: dict[str, Any] = Field(default_factory=dict)

    @field_validator("setup", mode="before")
    @classmethod
    def _script(cls, value: object) -> object:
        return {"script": value} if isinstance(value, str) else value

    @field_validator("setup")
    @classmethod
    def _text(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("script", ""), str):
            raise ValueError("script must be a text: the commands themselves")
        return value

    @field_validator("requirements", mode="before")
    @classmethod
    def _lines(cls, value: object) -> object:
        if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value):
            return "\n".join(value)
        return value

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if self.directory is None and not self.tests:
            raise ValueError("has neither a directory nor tests, so that nothing could score the task: add one of them")
        return self


def read_given(value: Mapping[str, Any], *, has_prompt: bool, name: str | None) -> tuple[str | None, Given]:
    """What a row's `metadata.task` says: the directory's name, and the rest.

    Raises:
        TaskError: With all mistakes.
    """
    mistakes = [*_unknown(value)]
    try:
        row = _TaskRow.model_validate(dict(value))
    except ValidationError as error:
        for one in error.errors(include_url=False):
            at = ".".join(map(str, one["loc"])) or None
            text = str(one["ctx"]["error"]) if one["type"] == "value_error" else one["msg"]
            if one["type"] == "extra_forbidden":
                text = f"is no field of a task; these are: {', '.join(_TaskRow.model_fields)}"
            mistakes.append(Mistake(file=_PLACE, field=at, message=text))
        raise TaskError(mistakes) from error
    if mistakes:
        raise TaskError(mistakes)
    setup = {key: item for key, item in row.setup.items() if key != "script"}
    tables = {key: getattr(row, key) for key in _TABLES if key != "setup"} | {"setup": setup}
    return row.directory, Given(
        tables={key: table for key, table in tables.items() if table},
        files=row.files,
        tests=row.tests,
        commands=row.setup.get("script", ""),
        packages=row.requirements,
        has_prompt=has_prompt,
        name=name,
    )


def merged(document: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A task.toml with a row's tables over it, table by table and field by field."""
    found = dict(document)
    for name, table in tables.items():
        below = found.get(name)
        found[name] = {**below, **table} if isinstance(below, Mapping) else dict(table)
    return found


def _unknown(value: Mapping[str, Any]) -> Iterator[Mistake]:
    """Fields of tables that mean nothing: in a row each is a slip of the pen."""
    for name, table in _TABLES.items():
        known = {*table.model_fields, *({"script"} if name == "setup" else {"memory", "storage"})}
        given = value.get(name)
        for key in given if isinstance(given, Mapping) else ():
            if key not in known:
                words = f"is no field of the table [{name}]; these are: {', '.join(sorted(known))}"
                yield Mistake(file=_PLACE, field=f"{name}.{key}", message=words)
