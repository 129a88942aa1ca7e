"""The formats by name: which files they come in, and how a trajectory becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kuberoll_workers.analysis.export import chats, nemo_rl, trl, verl
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow

EnvironmentRole = Literal["user", "tool"]
"""What an environment's messages become where a format knows no environment."""

Container = Literal["jsonl", "parquet"]


class ExportError(ValueError):
    """The export cannot be made as asked for; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Format:
    """One trainer's format.

    Attributes:
        containers: The files it may be in, the usual one first.
        row: Makes one row of one trajectory that has a response. Rows hold lists, arrays, numbers and texts.
        schema: The columns, where it may be in Parquet.
        tool_role: Whether environments may speak as a tool.
    """

    name: str
    containers: tuple[Container, ...]
    row: Callable[[TrajectoryRecord, EnvironmentRole], dict[str, Any]]
    schema: Callable[[], pyarrow.Schema] | None = None
    tool_role: bool = True


FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("openai-chat", ("jsonl",), chats.openai_row, tool_role=False),
        Format("sharegpt", ("jsonl",), chats.sharegpt_row),
        Format("trl", ("parquet", "jsonl"), trl.row, trl.schema),
        Format("verl", ("parquet", "jsonl"), verl.row, verl.schema),
        Format("nemo-rl", ("jsonl",), nemo_rl.row),
    )
}


def format_named(name: str, role: EnvironmentRole) -> Format:
    """A format that may be used with a role for environments.

    Raises:
        ExportError: There is no such format, or it has no such role.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ExportError(f"--to {name}: there is no such format; there are {', '.join(FORMATS)}")
    if role == "tool" and not found.tool_role:
        raise ExportError(
            f"--environment-role tool: in {name} a tool answers a tool call by its id, and these responses are plain "
            "text; use --environment-role user"
        )
    return found
