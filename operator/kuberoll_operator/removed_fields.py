"""Removed fields that a stored job has, or had: an operator of a newer version goes on without them, and says so.

An API server leaves out of a stored object what its schema does not have, so after an upgrade of the CRD the values are
gone. That they were there, the object's managed fields still say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import Path
from kuberoll_api.removed import replacement, sentence
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.transitions import NOTE_CHARACTERS, Event

_OF_METADATA: Final = {"podLabels": "labels", "podAnnotations": "annotations"}
# Of labels and annotations that the operator, Kubernetes or a queue gives to pods.
_NOT_OF_USERS: Final = (
    "app.kubernetes.io/", "batch.kubernetes.io/", "controller-uid", "job-name", "kuberoll.io/", "kueue.x-k8s.io/"
)  # fmt: skip


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


def with_kept(job: RolloutJob, paths: list[Path], live: Object | None) -> RolloutJob:
    """The job with what its workers lost, as far as their Job still has it.

    The pods of one run stay alike: those that aggregate it have the workers' identity, and resumed workers the same
    runtime class.

    Args:
        paths: Removed fields of the job.
        live: The workers' Job; None if there is none.
    """
    names = {str(path[-1]) for path in paths if path[:-1] == ("spec", "workers")}
    if live is None or not names:
        return job
    template = live["spec"]["template"]
    metadata, spec, workers = template.get("metadata") or {}, template["spec"], job.spec.workers
    mains: list[Object] = [item for item in spec["containers"] if item["name"] == workers.container_name]
    main = mains[0] if mains else {}
    given: Object = {}
    for name, kind in _OF_METADATA.items():
        if name in names:
            there: Object = metadata.get(kind) or {}
            given[kind] = {key: value for key, value in there.items() if not key.startswith(_NOT_OF_USERS)}
    kept: Object = {"metadata": given, "spec": {name: spec[name] for name in sorted(names) if name in spec}}
    inside: Object = {name: main[name] for name in ("envFrom", "volumeMounts") if name in names and name in main}
    if inside:
        kept["spec"]["containers"] = [{"name": workers.container_name} | inside]
    own = kept if workers.pod_template is None else merge(kept, workers.pod_template)
    changed = job.spec.model_copy(update={"workers": workers.model_copy(update={"pod_template": own})})
    return job.model_copy(update={"spec": changed})


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
    if name in _OF_METADATA:
        metadata = (pods.pod_template or {}).get("metadata")
        return isinstance(metadata, Mapping) and _OF_METADATA[str(name)] in metadata
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
