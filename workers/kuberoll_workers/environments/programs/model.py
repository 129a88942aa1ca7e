"""Programs, their limits and their outcomes, as plain data."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

OutcomeKind = Literal["ok", "error", "wall_time", "cpu_time", "memory", "output", "disk"]

MIB = 1 << 20


class ConfinementUnavailable(RuntimeError):
    """This machine lacks a layer of the confinement; nothing is run without it. The message names the remedy."""


class ProgramFailed(RuntimeError):
    """The confinement itself failed, which says nothing about the program."""


class ProgramKilled(ProgramFailed):
    """The machine killed the program, and not for a limit of its own: nothing is known about it."""


class MachineFull(ProgramFailed):
    """The machine's disk was full while the program ran: nothing is known about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program with everything that it starts.

    Attributes:
        cpu_seconds: CPU time of all its processes.
        wall_seconds: Elapsed time.
        memory: Resident memory of all its processes, in bytes, read 50 times a second. Each process can also reserve at
            most twice as much address space, plus 1 GiB; beyond that allocations fail.
        processes: Processes and threads at a time, including the first; beyond that they cannot be created.
        file: Size of one file, in bytes; writes beyond it fail.
        disk: Size of the scratch directory with all files that are open, in bytes, read 50 times a second.
        files: Files and directories in the scratch directory, read 50 times a second.
        open_files: Descriptors of each process.
        output: Bytes of standard output, and of standard error, that are kept; a program that writes more is killed.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 20.0
    memory: int = 512 * MIB
    processes: int = 16
    file: int = 16 * MIB
    disk: int = 64 * MIB
    files: int = 1000
    open_files: int = 64
    output: int = MIB

    def __post_init__(self) -> None:
        for name, least in (("cpu_seconds", 0.01), ("wall_seconds", 0.01), ("memory", MIB), ("open_files", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"limits.{name}: found {getattr(self, name)}; it must be at least {least}")
        for name in ("processes", "file", "disk", "files", "output"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name}: found {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run.

    Attributes:
        argv: Command; its first word is an absolute path.
        stdin: Standard input, which ends after it.
        files: Files of the scratch directory, which is the working directory, by name.
        variables: Environment variables beside those that every program has.
        readable: Files and directories that it may read, beside the system's libraries and this Python's.
    """

    argv: Sequence[str]
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].startswith("/"):
            raise ValueError(f"argv: found {list(self.argv)[:1]!r}; its first word must be an absolute path")
        for name in self.files:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"files: found {name!r}; it must be the name of a file, without a directory")

    @classmethod
    def python(
        cls,
        source: str,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """A program in Python, run by this interpreter as `main.py`."""
        code = source.encode("utf-8", "replace")
        return cls(
            argv=[sys.executable, "-s", "-B", "main.py"],
            stdin=stdin,
            files={**(files or {}), "main.py": code},
            limits=limits or Limits(),
        )

    def to_json(self, scratch: str) -> bytes:
        """The request for it, to be run in a scratch directory that exists."""
        request = {
            "argv": list(self.argv),
            "stdin": base64.b64encode(self.stdin).decode(),
            "variables": dict(self.variables),
            "readable": list(self.readable),
            "limits": asdict(self.limits),
            "scratch": scratch,
        }
        return json.dumps(request).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a program.

    Attributes:
        kind: `ok` for exit code 0, `error` for another exit code or a signal; otherwise the limit for which it was
            killed.
        exit_code: Exit code, negative for a signal; None if it was killed for a limit.
        stdout: Standard output, up to the limit; if there was more, it ends with a line that says so.
        stderr: Standard error, in the same way.
        wall_seconds: Elapsed time.
        cpu_seconds: CPU time of all its processes.
    """

    kind: OutcomeKind
    exit_code: int | None
    stdout: str
    stderr: str
    wall_seconds: float
    cpu_seconds: float

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """
        Raises:
            ConfinementUnavailable: The program could not be confined.
            ProgramFailed: The program could not be started.
            ProgramKilled, MachineFull: The machine killed it, or had no room for its files.
        """
        found: dict[str, Any] = json.loads(data)
        if "unavailable" in found:
            raise ConfinementUnavailable(found["unavailable"])
        if "killed" in found:
            raise ProgramKilled(found["killed"])
        if "full" in found:
            raise MachineFull(found["full"])
        if "failed" in found:
            raise ProgramFailed(found["failed"])
        return cls(**found)


TRUNCATED = "\n[truncated: the program wrote more]\n"
"""End of an output that is not whole."""
