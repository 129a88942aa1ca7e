"""Files of certificates: lines are appended as they come, and older ones of the same rows go at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from kuberoll_workers.dataset.certificates import Certificate, read_certificates


class NotWritable(Exception):
    """The file cannot be written; the message says why, and what to do."""


class CertificatesFile:
    """A file that one process at a time writes to. What was appended survives the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, certificates: Iterable[Certificate]) -> None:
        """Add certificates, in one write.

        Raises:
            OSError: They cannot be written.
        """
        data = b"".join(msgspec.json.encode(one) + b"\n" for one in certificates)
        with self._path.open("ab") as file:
            if file.tell() and not _ends_with_newline(self._path):
                # An earlier process has ended within a line.
                data = b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def compact(self) -> None:
        """Leave the newest certificate of each row, in the order in which they were first written.

        Raises:
            OSError: The file cannot be replaced.
        """
        newest = {one.key: one for one in read_certificates(str(self._path))}
        descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(msgspec.json.encode(one) + b"\n" for one in newest.values())
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(self._path.stat().st_mode & 0o777)
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def open_certificates(location: str) -> Iterator[CertificatesFile]:
    """Open a file of certificates for writing, which is compacted at the end.

    Raises:
        NotWritable: It is a URI, another process writes to it, or it cannot be written.
    """
    if "://" in location:
        raise NotWritable(
            f"{location}: certificates are written to local files: name one with --certificates, and copy it there"
        )
    path = Path(location)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=0):
            path.touch()
            file = CertificatesFile(path)
            try:
                yield file
            finally:
                file.compact()
    except Timeout as error:
        raise NotWritable(f"{location}: another kuberoll certify writes to it; wait for its end") from error
    except OSError as error:
        raise NotWritable(f"{location}: {error.strerror or error}") from error


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
