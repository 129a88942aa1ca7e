"""Models in object stores: directories at s3:// and gs://, read with fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.data.model_cache.source import (
    ModelRefused,
    ModelUnavailable,
    RemoteFile,
    RemoteModel,
    SourceUnreachable,
    in_threads,
    plain_md5,
    wanted,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SCHEMES: Final = ("s3://", "gs://")
# Which store a URI means: buckets of one name are in several.
_PLACES: Final = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "STORAGE_EMULATOR_HOST",
)  # fmt: skip
_INCOMPLETE: Final = ".incomplete"
_WITHOUT_CREDENTIALS: Final = ("NoCredentialsError", "PartialCredentialsError")
_ENCRYPTED: Final = ("aws:kms", "aws:kms:dsse")


def in_bucket(source: str) -> bool:
    """True if a model is at such a URI."""
    return source.startswith(_SCHEMES)


class BucketModel:
    """A model's directory in an object store, with the credentials that the store's library finds."""

    def __init__(self, uri: str, *, part: str = "model", every: bool = False) -> None:
        """
        Args:
            every: All files, whatever their format.
        """
        self.name = uri.rstrip("/")
        given = {name: value for name in _PLACES if (value := os.environ.get(name))}
        self.place = " ".join(f"{name}={value}" for name, value in sorted(given.items()))
        self.part = part
        self.revision = ""
        self.known: str | None = None
        self._every = every
        self._opened: tuple[AbstractFileSystem, str] | None = None
        self._paths: dict[str, str] = {}

    def find(self) -> RemoteModel:
        with self._errors():
            filesystem, root = self._open()
            filesystem.invalidate_cache()
            listed: Mapping[str, Mapping[str, Any]] = filesystem.find(root, detail=True)
        of_name = {path[len(root) :].lstrip("/"): (path, entry) for path, entry in listed.items() if path != root}
        names = wanted(of_name, part=self.part, every=self._every)
        if not names:
            raise ModelRefused(f"model {self.name}: there are no files of a model; give the directory of a saved one")
        self._paths = {name: of_name[name][0] for name in names}
        files, identity = [], hashlib.sha256()
        for name in names:
            entry = of_name[name][1]
            tag = str(entry.get("md5Hash") or entry.get("ETag") or entry.get("etag") or "")
            digest = plain_md5(tag)
            files.append(
                RemoteFile(name=name, size=int(entry["size"]), algorithm="md5" if digest else "", digest=digest)
            )
            version = tag or str(entry.get("LastModified") or entry.get("updated") or "")
            identity.update(f"{name}\0{entry['size']}\0{version}\0".encode())
        found = identity.hexdigest()[:40]
        # Not `snapshots`: it is no commit of a hub.
        return RemoteModel(identity=found, directory=f"contents/{found}", files=files)

    def fetch(self, model: RemoteModel, file: RemoteFile, directory: Path) -> None:  # noqa: ARG002
        target = directory / file.name
        if target.is_file() and target.stat().st_size == file.size:
            return
        part = target.with_name(target.name + _INCOMPLETE)
        part.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._open()[0].get_file(self._paths[file.name], str(part))
        if (size := part.stat().st_size) != file.size:
            part.unlink()
            raise ModelUnavailable(f"{self.name}/{file.name} has {size} bytes, and was listed with {file.size}")
        part.rename(target)

    def is_digest(self, model: RemoteModel, file: RemoteFile) -> bool:  # noqa: ARG002
        filesystem = self._open()[0]
        call = getattr(filesystem, "call_s3", None)
        if call is None:
            return True
        # The ETag of an object that is encrypted with a key of its owner looks like an MD5 and is none.
        bucket, key, _ = filesystem.split_path(self._paths[file.name])
        with self._errors():
            head = call("head_object", Bucket=bucket, Key=key)
        return head.get("ServerSideEncryption") not in _ENCRYPTED and "SSECustomerAlgorithm" not in head

    def _open(self) -> tuple[AbstractFileSystem, str]:
        from fsspec.core import url_to_fs

        if self._opened is None:
            filesystem, root = url_to_fs(self.name)
            self._opened = filesystem, str(root).rstrip("/")
        return self._opened

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the libraries' errors into the cache's; a full disk goes through."""
        try:
            yield
        except FileNotFoundError as error:
            raise ModelRefused(f"model {self.name}: there is no such directory ({error})") from error
        except PermissionError as error:
            raise ModelRefused(f"model {self.name}: this job may not read it: {_words(error)}") from error
        except ImportError as error:
            raise ModelRefused(f"model {self.name}: {unusable_store(self.name, error)}") from error
        except ValueError as error:
            raise ModelRefused(f"model {self.name}: {_words(error)}") from error
        except OSError as error:
            if error.errno is not None and not isinstance(error, (ConnectionError, TimeoutError)):
                raise
            raise SourceUnreachable(f"model {self.name}: {_words(error)}") from error
        except Exception as error:
            if type(error).__name__ in _WITHOUT_CREDENTIALS:
                raise ModelRefused(f"model {self.name}: {_words(error)}; give the store's variables in env") from error
            # Every store's library raises its own.
            raise SourceUnreachable(f"model {self.name}: {type(error).__name__}: {_words(error)}") from error


def copy_tokenizer(uri: str, directory: Path) -> None:
    """Copy the files of a tokenizer from an object store into a directory.

    Raises:
        ModelRefused: There are none, or they may not be read.
        ModelUnavailable: They cannot be fetched now.
    """
    source = BucketModel(uri, part="tokenizer")
    found = source.find()
    directory.mkdir(parents=True, exist_ok=True)
    in_threads(lambda file: source.fetch(found, file, directory), list(found.files))
    for left in directory.rglob(f"*{_INCOMPLETE}"):
        with contextlib.suppress(OSError):
            left.unlink()


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
