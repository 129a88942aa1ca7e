"""Formats by name: their file types, and the conversion of a trajectory to a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kuberoll_workers.analysis.export import areal, chats, nemo_gym, nemo_rl, prime_rl, skyrl, slime, trl, verl
from kuberoll_workers.analysis.export.samplings import Assumption, but_temperature, whole
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


FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format(name="openai-chat", containers=("jsonl",), row=chats.openai_row, tool_role=False),
        Format(name="sharegpt", containers=("jsonl",), row=chats.sharegpt_row),
        Format(name="trl", containers=("parquet", "jsonl"), row=trl.row, schema=trl.schema, assumption=whole),
        Format(name="verl", containers=("parquet", "jsonl"), row=verl.row, schema=verl.schema, assumption=whole),
        Format(name="nemo-rl", containers=("jsonl",), row=nemo_rl.row, assumption=whole),
        Format(
            name=NEMO_GYM,
            containers=("jsonl",),
            row=lambda record, *_: nemo_gym.rollout_of_record(record),
            tool_role=False,
        ),
        Format(
            name="prime-rl",
            containers=("parquet", "jsonl"),
            row=prime_rl.row,
            schema=prime_rl.schema,
            assumption=but_temperature,
        ),
        Format(name="skyrl", containers=("parquet", "jsonl"), row=skyrl.row, schema=skyrl.schema, assumption=whole),
        Format(name="slime", containers=("pt",), row=slime.row, document=slime.document, assumption=whole),
        Format(name="areal", containers=("parquet", "jsonl"), row=areal.row, schema=areal.schema, assumption=whole),
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
