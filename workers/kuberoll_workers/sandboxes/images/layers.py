"""Unpacking of a layer that nobody trusts, into a directory of its own, as overlayfs wants its layers.

Nothing is written, linked or changed outside of it, whatever the archive says: `tree` resolves its names.

The rules for whiteouts are those of OCI's "Image Layer Filesystem Changeset", and of the kernel's `overlayfs.rst` for
what they become: a character device 0/0, and the attribute `user.overlay.opaque` of mounts with `userxattr`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kuberoll_workers.sandboxes.images.errors import ImageError, ImageInvalid, ImageUnavailable, NoSpace
from kuberoll_workers.sandboxes.images.tar_stream import TarStream, members
from kuberoll_workers.sandboxes.images.tree import DIRECTORY, Attributes, Parts, Tree

_WHITEOUT, _META, _OPAQUE = b".wh.", b".wh..wh.", b".wh..wh..opq"
_XATTR: Final = "SCHILY.xattr."
_CAPABILITY: Final = "security.capability"
_NOBODY: Final = 65534
_MAX_NAME: Final = 4096
_MAX_TIME: Final = 1 << 40
_CHECKED_BYTES, _CHECKED_ENTRIES = 64 << 20, 4096

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_THEIRS: Final = frozenset(
    {errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOENT}
    | {errno.EFBIG, errno.EMLINK, errno.EPERM, errno.ENOTEMPTY, errno.EILSEQ}
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a layer may take.

    Attributes:
        entries: Entries of its archive.
        reserve: Bytes that stay free on the disk.
    """

    entries: int = 2_000_000
    reserve: int = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """What became of a layer.

    Attributes:
        entries: Entries of the archive.
        size: Bytes of all files, without the holes.
        implied: Directories that the archive does not have: their owners and modes are those of the layers below.
        whiteouts: Files of layers below that this one removes.
        devices: Device nodes, which are left out.
        strangers: Entries of users or groups that the machine does not have, and that are nobody's now.
        dropped: Extended attributes that could not be kept.
    """

    entries: int
    size: int
    implied: int = 0
    whiteouts: int = 0
    devices: int = 0
    strangers: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Ids:
    """Users and groups of files, as first and count; the files of others are nobody's, or root's without a nobody."""

    users: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, int], ...]

    def user(self, uid: int) -> int:
        """The user that a file of this one has."""
        return _known(self.users, uid)

    def group(self, gid: int) -> int:
        """The group that a file of this one has."""
        return _known(self.groups, gid)


def _known(ranges: Iterable[tuple[int, int]], number: int) -> int:
    there = [first <= number < first + count for first, count in ranges]
    if any(there):
        return number
    return _NOBODY if any(first <= _NOBODY < first + count for first, count in ranges) else 0


def unpack(
    pieces: Iterable[bytes], directory: int, *, ids: Ids, lowers: Sequence[int] = (), limits: Limits | None = None
) -> Unpacked:
    """Unpack a layer; the process should have all capabilities in a user namespace with the ids.

    Args:
        pieces: The plain tar.
        directory: Descriptor of an empty directory.
        lowers: Descriptors of the directories of the layers below, lowest first.

    Raises:
        ImageInvalid: The archive is damaged or hostile; the message names the entry.
        NoSpace: The disk is full.
        ImageUnavailable: It cannot be written for another reason.
    """
    stream = TarStream(iter(pieces))
    with contextlib.closing(Tree(directory, lowers)) as tree:
        unpacker = _Unpacker(tree, stream, ids, limits or Limits())
        for member, stored in members(stream):
            try:
                unpacker.add(member, stored)
            except ImageError as error:
                raise type(error)(f"entry {member.name!r:.300}: {error}") from error
            except (OSError, ValueError, OverflowError) as error:
                raise _told(error, f"entry {member.name!r:.300}") from error
        stream.drain()
        try:
            unpacker.finish()
        except OSError as error:
            raise _told(error, "directories") from error
    return Unpacked(**{item.name: unpacker.counts[item.name] for item in dataclasses.fields(Unpacked)})


def empty(directory: int) -> None:
    """Remove everything in a directory, whatever its modes."""
    with contextlib.closing(Tree(directory, ())) as tree:
        os.fchmod(directory, 0o700)
        for name in os.listdir(directory):
            tree.clear(directory, (), os.fsencode(name))


def _told(error: OSError | ValueError | OverflowError, where: str) -> ImageError:
    if isinstance(error, OSError) and error.errno in _FULL:
        return NoSpace(f"{where}: {error.strerror}: free some space, or give another directory for images")
    if isinstance(error, OSError) and error.errno not in _THEIRS:
        return ImageUnavailable(f"{where}: {error.strerror}")
    return ImageInvalid(f"{where}: {error.strerror if isinstance(error, OSError) else error}")


class _Unpacker:
    """Makes what an archive has, entry by entry."""

    def __init__(self, tree: Tree, stream: TarStream, ids: Ids, limits: Limits) -> None:
        self._tree = tree
        self._stream = stream
        self._ids = ids
        self._limits = limits
        self._room = 0
        self.counts: Counter[str] = Counter()

    def add(self, member: tarfile.TarInfo, stored: int) -> None:
        """Make an entry.

        Args:
            stored: Bytes of its content in the archive, with what fills the last block.
        """
        self.counts["entries"] += 1
        if self.counts["entries"] > self._limits.entries:
            raise ImageInvalid(f"the layer has more than {self._limits.entries} entries")
        if self.counts["entries"] % _CHECKED_ENTRIES == 0:
            self._check_room(0)
        parts = _parts(member.name)
        if not parts:
            if not member.isdir():
                raise ImageInvalid("the layer's root is no directory")
            self._tree.set((), self._attributes(member))
            return
        if parts[0].startswith(_META) and parts[0] != _OPAQUE:
            # Of AUFS, which had its own things in layers.
            return
        if parts[-1].startswith(_WHITEOUT):
            self._whiteout(parts)
        elif member.islnk():
            self._hard_link(member, parts)
        else:
            self._make(member, stored, parts)

    def _make(self, member: tarfile.TarInfo, stored: int, parts: Parts) -> None:
        path, parent = self._tree.directory(parts[:-1])
        name = parts[-1]
        if member.isdir():
            self._directory(member, path, parent, name)
        elif member.isreg() or member.issparse():
            self._file(member, stored, path, parent, name)
        elif member.issym():
            target = _bytes(member.linkname)
            self._place(lambda: os.symlink(target, name, dir_fd=parent), path, parent, name)
            self._finish_special(member, parent, name)
        elif member.isfifo():
            self._place(lambda: os.mkfifo(name, 0o600, dir_fd=parent), path, parent, name)
            self._finish_special(member, parent, name)
        elif member.ischr() or member.isblk():
            # A machine's devices are those that it is given, in its /dev.
            self.counts["devices"] += 1
            with contextlib.suppress(FileNotFoundError):
                self._tree.clear(parent, path, name)
        else:
            raise ImageInvalid(f"entries of type {member.type!r} are unknown")

    def finish(self) -> None:
        """Give directories what would have been in the way before, or been changed by what is in them."""
        self.counts["implied"] = len(self._tree.implied)
        self._tree.drop_whiteouts()
        # Each one's parent was opened just before; modes keep nobody out who has all capabilities.
        for path, made in sorted(self._tree.directories.items()):
            _, descriptor = self._tree.directory(path)
            self._attach(descriptor, made)

    def _whiteout(self, parts: Parts) -> None:
        name = parts[-1]
        if name == _OPAQUE:
            self._tree.hide_lower(*self._tree.directory(parts[:-1]))
            return
        name = name.removeprefix(_WHITEOUT)
        if name in (b"", b".", b".."):
            raise ImageInvalid("a whiteout of nothing")
        path, parent = self._tree.directory(parts[:-1])
        self.counts["whiteouts"] += 1
        self._tree.with_whiteouts.add(path)
        try:
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
        except FileExistsError:
            # It is of this layer, and whiteouts are for those below.
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self._hide(path, parent, name)
        except PermissionError as error:
            raise ImageUnavailable(
                "whiteouts cannot be made: an ordinary user makes them from Linux 5.8 on, on a local file system"
            ) from error

    def _directory(self, member: tarfile.TarInfo, path: Parts, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                # Of this layer, a whiteout or else: what is below it is hidden.
                self._tree.clear(parent, path, name)
                os.mkdir(name, 0o700, dir_fd=parent)
                self._hide(path, parent, name)
        self._tree.set((*path, name), self._attributes(member))

    def _hide(self, path: Parts, parent: int, name: bytes) -> None:
        descriptor = os.open(name, DIRECTORY, dir_fd=parent)
        try:
            self._tree.hide_lower((*path, name), descriptor)
        finally:
            os.close(descriptor)

    def _file(self, member: tarfile.TarInfo, stored: int, path: Parts, parent: int, name: bytes) -> None:
        try:
            descriptor = os.open(name, _NEW, 0o600, dir_fd=parent)
        except FileExistsError:
            self._tree.clear(parent, path, name)
            descriptor = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            if member.issparse():
                self._sparse(member, stored, descriptor)
            else:
                self._copy(descriptor, member.size, stored)
            self._attach(descriptor, self._attributes(member))
        finally:
            os.close(descriptor)

    def _sparse(self, member: tarfile.TarInfo, stored: int, descriptor: int) -> None:
        regions: list[tuple[int, int]] = getattr(member, "sparse", None) or []
        end = 0
        for begin, size in regions:
            if not size:
                continue
            if begin < end or begin + size > member.size:
                raise ImageInvalid("its map of holes is wrong")
            os.lseek(descriptor, begin, os.SEEK_SET)
            self._copy(descriptor, size, stored)
            end = begin + size
            stored -= size
        os.ftruncate(descriptor, member.size)

    def _copy(self, descriptor: int, count: int, stored: int) -> None:
        if not 0 <= count <= stored:
            raise ImageInvalid("its size is wrong")
        if count > self._room:
            self._check_room(count)
        left = count
        for part in self._stream.parts(count):
            left -= len(part)
            while part:
                part = part[os.write(descriptor, part) :]
        if left:
            raise ImageInvalid("it is cut off")
        self.counts["size"] += count
        self._room -= count

    def _check_room(self, count: int) -> None:
        """Look how much the disk has left: from time to time, since others write, too."""
        found = os.fstatvfs(self._tree.root)
        left = found.f_bavail * found.f_frsize - self._limits.reserve
        if count > left or left < 0:
            raise NoSpace(
                f"{count >> 20} MiB are needed, and {max(0, left) >> 20} MiB are left beside the "
                f"{self._limits.reserve >> 20} MiB that stay free: free some, or give images another directory"
            )
        self._room = max(count, min(left, _CHECKED_BYTES))

    def _hard_link(self, member: tarfile.TarInfo, parts: Parts) -> None:
        target = _parts(member.linkname)
        if not target:
            raise ImageInvalid("a hard link to a directory")
        there, found = self._tree.directory(target[:-1])
        held = os.dup(found)
        try:
            path, parent = self._tree.directory(parts[:-1])
            name = parts[-1]
            mode = _mode_at(held, target[-1])
            if mode is None or stat.S_ISDIR(mode) or stat.S_ISCHR(mode):
                raise ImageInvalid(f"a hard link to {member.linkname!r:.300}, which is no file of this layer")
            if (*there, target[-1]) != (*path, name):
                link = functools.partial(os.link, target[-1], name, src_dir_fd=held, dst_dir_fd=parent)
                self._place(lambda: link(follow_symlinks=False), path, parent, name)
        finally:
            os.close(held)

    def _place(self, make: Callable[[], object], path: Parts, parent: int, name: bytes) -> None:
        try:
            make()
        except FileExistsError:
            self._tree.clear(parent, path, name)
            make()

    def _finish_special(self, member: tarfile.TarInfo, parent: int, name: bytes) -> None:
        """Give what cannot be opened its owner, mode and time."""
        made = self._attributes(member)
        os.chown(name, made.uid, made.gid, dir_fd=parent, follow_symlinks=False)
        if not member.issym():
            # It was made just now, so that it is no symbolic link.
            os.chmod(name, made.mode, dir_fd=parent)
        if made.time is not None:
            os.utime(name, ns=(made.time, made.time), dir_fd=parent, follow_symlinks=False)
        self.counts["dropped"] += len(made.extended)

    def _attributes(self, member: tarfile.TarInfo) -> Attributes:
        uid, gid = self._ids.user(member.uid), self._ids.group(member.gid)
        if (uid, gid) != (member.uid, member.gid):
            self.counts["strangers"] += 1
        extended = [
            (name.removeprefix(_XATTR), text.encode("utf-8", "surrogateescape"))
            for name, text in member.pax_headers.items()
            if name.startswith(_XATTR)
        ]
        return Attributes(member.mode & 0o7777, uid, gid, _time(member), tuple(extended))

    def _attach(self, descriptor: int, made: Attributes) -> None:
        # A new owner takes away set-user-id bits and capabilities.
        os.fchown(descriptor, made.uid, made.gid)
        for name, value in made.extended:
            self._extend(descriptor, name, value)
        os.fchmod(descriptor, made.mode)
        if made.time is not None:
            os.utime(descriptor, ns=(made.time, made.time))

    def _extend(self, descriptor: int, name: str, value: bytes) -> None:
        # Those of overlayfs would make it look elsewhere, and those of the kernel are not an image's to give.
        if name == _CAPABILITY or (name.startswith("user.") and not name.startswith("user.overlay.")):
            try:
                os.setxattr(descriptor, name, value)
            except OSError as error:
                if error.errno in _FULL:
                    raise
            else:
                return
        self.counts["dropped"] += 1


def _mode_at(parent: int, name: bytes) -> int | None:
    try:
        return os.lstat(name, dir_fd=parent).st_mode
    except FileNotFoundError:
        return None


def _parts(name: str) -> Parts:
    """The parts of a name.

    Raises:
        ImageInvalid: It leads out of the layer's root.
    """
    found: list[bytes] = []
    encoded = _bytes(name)
    if len(encoded) > _MAX_NAME:
        raise ImageInvalid(f"a name of {len(encoded)} bytes; at most {_MAX_NAME} are usual")
    for part in encoded.split(b"/"):
        if part == b"..":
            if not found:
                raise ImageInvalid(f"{name!r:.300} leads out of the layer")
            found.pop()
        elif part not in (b"", b"."):
            found.append(part)
    return tuple(found)


def _bytes(text: str) -> bytes:
    found = text.encode("utf-8", "surrogateescape")
    if b"\0" in found:
        raise ImageInvalid("a name with a zero byte")
    return found


def _time(member: tarfile.TarInfo) -> int:
    """When it was changed, in nanoseconds; those far away are brought near."""
    text = member.pax_headers.get("mtime", "")
    whole, _, part = text.partition(".")
    try:
        seconds = int(whole) if text else int(member.mtime)
        nanoseconds = int(f"{part[:9]:0<9}") if part else 0
    except (ValueError, OverflowError):
        return 0
    if text.startswith("-"):
        nanoseconds = -nanoseconds
    return max(-_MAX_TIME, min(_MAX_TIME, seconds)) * 10**9 + nanoseconds
