"""What a format is: its file types, and the conversion of a trajectory to a row; and the installed ones by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kuberoll_api.plugins import EXPORTS, installed
from kuberoll_workers.analysis.export.samplings import Assumption
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow

EnvironmentRole = Literal["user", "tool"]
"""Role of environments' messages in formats without one for them."""

Container = Literal["jsonl", "parquet", "pt"]

NEMO_GYM = "nemo-gym"
"""The format that consists of several files: see `nemo_gym_files`."""


class ExportError(ValueError):
    """The export is impossible with these options; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A trainer's format.

    Attributes:
        containers: Supported file types, the usual one first.
        row: Converts a trajectory that has a response, and the `sampling` of each, with the role of environments and
            the number of its path, to a row of lists, arrays, numbers and strings.
        schema: Columns of a Parquet file, if that is supported; with those of tools and calls, or without.
        document: Makes the content of a file of PyTorch from all rows, if that is supported.
        tool_role: True if environments' messages may have the role `tool`.
        assumption: What its trainer assumes of the distributions that all rows were sampled from; None: nothing, as it
            learns from texts or does not learn.
    """

    name: str
    containers: tuple[Container, ...]
    row: Callable[[TrajectoryRecord, EnvironmentRole, int], dict[str, Any]]
    schema: Callable[[bool], pyarrow.Schema] | None = None
    document: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] | None = None
    tool_role: bool = True
    assumption: Assumption | None = None


class _Installed(Mapping[str, Format]):
    """The installed formats by name; each is loaded when it is asked for."""

    def __getitem__(self, name: str) -> Format:
        entry = installed(EXPORTS)[name]
        where = f"{entry.value}, of the entry point {name} in the group {EXPORTS}"
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            raise ExportError(f"--to {name}: {where}, cannot be loaded: {error}") from error
        if not isinstance(found, Format) or found.name != name:
            raise ExportError(f"--to {name}: {where}, is {found!r}; it must be a Format of this name")
        return found

    def __contains__(self, name: object) -> bool:
        return name in installed(EXPORTS)

    def __iter__(self) -> Iterator[str]:
        return iter(installed(EXPORTS))

    def __len__(self) -> int:
        return len(installed(EXPORTS))


FORMATS: Mapping[str, Format] = _Installed()
"""The installed formats by name. Asking for one raises ExportError if it cannot be loaded."""


def format_named(name: str, role: EnvironmentRole) -> Format:
    """The format of this name, checked for the role of environments.

    Raises:
        ExportError: The format does not exist, cannot be loaded, or does not support the role.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ExportError(f"--to {name}: unknown format; installed formats are {', '.join(FORMATS)}")
    if role == "tool" and not found.tool_role:
        raise ExportError(
            f"--environment-role tool: in {name} a tool answers a tool call by its id, which an environment's own "
            "messages have none of; use --environment-role user"
        )
    return found
