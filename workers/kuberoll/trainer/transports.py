"""Ways in which weights get from a trainer to the replicas by files: whole ones, or changes since the version before.

`broadcast` has the way without files.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from kuberoll.trainer.model_weights import model_tensors
from kuberoll_workers.data.weights.manifest import (
    CHANGES_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    Base,
    WeightsManifest,
    directory_name,
    encode_manifest,
)
from kuberoll_workers.data.weights.tensors import (
    Tensor,
    UnusableWeights,
    digest_of,
    read_directory,
    write_file,
)

_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_FILE: Final = "adapter_model.safetensors"


class Transport(Protocol):
    """A way of weights to the replicas. The methods with a body are for ways that need no files."""

    def write(self, weights: Any, *, version: int, dtype: str | None, target: Path) -> WeightsManifest:
        """Write the files of a version into an empty directory, without its description.

        Raises:
            UnusableWeights: They cannot be published.
        """
        ...

    def write_anchor(self, version: int, target: Path) -> str | None:  # noqa: ARG002 - they are whole already
        """Write the whole weights of the version that was written last; return the file's name.

        Returns:
            None: They are whole already, or no longer known.
        """
        return None

    def forget(self) -> None:
        """Forget what was written last: it may not be there, or not be served."""
        return None

    def reach(self, url: str | None) -> None:  # noqa: ARG002 - files need no way back
        """Learn the policy's URL, before anything is written; None: it has none."""
        return None

    def address(self, version: int, uri: str, *, replicas: int) -> str:  # noqa: ARG002 - they read the files
        """The URI by which replicas get a version.

        Args:
            uri: That of its files, as replicas see it.
            replicas: Number of those that will come for it.
        """
        return uri

    def direct_bytes(self) -> int:
        """Bytes of the version that was written last which each replica gets without files."""
        return 0

    @property
    def leaves_files(self) -> bool:
        """Whether `write_anchor` is to be called for each version that is served."""
        return False

    def close(self) -> None:
        """Stop what runs for it."""
        return None


def describe(manifest: WeightsManifest, target: Path) -> WeightsManifest:
    """Write the description of a version with the sizes of the files beside it."""
    sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    manifest = WeightsManifest(version=manifest.version, files=sizes, digest=manifest.digest, base=manifest.base)
    (target / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


class Files(Transport):
    """Whole files: for one machine, or a file system that trainer and replicas share."""

    def write(self, weights: Any, *, version: int, dtype: str | None, target: Path) -> WeightsManifest:
        if isinstance(weights, str | Path):
            source = Path(weights)
            # Read before, so that what is not whole is not published.
            model_tensors(source, dtype=dtype)
            for file in (*source.glob("*.safetensors"), *source.glob("*.json")):
                if file.name != MANIFEST_FILE:
                    shutil.copyfile(file, target / file.name)
            read_directory(target)
        else:
            write_file(target / MODEL_FILE, model_tensors(weights, dtype=dtype))
        return WeightsManifest(version=version, files={})


class Deltas(Transport):
    """Changes since the version before, without loss; now and then, and where a replica needs it, whole weights.

    The trainer's process keeps a copy of the weights that it published last. Without one, after a restart, whole
    weights are published.
    """

    def __init__(self, *, anchor_every: int = 20) -> None:
        """
        Args:
            anchor_every: Each so many versions have the whole weights beside the changes, for replicas that start
                later: they read the nearest, and apply all changes since.
        """
        if anchor_every < 1:
            raise ValueError(f"anchor_every: found {anchor_every}, expected a number of versions from 1")
        self._anchor_every = anchor_every
        self._held: dict[str, Tensor] | None = None
        self._version = 0
        self._digest = ""
        self._since = 0

    def write(self, weights: Any, *, version: int, dtype: str | None, target: Path) -> WeightsManifest:
        # With the compression, which batches alone do not need.
        from kuberoll_workers.data.weights.changes import ChangesRefused, encode_changes, make_changes

        tensors = model_tensors(weights, dtype=dtype)
        held, base = self._held, Base(directory=directory_name(self._version), digest=self._digest)
        # Until this version is written nothing is known of what replicas have.
        self._held = None
        changes = None
        if held is not None:
            try:
                changes = make_changes(held, tensors)
            except ChangesRefused:
                # Another model, or another type: there are no changes between the two.
                held = None
        digest = digest_of(tensors)
        if changes is not None:
            (target / CHANGES_FILE).write_bytes(encode_changes(changes))
        whole = held is None or self._since + 1 >= self._anchor_every
        if whole:
            write_file(target / MODEL_FILE, tensors)
        # The trainer goes on changing its own.
        self._held = _copied(tensors, into=held)
        self._version, self._digest, self._since = version, digest, 0 if whole else self._since + 1
        return WeightsManifest(version=version, files={}, digest=digest, base=None if changes is None else base)

    def write_anchor(self, version: int, target: Path) -> str | None:
        if self._held is None or version != self._version or self._since == 0:
            return None
        write_file(target / MODEL_FILE, self._held)
        self._since = 0
        return MODEL_FILE

    def forget(self) -> None:
        self._held = None


class Adapters(Transport):
    """LoRA adapters, for replicas with `engineArgs.enable_lora: true`: megabytes in place of a model."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            config: PEFT's description of the adapter, as in `adapter_config.json`, for state dicts; a PeftModel and a
                directory have it.
        """
        self._config = None if config is None else dict(config)

    def write(self, weights: Any, *, version: int, dtype: str | None, target: Path) -> WeightsManifest:
        if isinstance(weights, str | Path):
            for name in (_ADAPTER_CONFIG, _ADAPTER_FILE):
                if not (Path(weights) / name).is_file():
                    raise UnusableWeights(f"{weights} has no {name}: give the directory of a saved adapter")
                shutil.copyfile(Path(weights) / name, target / name)
            read_directory(target)
        elif hasattr(weights, "peft_config"):
            with tempfile.TemporaryDirectory() as saved:
                weights.save_pretrained(saved)
                return self.write(saved, version=version, dtype=dtype, target=target)
        elif self._config is None:
            raise UnusableWeights("weights: a state dict is no adapter without its description: Adapters(config=…)")
        else:
            write_file(target / _ADAPTER_FILE, model_tensors(weights, dtype=dtype))
            (target / _ADAPTER_CONFIG).write_bytes(orjson.dumps(self._config))
        return WeightsManifest(version=version, files={})


def _copied(tensors: dict[str, Tensor], *, into: dict[str, Tensor] | None) -> dict[str, Tensor]:
    if into is None:
        return {name: dataclasses.replace(tensor, bits=tensor.bits.copy()) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        into[name].bits[...] = tensor.bits
    return into


__all__ = ["Adapters", "Deltas", "Files", "Transport", "UnusableWeights", "describe"]
