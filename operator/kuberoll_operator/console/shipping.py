"""The files beside a manifest as an immutable ConfigMap, named by its content. Pure: equal files give equal objects."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from kuberoll_api.model.rolloutjob import API_VERSION, KIND, RolloutJob
from kuberoll_api.model.workers import FileItem, FilesConfigMap, WorkerFiles
from kuberoll_operator import names
from kuberoll_operator.model import Object

MANAGER: Final = "kuberoll"
"""Field manager of what `kuberoll apply` writes, and `app.kubernetes.io/managed-by` of the ConfigMap."""

_MAX_KEY: Final = 253
_PROGRAM: Final = 0o755


def files_config_map(job: str, namespace: str, files: Mapping[str, bytes]) -> Object:
    """ConfigMap <job>-files-<digest>.

    It is immutable, and other content has another name: pods of one run never read different files.

    Args:
        job: Name of the job.
        files: Contents by path relative to the manifest's directory.
    """
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for item in file_items(files):
        content = files[item.path]
        try:
            text[item.key] = content.decode()
        except UnicodeDecodeError:
            binary[item.key] = base64.b64encode(content).decode()
    labels = {**names.labels(job, names.FILES), "app.kubernetes.io/managed-by": MANAGER}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.files(job, _digest(files)), "namespace": namespace, "labels": labels},
        "immutable": True,
        **({"data": text} if text else {}),
        **({"binaryData": binary} if binary else {}),
    }


def file_items(paths: Mapping[str, Any]) -> list[FileItem]:
    """Keys of files in a ConfigMap, sorted by path: the path, with a dot for each slash."""
    items: list[FileItem] = []
    taken: set[str] = set()
    for path in sorted(paths):
        stem = re.sub(r"[^-._A-Za-z0-9]", "_", path.replace("/", "."))[-_MAX_KEY + 4 :]
        key, number = stem, 1
        # The API server refuses keys that begin with two dots.
        while key in taken or key.startswith(".."):
            number += 1
            key = f"{number}-{stem}"
        taken.add(key)
        items.append(FileItem(key=key, path=path))
    return items


def with_files(job: RolloutJob, files: Mapping[str, bytes], programs: Collection[str] = ()) -> RolloutJob:
    """The job with `workers.files` that names the ConfigMap of these files.

    Args:
        programs: Paths of those that are executable, and stay so.
    """
    items = [
        item.model_copy(update={"mode": _PROGRAM}) if item.path in programs else item for item in file_items(files)
    ]
    config_map = FilesConfigMap(name=names.files(job.metadata.name, _digest(files)), items=items)
    workers = job.spec.workers.model_copy(update={"files": WorkerFiles.model_validate({"configMap": config_map})})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"workers": workers})})


def applied_object(job: RolloutJob, namespace: str) -> Object:
    """The object to apply: the fields that the manifest sets, and no defaults, so that others may own those."""
    given: Object = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    return {**given, "metadata": {**given["metadata"], "namespace": namespace}}


def owned_by(config_map: Object, job: Object) -> Object:
    """The ConfigMap owned by a live job, so that it is deleted with it."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    return {**config_map, "metadata": {**config_map["metadata"], "ownerReferences": [owner]}}


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted(files):
        digest.update(f"{path} {len(files[path])}\n".encode() + files[path])
    return digest.hexdigest()
