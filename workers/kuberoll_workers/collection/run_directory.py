"""The directory of a run: its lock, its manifest, and whether a resumed run is the same run."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson

from kuberoll_api.rolloutjob import RolloutJob

MANIFEST = "manifest.json"
AGGREGATES = "aggregate_metrics.json"
_LOCK = ".lock"
_FORMAT = 1


class RunRefused(Exception):
    """The output directory cannot be used for this run; the message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class RunManifest:
    """What a run is: two runs with the same `identity` produce the same set of trajectories.

    Attributes:
        identity: The settings that trajectories depend on, flattened to `path: value`. How many workers, how many
            at once, which endpoint, how patient: none of that is in it.
        inputs: The dataset: `rows`, `trajectories`, `digest` of all rows in order.
    """

    format: int
    job: str
    created: str
    shards: int
    identity: dict[str, Any]
    inputs: dict[str, Any]
    versions: dict[str, str]


def new_manifest(job: RolloutJob, *, shards: int, inputs: Mapping[str, Any]) -> RunManifest:
    """The manifest of a run that starts now."""
    return RunManifest(
        format=_FORMAT,
        job=job.metadata.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        shards=shards,
        identity=dict(sorted(_flatten(_identity(job)))),
        inputs=dict(inputs),
        versions={name: importlib.metadata.version(name) for name in ("kuberoll", "ray", "transformers")},
    )


def _identity(job: RolloutJob) -> dict[str, Any]:
    spec = job.spec.model_dump(mode="json", by_alias=True)
    generation, rollout = spec["generation"], spec["rollout"]
    kept_of_environments = ("name", "type", "entrypoint", "config", "repeats")
    return {
        "metadata": {"name": job.metadata.name},
        "generation": {key: generation[key] for key in ("model", "engine", "engineArgs", "simulated", "sampling")},
        "environments": [{key: item[key] for key in kept_of_environments} for item in spec["environments"]],
        "dataset": {key: value for key, value in spec["dataset"].items() if key != "source"},
        "rollout": {key: rollout[key] for key in ("maxTurns", "maxSequenceLength", "observationTemplate", "groups")},
    }


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{path}[{number}]")
    else:
        yield path, value


def differences(old: RunManifest, new: RunManifest) -> list[str]:
    """What makes a run another run than the one on disk, a line each; none: it may be resumed."""
    pairs: dict[str, tuple[Any, Any]] = {"shards": (old.shards, new.shards)}
    for name, before, after in (("spec.", old.identity, new.identity), ("dataset: ", old.inputs, new.inputs)):
        for key in sorted({*before, *after}):
            pairs[name + key] = (before.get(key), after.get(key))
    return [f"{key}: was {_short(was)}, is {_short(now)}" for key, (was, now) in pairs.items() if was != now]


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else text[:97] + "..."


class RunDirectory:
    """An output directory, held by one run at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def open(self, manifest: RunManifest, *, resume: bool) -> bool:
        """Lock the directory and see that it fits the run; what is there already is never removed or changed.

        Returns:
            Whether an earlier part of the same run is there.

        Raises:
            RunRefused: Another run holds it, it has other contents, or an earlier run differs or was not to be resumed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunRefused(f"{self.path}: cannot be made: {error.strerror}") from error
        self._take_lock()
        old = read_manifest(self.path)
        if old is None:
            if any(self.path.glob("shard-*")) or any(self.path.glob("failures*")):
                raise RunRefused(
                    f"{self.path} has trajectories but no {MANIFEST}, so nothing says what made them: "
                    "choose another --output"
                )
            write_atomically(self.path / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
            return False
        if not resume:
            raise RunRefused(
                f"{self.path} holds a run of {old.created} already: continue it with --resume, "
                "or choose another --output"
            )
        changed = differences(old, manifest)
        if changed:
            lines = "\n  ".join(changed)
            raise RunRefused(
                f"{self.path} holds another run than this one, and their trajectories must not be mixed:\n  {lines}\n"
                "Undo the change to resume, or choose another --output"
            )
        return True

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise RunRefused(f"{self.path} is in use by another run: wait for it or choose another --output") from error

    def close(self) -> None:
        """Let go of the lock; the kernel does so too when the process dies."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_manifest(directory: Path) -> RunManifest | None:
    """The manifest of a run; None where there is none.

    Raises:
        RunRefused: It cannot be read.
    """
    path = directory / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunManifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RunRefused(f"{path}: not a run's manifest: {error}; choose another --output") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole: a reader, or a crash, sees the old contents or the new."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
