"""The set-up of a machine before its agent: files, a script and requirements of Python, of tasks without a Dockerfile.

KubeRoll's own addition to the format: Harbor has images that are built. What a set-up has made is there for the agent
and for the tests; its own script, and wheels, are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from kuberoll_workers.harbor.phases import Network, Phase
from kuberoll_workers.harbor.tables import Limit, NotServed, Variables

FILES: Final = "files"
"""Directory whose files go into the working directory."""
SCRIPT: Final = "setup.sh"
REQUIREMENTS: Final = "requirements.txt"
WHEELS: Final = "wheels"
"""Directory of distributions; where it is there, no index is asked."""

_MOST_INLINE: Final = 1 << 20
_INCLUDES: Final = re.compile(r"\s*(-r|--requirement|-c|--constraint)\b")
_DISTRIBUTION: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\s*(\[[^]]*\])?\s*([<>=!~;(@].*)?")


class Setup(Phase):
    """`[setup]`: how the machine is set up. Harbor ignores the table.

    Attributes:
        timeout_sec: Limit of all of it.
        env: Variables of the script and of pip.
        network_mode: What the set-up may reach; None: what the machine may. The agent may not reach it for that.
        user: Whom the script runs as.
    """

    timeout_sec: Limit = 600.0
    env: Variables = Field(default_factory=dict)


def _paths(files: dict[str, str]) -> dict[str, str]:
    for name, text in files.items():
        path = PurePosixPath(name)
        if not path.name or ".." in path.parts or "\0" in name or name.endswith("/"):
            raise NotServed(f"{name!r} is no path of a file: write one without .., such as data/input.txt")
        if "\0" in text:
            raise NotServed(f"{name!r}: a text has no NUL; put the file into the task's directory")
    if (size := sum(len(text.encode(errors="replace")) for text in files.values())) > _MOST_INLINE:
        raise NotServed(f"{size} bytes; a row has at most 1 MiB: put the files into the task's directory")
    return files


def _relative(files: dict[str, str]) -> dict[str, str]:
    for name in files:
        if name.startswith("/"):
            raise NotServed(f"{name!r} is absolute; tests are below /tests: write a relative path")
    return files


Files = Annotated[dict[str, str], AfterValidator(_paths)]
"""Texts by path."""
TestFiles = Annotated[dict[str, str], AfterValidator(_paths), AfterValidator(_relative)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """What sets a machine up, in this order: files, requirements, scripts.

    Attributes:
        files: Texts by path, absolute or below the working directory.
        requirements: File with requirements of Python.
        packages: Further ones, as the text of such a file.
        wheels: Directory of distributions that these come from; None: an index.
        script: File of a script.
        commands: Text of a further one.
        network: None: that of the machine.
        indexed: True if an index is asked for requirements.
    """

    options: Setup
    files: Mapping[str, str] = field(default_factory=dict)
    requirements: Path | None = None
    packages: str = ""
    wheels: Path | None = None
    script: Path | None = None
    commands: str = ""
    network: Network | None = None
    indexed: bool = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.files or self.script or self.commands or self.requirements or self.packages)


def bad_requirements(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a file of requirements that cannot be installed in a machine: their numbers, from 1, and why."""
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split(" #")[0].strip()
        if not said or said.startswith("#"):
            continue
        if _INCLUDES.match(said):
            yield number, f"found {said!r}; the machine gets this file alone: write here what the other one has"
        elif not (_is_path(said) or _DISTRIBUTION.fullmatch(said.rstrip("\\").strip())):
            yield number, f"found {said!r}; write the name of a distribution, as in numpy==2.2.1"


def _is_path(line: str) -> bool:
    """True if a line is an option, a path or an address: what these are is known when they are installed."""
    return line.startswith(("-", ".")) or "/" in line or line.endswith(".whl")


def needs_index(text: str) -> bool:
    """True if a file of requirements has a line with a name, which an index is asked for."""
    lines = (line.strip() for line in text.splitlines())
    return any(line and not line.startswith(("#", "-", ".", "/")) for line in lines)


def setup_fields(setup: SetUp, root: Path) -> dict[str, Any]:
    """SETUP of a row (`harbor.rows`), with None for what says nothing."""

    def relative(path: Path | None) -> str | None:
        return None if path is None else path.relative_to(root).as_posix()

    return {
        "files": dict(setup.files),
        "requirements": relative(setup.requirements),
        "packages": setup.packages or None,
        "wheels": relative(setup.wheels),
        "indexed": setup.indexed or None,
        "script": relative(setup.script),
        "commands": setup.commands or None,
        "timeout": setup.options.timeout_sec,
        "user": setup.options.user,
        "env": setup.options.env,
    }
