"""Traces: what a run's trajectories did, as numbers. No text and no token ids.

A trace is a file of JSON lines, compressed with Zstandard if its name ends with `.zst`: a header, and then a line for
each trajectory, those of a prompt group one after another.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Final, Literal

import msgspec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

VERSION: Final = 1

_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
"""First bytes of a Zstandard file."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]


class TraceError(ValueError):
    """A file is not a trace; the message has the file, the line and the field."""


class Turn(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn; a line has it as an array of these fields.

    Attributes:
        generated: Tokens of the response.
        observed: Tokens of the environment's observation, which follow the response in the next prompt.
        generation_seconds: How long the response took when it was recorded, with all that it waited for; 0: unknown.
        environment_seconds: How long the environment took.
    """

    generated: _Count
    observed: _Count
    generation_seconds: _Seconds
    environment_seconds: _Seconds


class TraceTrajectory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One trajectory.

    Attributes:
        group: Number of its prompt group.
        sample: Its number within the group.
        environment: Name of its environment.
        prompt: Tokens of the first prompt, which its group shares. The prompt of a later turn is that of the turn
            before, with its response and its observation.
    """

    group: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    sample: _Count
    environment: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    turns: Annotated[tuple[Turn, ...], msgspec.Meta(min_length=1)]

    @property
    def generated(self) -> int:
        """Tokens that the policy generated."""
        return sum(turn.generated for turn in self.turns)

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return self.prompt + sum(turn.generated + turn.observed for turn in self.turns)

    @property
    def environment_seconds(self) -> float:
        return sum(turn.environment_seconds for turn in self.turns)


class _Versioned(msgspec.Struct, frozen=True):
    """What the first line of a trace has in each version."""

    kuberoll_trace: int


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a trace.

    Attributes:
        kuberoll_trace: Version of the format.
        trajectories: Number of lines that follow.
        origin: What it was made from, for people.
    """

    kuberoll_trace: int
    trajectories: Annotated[int, msgspec.Meta(ge=0)]
    origin: str = ""


class Trace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A trace in memory: trajectories in the order of the file."""

    origin: str
    trajectories: Sequence[TraceTrajectory]


def write_trace(path: Path, trajectories: Sequence[TraceTrajectory], *, origin: str) -> None:
    """Write a trace as a whole.

    Raises:
        FileExistsError: There is such a file.
        OSError: It cannot be written.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; name another file with -o, or remove it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no directory {path.parent}; create it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    header = _Header(kuberoll_trace=VERSION, trajectories=len(trajectories), origin=origin)
    try:
        with _opened(partial, "wb", compressed=path.suffix == ".zst") as file:
            for line in (header, *trajectories):
                file.write(msgspec.json.encode(line) + b"\n")
        # Unlike a rename, it does not replace a file that has appeared meanwhile.
        path.hardlink_to(partial)
    finally:
        partial.unlink(missing_ok=True)


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: It is none; the message names line and field.
        OSError: It cannot be read.
    """
    trajectories: list[TraceTrajectory] = []
    with _opened(path, "rb", compressed=path.suffix == ".zst") as file:
        lines = enumerate(_lines(path, file), start=1)
        _, first = next(lines, (1, b""))
        header = _header(path, first)
        decode = msgspec.json.Decoder(TraceTrajectory).decode
        names: dict[str, str] = {}
        lines_of: dict[tuple[int, int], int] = {}
        prompts: dict[int, tuple[int, int]] = {}
        for number, line in lines:
            if not line.strip():
                raise TraceError(f"{path}:{number}: the line is empty; remove it")
            try:
                found = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            if (before := lines_of.setdefault((found.group, found.sample), number)) != number:
                raise TraceError(
                    f"{path}:{number}: group {found.group}, sample {found.sample} is in line {before} already"
                )
            prompt, at = prompts.setdefault(found.group, (found.prompt, number))
            if prompt != found.prompt:
                raise TraceError(
                    f"{path}:{number}: prompt: found {found.prompt}; the group's is {prompt}, in line {at}"
                )
            # One text for all trajectories of an environment.
            name = names.setdefault(found.environment, found.environment)
            trajectories.append(
                found if name is found.environment else msgspec.structs.replace(found, environment=name)
            )
    if len(trajectories) != header.trajectories:
        raise TraceError(
            f"{path}: found {len(trajectories)} trajectories; the header announces {header.trajectories}: the file is "
            "not whole"
        )
    return Trace(origin=header.origin, trajectories=trajectories)


def groups_of(trajectories: Iterable[TraceTrajectory]) -> dict[int, list[TraceTrajectory]]:
    """The trajectories of each prompt group, in the order in which groups appear."""
    groups: dict[int, list[TraceTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups


def _header(path: Path, line: bytes) -> _Header:
    try:
        # First, since a newer version may have other fields.
        version = msgspec.json.decode(line, type=_Versioned).kuberoll_trace
        if version != VERSION:
            raise TraceError(f"{path}:1: kuberoll_trace: found version {version}; this KubeRoll reads {VERSION}")
        return msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; is it compressed? Then its name ends with .zst" if line.startswith(_ZSTANDARD) else ""
        raise TraceError(
            f"{path}:1: not the header of a trace: {error}; `kuberoll bench record` writes one{hint}"
        ) from error


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except (zstd.ZstdError, EOFError) as error:
        raise TraceError(f"{path}: not a whole Zstandard file: {error}") from error


@contextlib.contextmanager
def _opened(
    path: Path, mode: Literal["rb", "wb"], *, compressed: bool
) -> Iterator[IO[bytes] | io.BufferedReader | zstd.ZstdFile]:
    with path.open(mode) as raw:
        if not compressed:
            yield raw
            return
        with zstd.ZstdFile(raw, mode) as packed:
            if mode == "wb":
                yield packed
            else:
                with io.BufferedReader(packed) as buffered:
                    yield buffered
