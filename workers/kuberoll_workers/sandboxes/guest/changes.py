"""What has changed since a mark of that which programs read without being told: paths, startup files, configuration.

A change is known by the inode's change time, which the system sets from its own clock whenever content, name, mode or
owner change: unlike the modification time, nobody inside a sandbox can choose it. All that is used is imported here, so
that nothing is read from places that others may have written.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Final

_MOST_PATHS: Final = 50
_MOST_ENTRIES: Final = 100_000
_MOST_SECONDS: Final = 5.0
_MOST_IN_TREE: Final = 20_000
_PAUSE_SECONDS: Final = 0.0005

_SYSTEM: Final = (
    "/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.cache", "/etc/profile",
    "/etc/profile.d", "/etc/environment", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh", "/etc/zshenv", "/etc/passwd",
    "/etc/group", "/etc/gitconfig", "/etc/pip.conf", "/etc/hosts", "/etc/nsswitch.conf",
)  # fmt: skip
_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_OF_USERS: Final = (
    ".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".shrc", ".zshenv", ".zshrc", ".zprofile",
    ".pam_environment", ".ssh/environment", ".gitconfig", ".config/git", ".config/pip", ".pydistutils.cfg", ".npmrc",
    ".local/bin", "bin",
)  # fmt: skip
_CONFIGURATION: Final = frozenset(
    ("conftest.py", "pytest.ini", ".pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml", "sitecustomize.py",
     "usercustomize.py")
)  # fmt: skip
_OF_GIT: Final = ("config", "hooks", "info")
_PLACES: Final = ("/tests", "/logs/verifier")
_CACHE: Final = "__pycache__"
_LEFT_OUT: Final = frozenset((".git", "node_modules", _CACHE, "proc", "sys", "dev"))
_MODULES: Final = frozenset(getattr(sys, "stdlib_module_names", ())) | {"pytest"}


def mark(path: str, *, output: int, input: int = -1) -> None:  # noqa: ARG001
    """Write the mark: the time, in nanoseconds, from which what changes has changed since.

    What has changed before is earlier, and not the same: the clock of files goes in steps, and one is waited for.
    """
    descriptor = os.memfd_create("mark")
    try:
        began = now = _touched(descriptor)
        while now == began:
            time.sleep(_PAUSE_SECONDS)
            now = _touched(descriptor)
    finally:
        os.close(descriptor)
    os.write(output, str(now).encode())


def changed(path: str, *, since: int, search: str, output: int, input: int = -1) -> None:  # noqa: ARG001
    """Write what has changed, as JSON: `paths`, at most 50; `more`, how many others; `complete`, if all was looked at.

    Args:
        path: The working directory.
        since: The mark.
        search: The variable PATH of the programs that will read it.
    """
    looked = _Looked(since)
    complete = True
    try:
        for look in (_system, _programs, _users, _work, _packages):
            look(looked, path, search)
    except _TooMuch:
        complete = False
    paths = list(looked.found)
    answer = {"paths": paths[:_MOST_PATHS], "more": len(paths[_MOST_PATHS:]), "complete": complete}
    os.write(output, json.dumps(answer).encode("utf-8", "replace"))


class _TooMuch(Exception):
    """There is more than is looked at."""


class _Looked:
    """What was looked at, and what of it has changed.

    Attributes:
        found: Paths, in their order.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._seen: set[str] = set()
        self._entries = 0
        self._end = time.monotonic() + _MOST_SECONDS
        self.found: dict[str, None] = {}

    def is_new(self, entry: os.DirEntry[str] | str, *, follow: bool = False) -> bool:
        """True if a path has changed; one that is not there has not."""
        self._entries += 1
        if self._entries > _MOST_ENTRIES or (self._entries % 256 == 0 and time.monotonic() > self._end):
            raise _TooMuch
        try:
            if isinstance(entry, str):
                return os.stat(entry, follow_symlinks=follow).st_ctime_ns >= self._since
            return entry.stat(follow_symlinks=follow).st_ctime_ns >= self._since
        except (OSError, ValueError):
            return False

    def file(self, path: str) -> None:
        """Look at a file, or at a directory's entries; at what links lead to as well."""
        if os.path.isdir(path):
            self.directory(path)
            if os.path.islink(path) and self.is_new(path):
                self.found[path] = None
        elif self.is_new(path) or (os.path.islink(path) and self.is_new(path, follow=True)):
            self.found[path] = None

    def directory(self, path: str, names: frozenset[str] | None = None, *, deep: bool = True) -> None:
        """Look at the entries of a directory, and at itself: what was removed is missing in it.

        Args:
            names: Names that count; None: all do.
            deep: Whether what links lead to counts, too.
        """
        real = os.path.realpath(path)
        if real in self._seen or _is_closed(real):
            return
        if names is None:
            self._seen.add(real)
        before = len(self.found)
        for entry in _entries(real):
            if names is not None and entry.name not in names:
                continue
            new = self.is_new(entry)
            if not new and deep and entry.is_symlink():
                # Those that lead to a neighbour are seen where they lead.
                new = "/" in _target(entry.path) and self.is_new(entry, follow=True)
            if new and not (names is None and _is_directory(entry)):
                self.found[entry.path] = None
        if names is None and len(self.found) == before and self.is_new(real):
            self.found[f"{real.rstrip('/')}/"] = None

    def tree(self, root: str, names: frozenset[str] | None = None) -> None:
        """Look at all that is below a directory; what has changed is said by its first name there.

        Args:
            names: Names of files that count, each with its whole path; None: all do.
        """
        real = os.path.realpath(root)
        if real in self._seen or _is_closed(real):
            return
        self._seen.add(real)
        waiting = [(real, "")]
        entries = 0
        while waiting:
            path, first = waiting.pop()
            before, is_cached = len(self.found), False
            for entry in _entries(path):
                entries += 1
                if names is not None and entries > _MOST_IN_TREE:
                    raise _TooMuch
                top = first or entry.path
                if _is_directory(entry):
                    if entry.name == _CACHE and names is None:
                        is_cached = self._cache(real, entry) or is_cached
                    elif entry.name not in _LEFT_OUT:
                        waiting.append((entry.path, top))
                elif (names is None or entry.name in names) and self.is_new(entry):
                    self.found[entry.path if names is not None else top] = None
            if names is None and not is_cached and len(self.found) == before and self.is_new(path):
                self.found[first or f"{real}/"] = None

    def _cache(self, root: str, entry: os.DirEntry[str]) -> bool:
        """Look at compiled modules, which Python itself writes: they are said once for a tree; true if they are new."""
        new = self.is_new(entry) or any(self.is_new(inner) for inner in _entries(entry.path))
        if new:
            self.found[f"{root}/**/{_CACHE}/"] = None
        return self.is_new(entry)


def _system(looked: _Looked, path: str, search: str) -> None:  # noqa: ARG001
    for place in _PLACES:
        if looked.is_new(place):
            looked.found[place] = None
    for place in _SYSTEM:
        looked.file(place)


def _programs(looked: _Looked, path: str, search: str) -> None:
    for place in search.split(":"):
        looked.directory(os.path.join(path, place))
    for place in _LIBRARIES:
        looked.directory(place)
        for entry in _entries(place):
            if entry.name.endswith(("-linux-gnu", "-linux-gnueabihf", "-linux-musl")):
                looked.directory(entry.path)


def _users(looked: _Looked, path: str, search: str) -> None:  # noqa: ARG001
    for home in _homes():
        for name in _OF_USERS:
            looked.file(f"{home}/{name}")
        looked.directory(home, _CONFIGURATION)


def _work(looked: _Looked, path: str, search: str) -> None:  # noqa: ARG001
    above = path
    while above not in ("/", ""):
        above = os.path.dirname(above)
        looked.directory(above or "/", _CONFIGURATION)
    for entry in _entries(path):
        name = entry.name.removesuffix(".py")
        if name in _MODULES and (entry.name != name or _is_directory(entry)) and looked.is_new(entry):
            looked.found[entry.path] = None
        if _is_directory(entry):
            _repository(looked, entry.path)
    _repository(looked, path)
    if path != "/":
        looked.tree(path, _CONFIGURATION)


def _repository(looked: _Looked, path: str) -> None:
    for name in _OF_GIT:
        looked.file(f"{path}/.git/{name}")


def _packages(looked: _Looked, path: str, search: str) -> None:
    places = [os.path.dirname(os.path.join(path, place).rstrip("/")) for place in search.split(":")]
    places += ["/usr", "/usr/local", f"{path}/.venv", f"{path}/venv", *(f"{home}/.local" for home in _homes())]
    places += [entry.path for entry in _entries("/opt") if _is_directory(entry)]
    for place in dict.fromkeys(places):
        for library in ("lib", "lib64"):
            for entry in _entries(f"{place.rstrip('/')}/{library}"):
                if entry.name.startswith("python") and _is_directory(entry):
                    looked.tree(entry.path)


def _homes() -> list[str]:
    """Homes of the machine's users, without those that are no directories of theirs alone."""
    homes = ["/root"]
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            homes += [fields[5] for line in file.read(1 << 16).splitlines() if len(fields := line.split(":")) > 5]
    except OSError:
        pass
    common = ("/", "", "/bin", "/sbin", "/dev", "/usr/sbin", "/usr/bin", "/nonexistent", "/proc")
    return [home for home in dict.fromkeys(homes) if home.startswith("/") and home not in common][:64]


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_closed(path: str) -> bool:
    """True for what is mounted so that nobody inside can write it: this machine's own /usr has many files."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _touched(descriptor: int) -> int:
    os.pwrite(descriptor, b"x", 0)
    found = os.fstat(descriptor)
    assert stat.S_ISREG(found.st_mode)
    return found.st_ctime_ns
