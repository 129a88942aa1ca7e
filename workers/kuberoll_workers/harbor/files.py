"""Files of a task: which of them count, whether links lead out of it, and digests of their content."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec

IGNORE_FILE: Final = ".harborignore"
"""Rules, as git's, of files that stay behind: in tests/, solution/ and those of steps."""

_SCOPES: Final = (("tests",), ("solution",), ("steps", None, "tests"), ("steps", None, "solution"))
_CHUNK: Final = 1 << 20
_MOST_DEPTH: Final = 64


_TOO_DEEP: Final = f"is more than {_MOST_DEPTH} directories deep: move it up"


class UnusableFile(ValueError):
    """A file of a task that cannot be used.

    Attributes:
        path: Its path.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class TaskFiles:
    """The files below a task's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.root = directory.resolve()
        self._rules: dict[Path, GitIgnoreSpec] = {}

    def selected(self, directory: Path) -> list[Path]:
        """Files, links and directories below a directory of the task, without those that `.harborignore` leaves out.

        Args:
            directory: tests/, solution/, or another one of the task's; it may be missing.

        Returns:
            Paths relative to `directory`, sorted, a directory before what is in it.

        Raises:
            UnusableFile: A link leads out of the task or in a circle, or a file is neither a file nor a directory.
        """
        directory = self._own(directory)
        if not directory.is_dir() or self.is_left_out(directory):
            return []
        self._check(directory, frozenset())
        return [path.relative_to(directory) for path in self._walk(directory)]

    def is_left_out(self, path: Path) -> bool:
        """True if a rule leaves a path out, one of its directories, or what it is a link to.

        Raises:
            UnusableFile: Rules cannot be read.
        """
        path = self._own(path)
        if self._matches(path):
            return True
        target = _target(path)
        return target != path and target.is_relative_to(self.root) and self._matches(target)

    def digest(self, trees: Sequence[tuple[str, Path]]) -> str:
        """SHA-256 of the content of files and directories of the task: names, contents, links, whether one may be run.

        Times and owners make no difference.

        Args:
            trees: Name and path of each; one that is missing is none.

        Returns:
            64 hexadecimal digits.

        Raises:
            UnusableFile: As `selected`; or a file cannot be read.
        """
        total = hashlib.sha256()
        for name, path in trees:
            own = self._own(path)
            for entry in [own] if own.is_file() else [own / inner for inner in self.selected(own)]:
                relative = name if entry == own else f"{name}/{entry.relative_to(own).as_posix()}"
                _add(total, os.fsencode(relative), _digest_of(entry), self._digest_of_target(entry))
        return total.hexdigest()

    def _digest_of_target(self, entry: Path) -> bytes:
        """Of what a link leads to, which may be elsewhere in the task."""
        if not entry.is_symlink() or not entry.exists():
            return b""
        return self.digest([("", entry.resolve())]).encode()

    def check_inside(self, path: Path) -> None:
        """Check that a path, which may be missing, does not lead out of the task.

        Raises:
            UnusableFile: It does.
        """
        if not _target(self._own(path)).is_relative_to(self.root):
            raise UnusableFile(path, "is a link that leads out of the task: put the file itself there")

    def _own(self, path: Path) -> Path:
        """A path of the task below its real directory; links below that stay as they are."""
        return path if path.is_relative_to(self.root) else self.root / path.relative_to(self._directory)

    def _walk(self, directory: Path) -> Iterator[Path]:
        for path in sorted(directory.iterdir()):
            if self.is_left_out(path):
                continue
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from self._walk(path)

    def _check(self, path: Path, above: frozenset[Path]) -> None:
        """Follow links and directories to their ends."""
        self.check_inside(path)
        target = _target(path)
        if target in above:
            raise UnusableFile(path, "is a link to a directory that it is in: remove it")
        if len(above) > _MOST_DEPTH:
            raise UnusableFile(path, _TOO_DEEP)
        if not path.is_dir():
            if path.exists() and not path.is_file():
                raise UnusableFile(path, "is neither a file nor a directory: remove it")
            return
        for inner in path.iterdir():
            if not self.is_left_out(inner):
                self._check(inner, above | {target})

    def _matches(self, path: Path) -> bool:
        if path.name == IGNORE_FILE:
            return True
        parts = path.relative_to(self.root).parts
        scope = next((length for length in range(1, len(parts) + 1) if _is_scope(parts[:length])), None)
        if scope is None:
            return False
        # Rules of an outer directory come first; those of an inner one may take a path back in.
        directories = [self.root.joinpath(*parts[:length]) for length in range(scope, len(parts))]
        for length in range(scope, len(parts) + 1):
            candidate = self.root.joinpath(*parts[:length])
            is_directory = length < len(parts) or path.is_dir()
            excluded = False
            for directory in directories[: length - scope]:
                name = candidate.relative_to(directory).as_posix() + ("/" if is_directory else "")
                if (verdict := self._rules_of(directory).check_file(name).include) is not None:
                    excluded = verdict
            if excluded:
                return True
        return False

    def _rules_of(self, directory: Path) -> GitIgnoreSpec:
        if (rules := self._rules.get(directory)) is None:
            rules = self._rules[directory] = GitIgnoreSpec.from_lines(self._rule_lines(directory / IGNORE_FILE))
        return rules

    def _rule_lines(self, file: Path) -> list[str]:
        if not file.exists() and not file.is_symlink():
            return []
        if not _target(file).is_relative_to(self.root) or not file.is_file():
            raise UnusableFile(file, "must be a file of the task")
        try:
            return file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableFile(file, f"cannot be read: {error}") from error


def tree_digest(directory: Path) -> str:
    """SHA-256 of a directory from which an image is built, as 64 hexadecimal digits.

    Links are what they are, wherever they lead: a build copies them.

    Raises:
        UnusableFile: A file cannot be read.
    """
    total = hashlib.sha256()
    for path in _entries(directory, 0):
        _add(total, os.fsencode(path.relative_to(directory)), _digest_of(path))
    return total.hexdigest()


def _entries(directory: Path, depth: int) -> Iterator[Path]:
    """All that is below a directory, links not followed."""
    if depth > _MOST_DEPTH:
        raise UnusableFile(directory, _TOO_DEEP)
    for path in sorted(directory.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _entries(path, depth + 1)


def _target(path: Path) -> Path:
    """What a path leads to."""
    try:
        return path.resolve()
    except RuntimeError as error:
        raise UnusableFile(path, "is a link that leads to itself: remove it") from error


def _is_scope(parts: Sequence[str]) -> bool:
    return any(
        len(parts) == len(scope) and all(part in (None, own) for part, own in zip(scope, parts, strict=True))
        for scope in _SCOPES
    )


def _add(total: hashlib._Hash, *texts: bytes) -> None:
    for text in texts:
        # The length separates neighbours.
        total.update(len(text).to_bytes(8, "little") + text)


def _digest_of(path: Path) -> bytes:
    """Kind and content of one entry."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return b"link " + os.fsencode(path.readlink())
        if stat.S_ISDIR(mode):
            return b"directory"
        if not stat.S_ISREG(mode):
            raise UnusableFile(path, "is neither a file nor a directory: remove it")
        content = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                content.update(chunk)
        return (b"program " if mode & 0o111 else b"file ") + content.digest()
    except OSError as error:
        raise UnusableFile(path, f"cannot be read: {error.strerror or error}") from error
