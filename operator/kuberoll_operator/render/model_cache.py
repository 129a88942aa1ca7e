"""The model cache in pods of engines: what fills it, and where they load from.

Whoever writes to the cache decides what engines of other jobs load. Only one container can: it has the operator's
image, a fixed command, and of the job's variables those of `contract.MODEL_VARIABLES`. It is added after the job's own
pod template, which therefore cannot change it, and engines can only read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.model.generation import ModelFiles
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.pods import fs_group, plain

_CACHE: Final = "model-cache"
_PATHS: Final = "cached-models"
"""Names of volumes."""

_PATHS_DIRECTORY: Final = "/etc/kuberoll-cached-models"
_PATHS_FILE: Final = f"{_PATHS_DIRECTORY}/models.json"
_SHARED: Final = "_shared"
"""Directory for jobs of all namespaces; no namespace has this name."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")
_BUCKETS: Final = ("s3://", "gs://")
_AUTO_FORMATS: Final = frozenset({"auto", "hf", "safetensors"})
"""`load_format` for which vLLM chooses as the cache does."""

# Requests and limits are equal, as in a pod of QoS class Guaranteed: a node's CPU manager gives no other whole CPUs.
_RESOURCES: Final[Mapping[str, str]] = {"cpu": "1", "memory": "4Gi"}


def with_model_cache(
    context: RenderContext,
    template: Object,
    files: ModelFiles | None,
    engine_args: Mapping[str, Any],
    *,
    container: str,
) -> Object:
    """A template of an engine's pods, with the model cache if the operator has one and the model can be in it.

    Args:
        template: With the job's own template in it.
        files: The engine's model; None: it loads none.
        container: Name of the engine's container.
    """
    settings = context.settings
    if files is None or not files.cache:
        return template
    if settings.model_cache_host_path is not None:
        source: Object = {"hostPath": {"path": settings.model_cache_host_path, "type": "DirectoryOrCreate"}}
        below = _SHARED if settings.model_cache_across_namespaces else context.namespace
    elif settings.model_cache_claim is not None:
        source, below = {"persistentVolumeClaim": {"claimName": settings.model_cache_claim}}, ""
    else:
        return template
    spec = template["spec"]
    wanted = _arguments(files, engine_args)
    engine = next((item for item in spec["containers"] if item["name"] == container), None)
    # Where a job's own processes see those of other containers, they could write as these can.
    if not wanted or engine is None or spec.get("shareProcessNamespace") or spec.get("hostPID"):
        return template
    # A directory of a node has no group that a kubelet could set.
    claim = settings.fs_group is not None and "persistentVolumeClaim" in source
    security = {**spec["securityContext"], **(fs_group(settings.fs_group or 0) if claim else {})}
    names = {_CACHE, _PATHS}
    return {
        **template,
        "spec": {
            **spec,
            "securityContext": security,
            "initContainers": [
                _filling(context, engine, wanted, below),
                *(
                    _without_mounts(item, names)
                    for item in spec.get("initContainers", ())
                    if item["name"] != contract.MODEL_CACHE_CONTAINER
                ),
            ],
            "containers": [
                _loading(item, below) if item is engine else _without_mounts(item, names) for item in spec["containers"]
            ],
            "volumes": [
                *(item for item in spec.get("volumes", ()) if item["name"] not in names),
                {"name": _CACHE, **source},
                {"name": _PATHS, "emptyDir": {}},
            ],
        },
    }


def can_be_cached(source: str | None) -> bool:
    """True if a model is elsewhere: at the hub, or in an object store; a directory is read where it is mounted."""
    return source is not None and (source.startswith(_BUCKETS) or _HUB_ID.fullmatch(source) is not None)


def _arguments(files: ModelFiles, engine_args: Mapping[str, Any]) -> list[str]:
    """What is fetched; empty: nothing."""
    found = []
    if can_be_cached(files.source):
        found.append(f"--model={files.source}")
        if files.revision is not None:
            found.append(f"--revision={files.revision}")
        if engine_args.get("load_format", "auto") not in _AUTO_FORMATS:
            found.append("--every")
    if files.tokenizer is not None and files.tokenizer != files.source and can_be_cached(files.tokenizer):
        found.append(f"--tokenizer={files.tokenizer}")
    # Kubernetes would put in variables.
    return [text.replace("$", "$$") for text in found]


def _filling(context: RenderContext, engine: Mapping[str, Any], wanted: list[str], below: str) -> Object:
    """The init container that writes to the cache."""
    settings = context.settings
    directory = f"{contract.MODEL_CACHE_DIRECTORY}/{below}".rstrip("/")
    places = [f"--directory={directory}", f"--shown-at={contract.MODEL_CACHE_DIRECTORY}"]
    arguments = [*wanted, *places, f"--result={_PATHS_FILE}", f"--job={context.name}"]
    if settings.model_cache_size is not None:
        arguments.append(f"--size={settings.model_cache_size}")
    if settings.model_cache_digests:
        arguments.append("--digests")
    security: Object = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    # The template of a job may have another user: what it can write to is not decided by that.
    user, group = settings.run_as_user, settings.run_as_group
    security |= {key: value for key, value in (("runAsUser", user), ("runAsGroup", group)) if value is not None}
    made: Object = {
        "name": contract.MODEL_CACHE_CONTAINER,
        "image": settings.generation_image,
        "command": ["python", "-m", "kuberoll_workers.pods.models", *arguments, "--node=$(KUBEROLL_NODE)"],
        # Python searches modules in the directory where it starts.
        "workingDir": "/",
        "env": [
            *plain([item for item in engine.get("env", ()) if item["name"] in contract.MODEL_VARIABLES]),
            {"name": "KUBEROLL_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "HOME", "value": _PATHS_DIRECTORY},
            {"name": "HF_HOME", "value": f"{_PATHS_DIRECTORY}/huggingface"},
            {"name": "TMPDIR", "value": _PATHS_DIRECTORY},
        ],
        "resources": {"limits": dict(_RESOURCES), "requests": dict(_RESOURCES)},
        "securityContext": security,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": _CACHE, "mountPath": contract.MODEL_CACHE_DIRECTORY},
            {"name": _PATHS, "mountPath": _PATHS_DIRECTORY},
        ],
    }
    if sources := engine.get("envFrom"):
        made["envFrom"] = [
            {**item, "prefix": f"{contract.GIVEN_PREFIX}{item.get('prefix', '')}"} for item in plain(sources)
        ]
    if settings.image_pull_policy:
        made["imagePullPolicy"] = settings.image_pull_policy
    return made


def _loading(engine: Mapping[str, Any], below: str) -> Object:
    """The engine's container, which reads what there is of its namespace."""
    variable = {"name": contract.CACHED_MODELS_VARIABLE, "value": _PATHS_FILE}
    within = {"subPath": below} if below else {}
    cleaned = _without_mounts(engine, {_CACHE, _PATHS})
    return {
        **cleaned,
        "env": [*(item for item in cleaned.get("env", ()) if item["name"] != variable["name"]), variable],
        "volumeMounts": [
            *cleaned.get("volumeMounts", ()),
            {"name": _CACHE, "mountPath": contract.MODEL_CACHE_DIRECTORY, "readOnly": True, **within},
            {"name": _PATHS, "mountPath": _PATHS_DIRECTORY, "readOnly": True},
        ],
    }


def _without_mounts(container: Mapping[str, Any], names: set[str]) -> Object:
    """A container that mounts none of these volumes."""
    mounts = container.get("volumeMounts")
    if not mounts:
        return dict(container)
    return {**container, "volumeMounts": [item for item in mounts if item["name"] not in names]}
