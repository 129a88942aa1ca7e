"""The manifest of a run: what it is, for those who read it and those who continue it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kuberoll_workers.output.storage import Storage

MANIFEST = "manifest.json"
AGGREGATES = "aggregate_metrics.json"
MODEL = "generation.model.source"
"""Path of the model in a manifest's identity."""

FORMAT = 1
"""Format of manifests."""


class RunRefused(Exception):
    """The output directory cannot be used for this run; the message names the reason and the remedy."""


@dataclass(slots=True, kw_only=True)
class RunManifest:
    """Identity of a run: two runs with the same `identity` produce the same set of trajectories.

    Attributes:
        identity: Settings that trajectories depend on, flattened to `path: value`; without the number of workers,
            concurrency, endpoint, retries and the like.
        inputs: Dataset: `rows`, `trajectories`, `digest` of all rows in order.
        created: ISO time of its beginning, UTC, at which the clock of its chat template stands.
        sources: What shapes tokens beside `identity`: the commit or a digest of the model, digests of the tokenizer and
            of its chat template (`data.provenance`); those that are known.
        sampling: The distribution of all responses that do not say another (`data.sampling`), that of the run's first
            part; None: unknown, as in manifests of older versions.
        code: Digests of the environments' source code, by name, for those whose source is found.
        forced: Differences between parts of the run that the user forced.
    """

    format: int
    job: str
    created: str
    shards: int
    identity: dict[str, Any]
    inputs: dict[str, Any]
    versions: dict[str, str]
    code: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] | None = None
    forced: list[str] = field(default_factory=list)


def read_manifest(storage: Storage) -> RunManifest | None:
    """The manifest of a run; None if there is none.

    Raises:
        RunRefused: It cannot be read.
    """
    where = storage.where(MANIFEST)
    try:
        contents = storage.read(MANIFEST)
        manifest = None if contents is None else msgspec.json.decode(contents, type=RunManifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunRefused(f"{where}: not a run's manifest: {error}; choose another --output") from error
    if manifest is not None and manifest.format != FORMAT:
        raise RunRefused(
            f"{where}: format {manifest.format}: this KubeRoll knows format {FORMAT}; use the version that wrote it "
            f"(kuberoll {manifest.versions.get('kuberoll', 'of another version')}), or choose another --output"
        )
    return manifest
