"""Merge of a user's pod template over the rendered one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

# Lists whose items have a key, with the key's field, as in Kubernetes' strategic merge patch.
_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}

# Items of these lists have one of several kinds (a value or a source): two kinds cannot be mixed.
_REPLACED: Final = frozenset({"volumes", "env"})

# A probe has one handler: the API server rejects one with two.
_PROBES: Final = frozenset({"livenessProbe", "readinessProbe", "startupProbe"})
_HANDLERS: Final = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})


def merge(base: Any, over: Any) -> Any:
    """`over` merged on top of `base`; neither is changed.

    Mappings are merged key by key, and a null removes the key. Containers, volumes, environment variables and other
    lists whose items have names are merged by them: new items come last; volumes and variables of the same name are
    replaced. A handler of a probe (httpGet, exec, ...) replaces the one before it. Everything else is replaced.
    """
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif key in _KEYS and isinstance(value, list) and isinstance(merged.get(key), list):
            merged[key] = merge_named(merged[key], value, _KEYS[key], replace=key in _REPLACED)
        else:
            there = merged.get(key)
            if key in _PROBES and isinstance(there, Mapping) and isinstance(value, Mapping) and _HANDLERS & set(value):
                merged[key] = {name: item for name, item in there.items() if name not in _HANDLERS}
            merged[key] = merge(merged[key], value) if key in merged else _without_nulls(value)
    return merged


def merge_named(base: Sequence[Any], over: Sequence[Any], name: str, *, replace: bool) -> list[Any]:
    """Two lists of mappings, merged by one of their fields; items without that field come last, unchanged."""
    merged = list(base)
    place = {item[name]: index for index, item in enumerate(base) if _named(item, name)}
    for item in over:
        if not _named(item, name) or item[name] not in place:
            if _named(item, name):
                place[item[name]] = len(merged)
            merged.append(_without_nulls(item))
        else:
            index = place[item[name]]
            merged[index] = _without_nulls(item) if replace else merge(merged[index], item)
    return merged


def rename_container(template: Mapping[str, Any], old: str, new: str) -> Mapping[str, Any]:
    """The template with one container renamed, for use in another kind of pod."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(containers, list):
        return template
    renamed = [
        {**item, "name": new} if isinstance(item, Mapping) and item.get("name") == old else item for item in containers
    ]
    return {**template, "spec": {**template["spec"], "containers": renamed}}


def _named(item: Any, name: str) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get(name), str | int)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
