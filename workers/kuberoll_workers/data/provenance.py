"""What shapes a run's tokens beside its settings: the files of its model and its tokenizer, by digest.

A run stores these in its manifest. A resumed run is refused where one of them changed, and a trajectory that was
interrupted is continued only by what began it: `Rendering` is the part of that which a turn log can check.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from kuberoll_workers.data.tokenizer_files import FILES

MODEL: Final = "model"
TOKENIZER: Final = "tokenizer"
TEMPLATE: Final = "chat template"
"""Names of the sources in a run's manifest."""

_COMMIT: Final = "commit "
_TEMPLATES: Final = ("chat_template.jinja", "additional_chat_templates/*")
# Beside those that decide how a tokenizer is read, the vocabularies that transformers builds one of.
_VOCABULARIES: Final = ("*.tiktoken", "merges.txt", "spiece.model", "tokenizer.model*", "vocab.json", "vocab.txt")
_SETTINGS: Final = ("config.json", "generation_config.json")
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_SAMPLE_BYTES: Final = 64 << 10
_SAMPLES: Final = 8
_HEADER_BYTES: Final = 64 << 20


def hub_commit(directory: Path) -> str | None:
    """The commit of a directory in the hub's cache; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def commit_of(source: str) -> str | None:
    """The commit that a source of a run's manifest names; None: it names files."""
    return source.removeprefix(_COMMIT) if source.startswith(_COMMIT) else None


def model_commit(sources: Mapping[str, str]) -> str | None:
    """The commit of a run's model at the hub, of the sources in its manifest; None: it has none, or it is unknown."""
    return commit_of(sources.get(MODEL, ""))


def tokenizer_sources(directory: Path, *, own_template: bool) -> dict[str, str]:
    """The commit of a tokenizer of the hub, or digests of a tokenizer's files and of its chat template.

    Args:
        own_template: The job has a template of its own, so that the tokenizer's has no effect.
    """
    if (commit := hub_commit(directory)) is not None:
        # What the cache has of it may grow.
        return {TOKENIZER: f"{_COMMIT}{commit}"}
    tokenizer, template = _Digest(), _Digest()
    templates = _found(directory, _TEMPLATES)
    for path in _found(directory, (*FILES, *_VOCABULARIES)):
        name = str(path.relative_to(directory))
        if path in templates:
            template.add(name, path.read_bytes())
        elif name == "config.json":
            # Of the model; the tokenizer's class depends on its type.
            tokenizer.add(name, orjson.dumps(_object(path).get("model_type")))
        elif name == "tokenizer_config.json":
            config = _object(path)
            if (own := config.pop("chat_template", None)) is not None:
                template.add(name, orjson.dumps(own, option=orjson.OPT_SORT_KEYS))
            tokenizer.add(name, orjson.dumps(config, option=orjson.OPT_SORT_KEYS))
        else:
            tokenizer.add(name, path.read_bytes())
    return {TOKENIZER: tokenizer.hex()} if own_template else {TOKENIZER: tokenizer.hex(), TEMPLATE: template.hex()}


def model_source(directory: Path) -> str:
    """The commit of a model of the hub, or a digest of a model's files.

    Of weights the digest has the names, sizes and headers, and samples of their values: reading them whole would take
    as long as loading them.
    """
    if (commit := hub_commit(directory)) is not None:
        return f"{_COMMIT}{commit}"
    digest = _Digest()
    for path in _found(directory, _SETTINGS):
        digest.add(path.name, path.read_bytes())
    for path in _found(directory, _WEIGHTS):
        for number, part in enumerate(_samples(path)):
            digest.add(f"{path.name} {path.stat().st_size} {number}", part)
    return digest.hex()


def rendering_of(sources: Mapping[str, str], *, clock: str | None) -> bytes:
    """A key of everything beside the row and the environment that a prompt's ids and its responses depend on."""
    return _digest_of(orjson.dumps([sorted(sources.items()), clock]))


class _Digest:
    """A digest of named parts."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, data: bytes) -> None:
        # Lengths separate adjacent parts.
        for part in (name.encode(), data):
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _found(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _object(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        return {"": path.read_text(errors="replace")}
    return value if isinstance(value, dict) else {"": value}


def _samples(path: Path) -> Iterator[bytes]:
    """Parts of a file of weights: the header, and blocks from its beginning to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = 0
        if path.suffix == ".safetensors" and size >= 8:
            (header,) = struct.unpack("<Q", file.read(8))
            begin = min(8 + header, size)
            if header <= _HEADER_BYTES:
                yield file.read(begin - 8)
        last = max(begin, size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            file.seek(begin + (last - begin) * number // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
