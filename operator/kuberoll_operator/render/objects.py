"""Digests of rendered objects, and preservation of the immutable part of running ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from kuberoll_operator import names
from kuberoll_operator.model import Object, Ref

DIGEST_CHARACTERS = 16


def digest(value: Any) -> str:
    """Digest of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def seal(rendered: Object) -> Object:
    """The object with its digest."""
    bare = annotated(rendered, {names.DIGEST: None})
    return annotated(bare, {names.DIGEST: digest(bare)})


def ref(rendered: Object) -> Ref:
    """Reference to an object."""
    return Ref(rendered["apiVersion"], rendered["kind"], rendered["metadata"]["name"])


def shaped(rendered: Object, mutable: Collection[str]) -> Object:
    """The object with a digest of its shape: its spec without the fields that may change while it runs."""
    return annotated(rendered, {names.SHAPE_DIGEST: digest(_shape(rendered, mutable))})


def keep_shape(rendered: Object, live: Object | None, mutable: Collection[str]) -> Object:
    """A rendered object with the shape of the live one: only the mutable fields are as rendered.

    Running pods are not replaced because the operator has new default images, and a Job's template cannot change.
    """
    found = None if live is None else annotation(live, names.SHAPE_DIGEST)
    if live is None or found is None or found == annotation(rendered, names.SHAPE_DIGEST):
        return rendered
    there = live.get("spec", {})
    spec = {
        key: value if key in mutable else there[key]
        for key, value in rendered["spec"].items()
        if key in mutable or key in there
    }
    if "template" in spec:
        spec["template"] = _without_generated_labels(spec["template"])
    return annotated({**rendered, "spec": spec}, {names.SHAPE_DIGEST: found})


def has_other_shape(rendered: Object, live: Object) -> bool:
    """True if a live object was created with a shape that the job no longer has."""
    return annotation(live, names.SHAPE_DIGEST) != annotation(rendered, names.SHAPE_DIGEST)


def annotation(item: Mapping[str, Any], name: str) -> str | None:
    """Value of an annotation; None if the object does not have it."""
    value = (item.get("metadata", {}).get("annotations") or {}).get(name)
    return None if value is None else str(value)


def _without_generated_labels(template: Mapping[str, Any]) -> dict[str, Any]:
    """A live Job's template without the labels that the API server added.

    A field manager that applies them owns them; its next apply without them would remove them, which is rejected.
    """
    metadata = template.get("metadata") or {}
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if not _is_generated(key)}
    return {**template, "metadata": {**metadata, "labels": labels}}


def _is_generated(label: str) -> bool:
    return label in {"controller-uid", "job-name"} or label.startswith("batch.kubernetes.io/")


def _shape(rendered: Object, mutable: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in rendered["spec"].items() if key not in mutable}


def annotated(item: Object, annotations: Mapping[str, str | None]) -> Object:
    """The object with additional annotations; None removes one."""
    there = {**(item["metadata"].get("annotations") or {}), **annotations}
    kept = {key: value for key, value in sorted(there.items()) if value is not None}
    metadata = {key: value for key, value in item["metadata"].items() if key != "annotations"}
    return {**item, "metadata": {**metadata, **({"annotations": kept} if kept else {})}}
