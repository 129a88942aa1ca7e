"""What a job's own pod templates must be like, beyond what a schema says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kuberoll_api.model.contradictions import contradiction, reject_duplicates

_SPEC: Final = ("podTemplate", "spec")
# Lists of a pod's spec and of its containers that are merged by a key of their items: of two with the same the last
# would count.
_KEYED: Final = {"containers": "name", "initContainers": "name", "volumes": "name", "imagePullSecrets": "name"}
_KEYED_IN_CONTAINERS: Final = {"env": "name", "volumeMounts": "mountPath"}
_CONTAINERS: Final = ("containers", "initContainers")
_OF_THE_NODE: Final = ("hostIPC", "hostNetwork", "hostPID")
_ACCOUNTS: Final = ("serviceAccount", "serviceAccountName")
# Beside all that names a Secret: kinds of projected volumes.
_CREDENTIALS: Final = ("podCertificate", "serviceAccountToken")


def check_pod_spec(spec: Mapping[str, Any], main: str) -> None:
    """Check what merging by names needs, which neither a schema nor an API server that gets the result can say.

    Args:
        spec: The pod's spec in `podTemplate`.
        main: Name of the main container.

    Raises:
        PydanticCustomError: Two items have the same key, or a container has neither an image nor a known name.
    """
    _reject_twins(spec, _KEYED, *_SPEC)
    for kind in _CONTAINERS:
        for index, item in enumerate(items_of(spec, kind)):
            _reject_twins(item, _KEYED_IN_CONTAINERS, *_SPEC, kind, index)
            if kind == "containers" and "image" not in item and item.get("name") != main:
                raise contradiction(
                    f'found "{item.get("name")}"; the main container of these pods is {main}, and another one needs an '
                    "image",
                    *(*_SPEC, kind, index, "name"),
                )


def check_untrusted(spec: Mapping[str, Any]) -> None:
    """Check that pods in which anything may run have neither secrets nor anything of their node.

    Args:
        spec: The pod's spec in `podTemplate`.

    Raises:
        PydanticCustomError: They would have.
    """
    for path, problem in _given_away(spec):
        raise contradiction(f"{problem}; the policy's commands run in these pods: remove it", *_SPEC, *path)


def _given_away(spec: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for name in _ACCOUNTS:
        if name in spec:
            yield (name,), "gives them the rights of a service account"
    # A null would remove the false that is there.
    if spec.get("automountServiceAccountToken", False) is not False:
        yield ("automountServiceAccountToken",), "gives them the token of a service account"
    for name in _OF_THE_NODE:
        if spec.get(name):
            yield (name,), "gives them a part of their node"
    for index, volume in enumerate(items_of(spec, "volumes")):
        if "hostPath" in volume:
            yield ("volumes", index, "hostPath"), "gives them files of their node"
        for path in _secrets_in(volume):
            yield ("volumes", index, *path), "gives them a secret"
    for kind in _CONTAINERS:
        for index, container in enumerate(items_of(spec, kind)):
            for path, problem in _given_to(container):
                yield (kind, index, *path), problem


def _given_to(container: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if container.get("envFrom"):
        yield ("envFrom",), "may give them secrets"
    for index, variable in enumerate(items_of(container, "env")):
        if "valueFrom" in variable:
            yield ("env", index, "valueFrom"), "may give them a secret"
    if mapping_of(container.get("securityContext")).get("privileged"):
        yield ("securityContext", "privileged"), "gives them their whole node"


def _secrets_in(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Paths of what names a Secret or a credential in a volume, whatever its kind."""
    found = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in found:
        if isinstance(key, str) and ("secret" in key.lower() or key in _CREDENTIALS):
            yield (key,)
        else:
            yield from ((key, *path) for path in _secrets_in(inner))


def items_of(given: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Items of a list of mappings; what has another form is empty."""
    value = given.get(name)
    return [mapping_of(item) for item in value] if isinstance(value, list) else []


def mapping_of(value: Any) -> Mapping[str, Any]:
    """A mapping; what has another form is an empty one."""
    return value if isinstance(value, Mapping) else {}


def _reject_twins(given: Mapping[str, Any], keys: Mapping[str, str], *path: str | int) -> None:
    for name, key in keys.items():
        reject_duplicates([item.get(key) for item in items_of(given, name)], name, key, *path)
