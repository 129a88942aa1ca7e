"""Checks of rows by the environments that will score them, before anything is generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from kuberoll_api.model.environments import Environment
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import traceback_of
from kuberoll_workers.dataset.rows import SOURCE_FIELD, DatasetError, Row
from kuberoll_workers.environments import registry
from kuberoll_workers.environments.interface import EnvironmentInterface, Metadata, UnusableRow

_Check = Callable[[Metadata], Any]

_METADATA_FIELD = re.compile(r"metadata\.[A-Za-z_]\w*")


class RowChecks:
    """The optional `check_row` of each environment of a job, and whether rows without a prompt can have one.

    An environment with code of its own and isolation Process or Remote is not asked: this process does not run its
    code.
    """

    def __init__(self, environments: Sequence[Environment]) -> None:
        """
        Raises:
            UnusableEnvironment: An environment that checks its rows cannot be created.
        """
        self._without_reset = {spec.name for spec in environments if _lacks_reset(spec)}
        checks = {spec.name: _check_of(spec) for spec in environments}
        self._checks = {name: check for name, check in checks.items() if check is not None}

    def check(self, row: Row) -> None:
        """Let the row's environment check it.

        Raises:
            DatasetError: The environment could not score it; the message has the remedy.
        """
        if not row.messages and row.task_name in self._without_reset:
            raise DatasetError(
                f"{row.where}: the row has no prompt, and the environment {row.task_name!r} has no reset that gives it "
                "one: add messages to the row, or use a dataset.promptTemplate"
            )
        check = self._checks.get(row.task_name)
        if check is None:
            return
        try:
            check(row.metadata)
        except UnusableRow as error:
            raise DatasetError(f"{row.where}: {error}. {_remedy(row, str(error))}") from error
        except (Exception, SystemExit) as error:
            raise DatasetError(
                f"{row.where}: check_row of environment {row.task_name!r} raised {type(error).__name__}: "
                f"{message_of(error)}",
                traceback_of(error),
            ) from error


def _class_of(spec: Environment) -> Any:
    """The class of an environment; None if its code must not run in this process."""
    if spec.isolation != "Inline" and spec.type is None:
        return None
    plain = registry.PlainSpec.of(spec)
    return registry.resolve(type=plain.type, entrypoint=plain.entrypoint)


def _lacks_reset(spec: Environment) -> bool:
    if spec.agent is not None:
        # An agent writes its prompts itself.
        return False
    found = _class_of(spec)
    return found is not None and getattr(found, "reset", None) in (None, EnvironmentInterface.reset)


def _check_of(spec: Environment) -> _Check | None:
    found = getattr(_class_of(spec), "check_row", None)
    if not callable(found) or found is EnvironmentInterface.check_row:
        return None
    check: _Check = registry.create(spec).check_row
    return check


def _remedy(row: Row, message: str) -> str:
    field = _METADATA_FIELD.search(message)
    needs = f"The environment {row.task_name!r} cannot score the row without it"
    # A source's name precedes the content of rows of several sources.
    fields = ", ".join(orjson.loads(row.content[row.content.index(b"{") :]))
    if field is None:
        return f"{needs}; the row has {fields}"
    of_several = row.metadata is not None and SOURCE_FIELD in row.metadata
    columns = "columns of this source" if of_several else "dataset.columns"
    return f"{needs}. The row has {fields}; if one of these fields has it, map it: {columns}: {{{field[0]}: FIELD}}"
