"""Cache of what the watches report about jobs, their children and their pods, cut down to the fields that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kuberoll_operator import names
from kuberoll_operator.kube.apply import hash_text
from kuberoll_operator.kube.resources import PODS, ROLLOUT_JOBS, Resource
from kuberoll_operator.model import Key, Object, is_true

Scope = str | None
"""A namespace; None: all namespaces."""


class Cache:
    """Latest known state of the objects of one API server.

    A list replaces everything of its kind and scope, so objects that were deleted while nothing watched disappear. An
    event older than the cached object is ignored; a list that is older than the last one says that the API server's
    history was restored from a backup, and what it lists is taken as it is.

    Args:
        changed: Called with the key of the job whenever anything but this operator changes one of its objects.
    """

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._objects: dict[Resource, dict[tuple[str, str], Object]] = {}
        self._children: dict[Key, dict[tuple[str, str], Object]] = {}
        self._departed: dict[Key, dict[str, Object]] = {}
        self._listed: dict[tuple[Resource, Scope], int] = {}
        self._pages: dict[tuple[Resource, Scope], set[tuple[str, str]]] = {}

    def add_page(
        self,
        resource: Resource,
        scope: Scope,
        items: Iterable[Object],
        version: str,
        *,
        last: bool,
        first: bool = True,
    ) -> None:
        """Add a page of a list; after the last page, cached objects that were on no page are dropped.

        The first page begins a new list: what was seen of one that was broken off before its last page is forgotten.
        """
        place = (resource, scope)
        if first:
            self._pages[place] = set()
            if _version(version) < self._listed.get(place, -1):
                self._rewind(resource, scope)
        seen = self._pages.setdefault(place, set())
        for item in items:
            metadata = item["metadata"]
            seen.add((metadata["namespace"], metadata["name"]))
            self._put(resource, item, tell=True)
        if not last:
            return
        del self._pages[place]
        known = self._objects.get(resource, {})
        listed = _version(version)
        for name in [name for name in known if scope in (None, name[0]) and name not in seen]:
            # A newer version was written by this operator after the list was made.
            if version_of(known[name]) <= listed:
                self._drop(resource, name)
        self._listed[place] = listed

    def add_event(self, resource: Resource, item: Object, *, deleted: bool) -> None:
        """Apply a watch event."""
        metadata = item["metadata"]
        name, version = (metadata["namespace"], metadata["name"]), version_of(item)
        known = self._objects.get(resource, {}).get(name)
        if deleted:
            if known is not None and known["metadata"]["uid"] == metadata["uid"]:
                # A DELETED event carries the last state of the object.
                self._put(resource, item, tell=False)
                self._drop(resource, name)
        elif known is not None or version > max(
            self._listed.get((resource, None), -1), self._listed.get((resource, name[0]), -1)
        ):
            # An unknown object that is older than the list has been deleted since.
            self._put(resource, item, tell=True)

    def add_written(self, resource: Resource, item: Object) -> None:
        """Add the API server's answer to a write of this operator, without calling `changed`."""
        self._put(resource, item, tell=False)

    def synced(self, resource: Resource, scope: Scope) -> bool:
        """True if all objects of this kind and scope have been listed once."""
        return (resource, scope) in self._listed

    def jobs(self) -> Iterable[tuple[Key, Object]]:
        """All jobs, with their metadata, phase and replicas only."""
        return [(Key(*name), item) for name, item in self._objects.get(ROLLOUT_JOBS, {}).items()]

    def version(self, resource: Resource, key: Key) -> str | None:
        """Resource version of the latest known state of an object; None if none is known."""
        found = self._objects.get(resource, {}).get((key.namespace, key.name))
        return None if found is None else str(found["metadata"].get("resourceVersion"))

    def children(self, key: Key) -> Mapping[tuple[str, str], Object]:
        """Children of a job by (kind, name), including objects of other owners that have the job's label."""
        return {place: item for place, item in self._children.get(key, {}).items() if place[0] != PODS.kind}

    def pods(self, key: Key) -> list[Object]:
        """Pods of a job, sorted by name."""
        found = self._children.get(key, {})
        return [found[place] for place in sorted(found) if place[0] == PODS.kind]

    def departed(self, key: Key) -> list[Object]:
        """Last state of deleted pods that had ended or that the cluster removed.

        Of those that had ended the latest of each completion index, of the others the latest of each component. A
        suspended Job deletes its pods as soon as they end, and their termination messages with them; of one that was
        preempted or evicted nothing else says why.
        """
        return list(self._departed.get(key, {}).values())

    def sizes(self) -> dict[str, int]:
        """Number of objects by kind."""
        return {resource.kind: len(items) for resource, items in self._objects.items()}

    def _rewind(self, resource: Resource, scope: Scope) -> None:
        """Let any version of an object replace the cached one."""
        self._listed.pop((resource, scope), None)
        for name, item in self._objects.get(resource, {}).items():
            if scope in (None, name[0]):
                item["metadata"]["resourceVersion"] = "-1"

    def _put(self, resource: Resource, item: Object, *, tell: bool) -> None:
        metadata = item["metadata"]
        name = (metadata["namespace"], metadata["name"])
        items = self._objects.setdefault(resource, {})
        known = items.get(name)
        if known is not None and version_of(known) >= version_of(item):
            return
        if known is not None:
            self._forget(resource, known)
        items[name] = trimmed = trim(resource, item)
        key = _key(resource, trimmed)
        if key is None:
            return
        if resource != ROLLOUT_JOBS:
            self._children.setdefault(key, {})[resource.kind, name[1]] = trimmed
        if tell:
            self._changed(key)

    def _drop(self, resource: Resource, name: tuple[str, str]) -> None:
        item = self._objects[resource].pop(name)
        self._forget(resource, item)
        if (key := _key(resource, item)) is None:
            return
        if resource == ROLLOUT_JOBS:
            self._departed.pop(key, None)
        elif resource == PODS:
            labels = item["metadata"].get("labels") or {}
            if (index := labels.get(_INDEX)) and _has_ended(item):
                self._departed.setdefault(key, {})[index] = item
            elif _was_removed(item):
                self._departed.setdefault(key, {})[f"{labels.get(names.COMPONENT_LABEL)} removed"] = item
        self._changed(key)

    def _forget(self, resource: Resource, item: Object) -> None:
        key = _key(resource, item)
        if key is None or resource == ROLLOUT_JOBS:
            return
        found = self._children.get(key, {})
        found.pop((resource.kind, item["metadata"]["name"]), None)
        if not found:
            self._children.pop(key, None)


def _key(resource: Resource, item: Object) -> Key | None:
    metadata = item["metadata"]
    if resource == ROLLOUT_JOBS:
        return Key(metadata["namespace"], metadata["name"])
    job = (metadata.get("labels") or {}).get(names.JOB_LABEL)
    return None if job is None else Key(metadata["namespace"], job)


def _has_ended(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any((item.get("state") or {}).get("terminated") for item in statuses)


def _was_removed(pod: Object) -> bool:
    return is_true(pod.get("status") or {}, "DisruptionTarget")


def version_of(item: Object) -> int:
    """The resource version of an object; one that is no number counts as newer than all."""
    return _version(item["metadata"].get("resourceVersion"))


def _version(text: Any) -> int:
    # Kubernetes promises increasing decimal numbers (KEP-5504); any other version counts as newer than all of them.
    try:
        return int(text)
    except (TypeError, ValueError):
        return 1 << 128


_INDEX = "batch.kubernetes.io/job-completion-index"
_PLACED = ("resources", "engineArgs", "gpusPerReplica")
_POD_STATUS = (
    *("phase", "reason", "message", "podIP", "nominatedNodeName"),
    *("conditions", "containerStatuses", "initContainerStatuses"),
)


def trim(resource: Resource, item: Object) -> Object:
    """An object without the fields that the operator does not read: 10,000 pods must fit into memory."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    head = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    if resource == ROLLOUT_JOBS:
        for key in ("annotations", "labels"):
            metadata.pop(key, None)
        status = item.get("status") or {}
        generation = (item.get("spec") or {}).get("generation") or {}
        placed = {key: generation[key] for key in _PLACED if key in generation}
        return head | {
            "spec": {"generation": placed},
            "status": {
                **{key: status.get(key) for key in ("phase", "generation")},
                # For metrics; the reconciler reads the job itself.
                "conditions": [
                    {key: item.get(key) for key in ("type", "status", "reason")}
                    for item in status.get("conditions") or ()
                ],
            },
        }
    if resource == PODS:
        status = item.get("status") or {}
        spec = {key: item["spec"][key] for key in ("nodeName",) if key in (item.get("spec") or {})}
        if status.get("phase") == "Pending":
            spec |= _placing_part(item.get("spec") or {})
        return head | {"spec": spec, "status": {key: status[key] for key in _POD_STATUS if key in status}}
    rest = {key: value for key, value in item.items() if key not in head}
    if resource.kind == "ConfigMap":
        rest["data"] = {key: hash_text(value) for key, value in (item.get("data") or {}).items()}
        # Of files that users ship; ours are text.
        rest.pop("binaryData", None)
    return head | rest


def _placing_part(spec: Object) -> Object:
    """What a pod that has not started may be waiting for: its claims and what its containers ask for."""
    volumes = [
        {key: volume[key] for key in ("name", "persistentVolumeClaim", "ephemeral") if key in volume}
        for volume in spec.get("volumes") or ()
        if "persistentVolumeClaim" in volume or "ephemeral" in volume
    ]
    containers = [
        {"name": item.get("name"), "resources": {"requests": requests}}
        for item in spec.get("containers") or ()
        if (requests := (item.get("resources") or {}).get("requests"))
    ]
    scheduler = {"schedulerName": spec["schedulerName"]} if "schedulerName" in spec else {}
    return {"volumes": volumes, "containers": containers, **scheduler}
