"""Models elsewhere, as the cache sees them: files with sizes and digests, and a name for exactly these."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Protocol, TypeVar

_FORMATS: Final = ((".safetensors",), (".bin",), (".pt", ".pth"))
"""Weights that engines read, by preference: the first that a model has counts."""
_OTHER_FORMATS: Final = (".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite")

TOKENIZER_FILES: Final = (
    "*.tiktoken", "added_tokens.json", "additional_chat_templates/*", "chat_template*", "config.json", "merges.txt",
    "special_tokens_map.json", "spiece.model", "tekken.json", "tokenizer*", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Patterns of the files of a tokenizer."""

_BLOCK_BYTES: Final = 4 << 20
_THREADS: Final = 8

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ModelRefused(ValueError):
    """A model that no later try can fetch: it does not exist, may not be read, or is larger than the cache."""


class ModelUnavailable(Exception):
    """A model that cannot be fetched now."""


class SourceUnreachable(ModelUnavailable):
    """Where the model comes from does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a model.

    Attributes:
        name: Relative path.
        algorithm: Of its digest as its origin states it: `sha256`, `git-sha1`, `md5`; empty: it states none.
        digest: In hexadecimal digits.
    """

    name: str
    size: int
    algorithm: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model's files as they are now.

    Attributes:
        identity: Commit, or a digest of names, sizes and digests: another one has other files.
        directory: Relative path of a directory for them. That of a commit is named as in the hub's own cache.
    """

    identity: str
    directory: str
    files: Sequence[RemoteFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Source(Protocol):
    """Origin of one model.

    Attributes:
        name: As a job spells it.
        place: The server that gives the name its meaning.
        part: The part of the model that is wanted: `model` or `tokenizer`.
        revision: As a job spells it; empty: none.
        known: The identity, if the job names it itself; None: only the origin knows it.
    """

    name: str
    place: str
    part: str
    revision: str
    known: str | None

    def find(self) -> RemoteModel:
        """The files as they are now; checks that they may be read.

        Raises:
            ModelRefused: There is no such model, or it may not be read.
            SourceUnreachable: The origin does not answer.
        """
        ...

    def fetch(self, model: RemoteModel, file: RemoteFile, directory: Path) -> None:
        """Download one file into a directory, to its relative path; what is there from an earlier try may be used.

        Raises:
            OSError: The disk is full.
            ModelUnavailable: It failed; the message says why.
        """
        ...

    def is_digest(self, model: RemoteModel, file: RemoteFile) -> bool:
        """True if the stated digest is one of the content; asked if it differs."""
        ...


def wanted(names: Iterable[str], *, part: str, every: bool = False) -> list[str]:
    """The files of a model that engines read, sorted.

    Of weights in several formats only one is wanted, as vLLM chooses.

    Args:
        part: `model`, or only the `tokenizer`.
        every: All files of a model: the engine is told to read another format.

    Raises:
        ModelRefused: A name leads out of its directory.
    """
    given = sorted(names)
    for name in given:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name or "\\" in name:
            raise ModelRefused(f"the file name {name!r} leads out of the model's directory")
    given = [name for name in given if not any(item.startswith(".") for item in PurePosixPath(name).parts)]
    if part == "tokenizer":
        return [name for name in given if any(PurePosixPath(name).match(pattern) for pattern in TOKENIZER_FILES)]
    if every:
        return given
    of_formats = tuple(ending for endings in _FORMATS for ending in endings)
    chosen = next((endings for endings in _FORMATS if any(name.endswith(endings) for name in given)), ())
    left_out = tuple(ending for ending in of_formats if ending not in chosen)
    if not chosen and any(name.endswith(_OTHER_FORMATS) for name in given):
        return given
    return [name for name in given if not name.endswith((*left_out, *_OTHER_FORMATS))]


def digests_of(path: Path, algorithm: str) -> tuple[str, str]:
    """SHA-256 of a file, and its digest by another algorithm of `RemoteFile`."""
    sha256, other = hashlib.sha256(), _hash(algorithm, path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            if other is not None:
                other.update(block)
    return sha256.hexdigest(), sha256.hexdigest() if other is None else other.hexdigest()


def in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Results of a function for all items, in order; after the first failure nothing new is begun."""
    with ThreadPoolExecutor(max_workers=_THREADS) as executor:
        futures = [executor.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def plain_md5(text: str) -> str:
    """The digits of an MD5 in an ETag or in base64; empty if it is something else."""
    if re.fullmatch(r"[0-9a-f]{32}", tag := text.strip('"').lower()):
        return tag
    if re.fullmatch(r"[A-Za-z0-9+/]{22}==", text):
        return base64.b64decode(text).hex()
    return ""


def _hash(algorithm: str, size: int) -> hashlib._Hash | None:
    if algorithm == "md5":
        return hashlib.md5(usedforsecurity=False)
    if algorithm == "git-sha1":
        # As git names a blob.
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    return None
