"""Operations on files of a sandbox; each runs in a process of its own, as the user that it is for.

Each takes the descriptors of its input and its output, of which it uses one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any, Final

from .frames import CHUNK_BYTES

_DEFAULT_MODE: Final = 0o644


def read(path: str, *, offset: int, size: int | None, output: int, input: int = -1) -> None:  # noqa: ARG001
    """Write a file, or a part of it, to a descriptor.

    Raises:
        OSError: It cannot be read, or is no ordinary file.
    """
    # A pipe would never end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with _closing(descriptor):
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            # It says why it cannot be read.
            os.read(descriptor, 1)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", path)
        left, position = size, offset
        while left is None or left > 0:
            data = os.pread(descriptor, CHUNK_BYTES if left is None else min(CHUNK_BYTES, left), position)
            if not data:
                return
            position += len(data)
            left = None if left is None else left - len(data)
            _write(output, data)


def write(path: str, *, mode: int | None, parents: bool, input: int, output: int = -1) -> None:  # noqa: ARG001
    """Write what comes from a descriptor to a file, which is replaced as a whole when all has come.

    A link is followed. A new file has the mode 0644, and one that was there keeps its own.

    Raises:
        OSError: It cannot be written.
    """
    path = os.path.realpath(path)
    directory = os.path.dirname(path)
    if parents:
        os.makedirs(directory, exist_ok=True)
    found: os.stat_result | None = None
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        # A device, or a directory, which says so.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with _closing(descriptor):
            _copy(input, descriptor)
        return
    temporary = f"{directory.rstrip('/')}/.kuberoll-{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    try:
        with _closing(descriptor):
            _copy(input, descriptor)
            kept = _DEFAULT_MODE if found is None else stat.S_IMODE(found.st_mode)
            if found is not None and (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, found.st_uid, found.st_gid)
            os.fchmod(descriptor, kept if mode is None else mode)
        # Only now: what is still open for writing cannot be executed.
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def unpack(path: str, *, trusted: bool, input: int, output: int = -1) -> None:  # noqa: ARG001
    """Unpack a tar archive that comes from a descriptor into a directory, which is made.

    Owner of all is the user.

    Args:
        trusted: False if anybody may have made it: then names and links that lead out of the directory are refused.

    Raises:
        OSError: It cannot be written, or was refused.
    """
    import tarfile

    os.makedirs(path, exist_ok=True)
    try:
        with open(input, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                if not trusted:
                    check_within(member, path)
                member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
                archive.extract(member, path, numeric_owner=True, **as_it_is())
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, str(error), path) from error


def check_within(member: Any, path: str) -> None:
    """Check that a member of an archive that anybody may have made stays in the directory that it is unpacked into.

    What was unpacked before counts: a name may lead through a link. The rules are those of `tarfile.data_filter`, which
    Pythons before 3.11.4 have not.

    Raises:
        OSError: It leads out of the directory, or is neither a file, a directory nor a link.
    """
    root = os.path.realpath(path)

    def inside(place: str) -> bool:
        return os.path.commonpath((root, os.path.realpath(place))) == root

    name = os.path.join(root, member.name)
    refused = ""
    if os.path.isabs(member.name) or not inside(name):
        refused = "is outside of the directory"
    elif member.issym():
        if os.path.isabs(member.linkname):
            refused = "is a link to an absolute path"
        elif not inside(os.path.join(os.path.dirname(name), member.linkname)):
            refused = "is a link to outside of the directory"
    elif member.islnk():
        if os.path.isabs(member.linkname) or not inside(os.path.join(root, member.linkname)):
            refused = "is a link to outside of the directory"
    elif not (member.isfile() or member.isdir()):
        refused = "is neither a file, a directory nor a link"
    if refused:
        raise OSError(errno.EINVAL, f"{member.name} {refused}", path)


def as_it_is() -> dict[str, Any]:
    """Arguments by which `tarfile` changes nothing in what it extracts, in Pythons that otherwise would."""
    import tarfile

    return {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


def make(path: str, *, mode: int, input: int = -1, output: int = -1) -> None:  # noqa: ARG001
    """Make a directory with those above it; one that is there gets the mode.

    Raises:
        OSError: It cannot be made.
    """
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)


def remove(path: str, *, input: int = -1, output: int = -1) -> None:  # noqa: ARG001
    """Remove a file, a link or a directory with all that is in it; what is not there is no error.

    Raises:
        OSError: It cannot be removed.
    """
    import shutil

    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def pack(path: str, *, output: int, input: int = -1) -> None:  # noqa: ARG001
    """Write a file or a directory to a descriptor, as a tar archive.

    Raises:
        OSError: It cannot be read.
    """
    import tarfile

    os.lstat(path)
    with (
        open(output, "wb", closefd=False) as file,
        tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as to,
    ):
        to.add(path, arcname=".", filter=_ordinary)


def _ordinary(member: Any) -> Any:
    """A member, without pipes, sockets and devices."""
    return member if member.isfile() or member.isdir() or member.issym() or member.islnk() else None


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _copy(source: int, target: int) -> None:
    while data := os.read(source, CHUNK_BYTES):
        _write(target, data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
