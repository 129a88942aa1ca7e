"""Removed fields that a stored job has, or had: an operator of a newer version goes on without them, and says so.

An API server leaves out of a stored object what its schema does not have, so after an upgrade of the CRD the values are
gone. That they were there, the object's managed fields still say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import Path
from kuberoll_api.removed import replacement, sentence
from kuberoll_operator.model import Object
from kuberoll_operator.transitions import NOTE_CHARACTERS, Event


def lost_fields(raw: Object, job: RolloutJob) -> list[Path]:
    """Removed fields that a job was given and that nothing in it takes the place of, by its managed fields.

    Args:
        raw: The live object.
        job: What the operator reads of it.
    """
    found: dict[Path, None] = {}
    for entry in raw["metadata"].get("managedFields") or ():
        if not entry.get("subresource"):
            given = (entry.get("fieldsV1") or {}).get("f:spec") or {}
            found |= dict.fromkeys(_removed_in(given, ("spec",), raw.get("spec")))
    return [path for path in found if not _is_replaced(path, job)]


def lost_event(paths: list[Path]) -> Event:
    """The event of a job that has, or had, removed fields."""
    said = "; ".join(sentence(path) for path in paths)
    note = f"this version of KubeRoll goes on without fields of the job: {said}"
    return Event("Warning", "FieldsRemoved", "Ignore", note[:NOTE_CHARACTERS])


def _removed_in(given: Mapping[str, Any], path: Path, value: Any) -> Iterator[Path]:
    for key, inner in given.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            place: Path = (*path, name)
            if replacement(place) is not None:
                yield place
            else:
                yield from _removed_in(inner, place, value.get(name) if isinstance(value, Mapping) else None)
        elif kind == "k" and isinstance(value, list):
            index = _index(value, json.loads(name))
            if index is not None:
                yield from _removed_in(inner, (*path, index), value[index])


def _index(items: list[Any], keys: Mapping[str, Any]) -> int | None:
    matching = (index for index, item in enumerate(items) if isinstance(item, Mapping) and keys.items() <= item.items())
    return next(matching, None)


def _is_replaced(path: Path, job: RolloutJob) -> bool:
    """True if the pod template has what the field had."""
    pods = _options(path[:-1], job)
    name = path[-1]
    if pods is None:
        return False
    if name in ("podLabels", "podAnnotations"):
        metadata = (pods.pod_template or {}).get("metadata")
        return isinstance(metadata, Mapping) and str(name).removeprefix("pod").lower() in metadata
    return name in pods.template_spec or any(name in item for item in pods.main_containers)


def _options(path: Path, job: RolloutJob) -> PodOptions | None:
    match path:
        case ("spec", "generation"):
            return job.spec.generation
        case ("spec", "workers"):
            return job.spec.workers
        case ("spec", "services", int(number)):
            return job.spec.services[number]
        case ("spec", "environments", int(number), "remote"):
            return job.spec.environments[number].remote
    return None
