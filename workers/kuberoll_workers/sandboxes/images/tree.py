"""A directory that is filled from an archive: names are resolved in it, and never lead out of it.

They are resolved here, one part after another, without following what the kernel would follow; symbolic links are
followed with the directory as their root. Nobody else changes it meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kuberoll_workers.sandboxes.images.errors import ImageInvalid, ImageUnavailable

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPAQUE: Final = "user.overlay.opaque"
"""Attribute of directories in overlayfs with `userxattr`: what the layers below have there is not seen."""

_MAX_LINKS: Final = 40
_OPEN_DIRECTORIES: Final = 64

Parts = tuple[bytes, ...]
"""A path below the directory; the directory itself has none."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a file has beside its content; times are nanoseconds."""

    mode: int
    uid: int = 0
    gid: int = 0
    time: int | None = None
    extended: tuple[tuple[str, bytes], ...] = ()


class Tree:
    """The directory, and the attributes that its directories get when everything is in them."""

    def __init__(self, root: int, lowers: Sequence[int]) -> None:
        self.root = root
        self._lowers = lowers
        # By the path as an archive names it: the physical path, and a descriptor.
        self._open: OrderedDict[Parts, tuple[Parts, int]] = OrderedDict()
        self._retired: list[int] = []
        self.directories: dict[Parts, Attributes] = {(): Attributes(0o755)}
        self.implied: set[Parts] = set()
        self.opaque: set[Parts] = set()
        self.with_whiteouts: set[Parts] = set()

    def close(self) -> None:
        """Close the descriptors that are kept."""
        self._forget()
        while self._retired:
            os.close(self._retired.pop())

    def set(self, path: Parts, attributes: Attributes) -> None:
        """Say what a directory gets at the end, by its physical path."""
        self.directories[path] = attributes
        self.implied.discard(path)

    def _forget(self) -> None:
        """Resolve names anew from now on; whoever has a descriptor may use it until the next one is asked for."""
        self._retired += [descriptor for _, descriptor in self._open.values()]
        self._open.clear()

    def directory(self, parts: Parts) -> tuple[Parts, int]:
        """The physical path of a directory, and a descriptor that is valid until the next call; made if it is missing.

        Raises:
            ImageInvalid: A part is no directory.
        """
        while self._retired:
            os.close(self._retired.pop())
        if not parts:
            return (), self.root
        if (found := self._open.get(parts)) is not None:
            self._open.move_to_end(parts)
            return found
        path, descriptor = self._walk(parts)
        self._open[parts] = path, descriptor
        if len(self._open) > _OPEN_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1][1])
        return path, descriptor

    def _walk(self, parts: Parts) -> tuple[Parts, int]:
        path: Parts = ()
        left = list(reversed(parts))
        if (near := self._open.get(parts[:-1])) is not None:
            path, left = near[0], left[:1]
            here = os.dup(near[1])
        else:
            here = os.dup(self.root)
        links = 0
        try:
            while left:
                part = left.pop()
                if part == b"..":
                    path = path[:-1]
                    here = _closed(here, self._physical(path))
                    continue
                try:
                    below = os.open(part, DIRECTORY, dir_fd=here)
                except FileNotFoundError:
                    below = self._make(here, path, part)
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    mode = os.lstat(part, dir_fd=here).st_mode
                    if stat.S_ISLNK(mode):
                        links += 1
                        if links > _MAX_LINKS:
                            raise ImageInvalid("more than 40 symbolic links on its way") from error
                        target = os.readlink(part, dir_fd=here)
                        if target.startswith(b"/"):
                            path, here = (), _closed(here, os.dup(self.root))
                        left += [item for item in reversed(target.split(b"/")) if item not in (b"", b".")]
                        continue
                    if not stat.S_ISCHR(mode):
                        raise ImageInvalid(f"{part!r:.100} is no directory, and it is below") from error
                    # A whiteout of this layer: what is made in its place hides what is below.
                    os.unlink(part, dir_fd=here)
                    below = self._make(here, path, part, opaque=True)
                here = _closed(here, below)
                path = (*path, part)
        except BaseException:
            os.close(here)
            raise
        return path, here

    def _physical(self, path: Parts) -> int:
        here = os.dup(self.root)
        for part in path:
            here = _closed(here, os.open(part, DIRECTORY, dir_fd=here))
        return here

    def _make(self, parent: int, path: Parts, name: bytes, *, opaque: bool = False) -> int:
        """Make a directory that the archive does not have, as it is in the layers below."""
        os.mkdir(name, 0o700, dir_fd=parent)
        inherited = None if opaque else _lower(self._lowers, (*path, name))
        if not opaque:
            self.implied.add((*path, name))
        self.directories[(*path, name)] = inherited or Attributes(0o755)
        descriptor = os.open(name, DIRECTORY, dir_fd=parent)
        if opaque:
            self.hide_lower((*path, name), descriptor)
        return descriptor

    def hide_lower(self, path: Parts, descriptor: int) -> None:
        """Make a directory opaque: what the layers below have there is not seen.

        Raises:
            ImageUnavailable: The file system cannot say so.
        """
        self.opaque.add(path)
        try:
            os.setxattr(descriptor, OPAQUE, b"y")
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            raise ImageUnavailable(
                "the file system of the images' directory keeps no attributes `user.*`: give one on ext4, xfs or "
                "btrfs, or on tmpfs from Linux 6.6 on"
            ) from error

    def drop_whiteouts(self) -> None:
        """Remove whiteouts of what no layer below shows: overlayfs lists their names where it has nothing to merge."""
        if not self.with_whiteouts:
            return
        hidden: set[Parts] = set()
        for path in sorted(self.directories):
            if path in self.opaque or path[:-1] in hidden:
                hidden.add(path)
            if path in self.with_whiteouts and (path in hidden or _lower(self._lowers, path) is None):
                _remove_whiteouts(self.directory(path)[1])

    def clear(self, parent: int, path: Parts, name: bytes) -> None:
        """Remove what is at a place: a tree, or anything else but a directory."""
        mode = os.lstat(name, dir_fd=parent).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=parent)
            if stat.S_ISLNK(mode):
                self._forget()
            return
        self._forget()
        here = os.open(name, DIRECTORY, dir_fd=parent)
        # One descriptor, however deep it is.
        levels = [(name, _remove_files(here))]
        while levels:
            name, inner = levels[-1]
            if inner:
                below = inner.pop()
                after = os.open(below, DIRECTORY, dir_fd=here)
                levels.append((below, _remove_files(after)))
            else:
                after = os.open("..", DIRECTORY, dir_fd=here)
                removed = (*path, *(item for item, _ in levels))
                self.directories.pop(removed, None)
                for kept in (self.implied, self.opaque, self.with_whiteouts):
                    kept.discard(removed)
                levels.pop()
                os.rmdir(name, dir_fd=after)
            here = _closed(here, after)
        os.close(here)


def _closed(before: int, after: int) -> int:
    os.close(before)
    return after


def _remove_files(directory: int) -> list[bytes]:
    """Remove all but directories; the names of these."""
    inner = []
    with os.scandir(directory) as found:
        for item in found:
            name = os.fsencode(item.name)
            if item.is_dir(follow_symlinks=False):
                inner.append(name)
            else:
                os.unlink(name, dir_fd=directory)
    return inner


def _remove_whiteouts(directory: int) -> None:
    for name in os.listdir(directory):
        if stat.S_ISCHR(os.lstat(name, dir_fd=directory).st_mode):
            os.unlink(name, dir_fd=directory)


def _lower(lowers: Sequence[int], path: Parts) -> Attributes | None:
    """A directory as the layers below show it; None: they do not."""
    for lower in reversed(lowers):
        here, last = os.dup(lower), False
        try:
            for part in path:
                here = _closed(here, os.open(part, DIRECTORY, dir_fd=here))
                last = last or _is_opaque(here)
            found = os.fstat(here)
            return Attributes(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns)
        except FileNotFoundError:
            # Behind an opaque directory nothing of the layers further below is seen.
            if last:
                return None
        except OSError:
            # It is a whiteout there, or no directory.
            return None
        finally:
            os.close(here)
    return None


def _is_opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False
