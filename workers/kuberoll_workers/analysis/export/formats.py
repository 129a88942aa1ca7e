"""Formats by name: their file types, and the conversion of a trajectory to a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kuberoll_workers.analysis.export import areal, chats, nemo_gym, nemo_rl, prime_rl, skyrl, slime, trl, verl
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


@dataclass(frozen=True, slots=True)
class Format:
    """A trainer's format.

    Attributes:
        containers: Supported file types, the usual one first.
        row: Converts one trajectory that has a response to a row of lists, arrays, numbers and strings.
        schema: Columns of a Parquet file, if that is supported; with those of tools and calls, or without.
        document: Makes the content of a file of PyTorch from all rows, if that is supported.
        tool_role: True if environments' messages may have the role `tool`.
    """

    name: str
    containers: tuple[Container, ...]
    row: Callable[[TrajectoryRecord, EnvironmentRole], dict[str, Any]]
    schema: Callable[[bool], pyarrow.Schema] | None = None
    document: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] | None = None
    tool_role: bool = True


FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("openai-chat", ("jsonl",), chats.openai_row, tool_role=False),
        Format("sharegpt", ("jsonl",), chats.sharegpt_row),
        Format("trl", ("parquet", "jsonl"), trl.row, trl.schema),
        Format("verl", ("parquet", "jsonl"), verl.row, verl.schema),
        Format("nemo-rl", ("jsonl",), nemo_rl.row),
        Format(NEMO_GYM, ("jsonl",), lambda record, _: nemo_gym.rollout_of_record(record), tool_role=False),
        Format("prime-rl", ("parquet", "jsonl"), prime_rl.row, prime_rl.schema),
        Format("skyrl", ("parquet", "jsonl"), skyrl.row, skyrl.schema),
        Format("slime", ("pt",), slime.row, document=slime.document),
        Format("areal", ("parquet", "jsonl"), areal.row, areal.schema),
    )
}


def format_named(name: str, role: EnvironmentRole) -> Format:
    """The format of this name, checked for the role of environments.

    Raises:
        ExportError: The format does not exist, or does not support the role.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ExportError(f"--to {name}: unknown format; known formats are {', '.join(FORMATS)}")
    if role == "tool" and not found.tool_role:
        raise ExportError(
            f"--environment-role tool: in {name} a tool answers a tool call by its id, which an environment's own "
            "messages have none of; use --environment-role user"
        )
    return found
