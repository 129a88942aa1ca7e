"""Fields that a RolloutJob no longer has, and what takes their place.

A manifest with one is refused by its name. A job in a cluster that has one still, or had one when it was made, goes on:
the operator leaves it out and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kuberoll_api.paths import Path, format_path

_PODS: Final = ("spec.generation", "spec.workers", "spec.services[]", "spec.environments[].remote")
_CONTAINERS: Final = ("generation", "worker", "service", "environment")

_OF_A_POD: Final = {
    "imagePullSecrets": "spec.imagePullSecrets",
    "podAnnotations": "metadata.annotations",
    "podLabels": "metadata.labels",
    "priorityClassName": "spec.priorityClassName",
    "runtimeClassName": "spec.runtimeClassName",
    "serviceAccountName": "spec.serviceAccountName",
    "tolerations": "spec.tolerations",
    "volumes": "spec.volumes",
}
_OF_A_CONTAINER: Final = ("envFrom", "volumeMounts")


def _of_pods() -> Iterator[tuple[str, str]]:
    for place, container in zip(_PODS, _CONTAINERS, strict=True):
        for name, path in _OF_A_POD.items():
            yield f"{place}.{name}", f"set {{parent}}.podTemplate.{path}"
        for name in _OF_A_CONTAINER:
            inside = f"{name} of the container named {container}"
            yield f"{place}.{name}", f"set {inside} in {{parent}}.podTemplate.spec.containers"


REMOVED: Final[Mapping[str, str]] = {
    **dict(_of_pods()),
    "spec.dataset.seedPerRepeat": "every trajectory has a seed of its own; another spec.generation.sampling.seed gives "
    "other samples",
    "spec.environments[].agent.timeouts.closeSeconds": "close has 30 seconds",
    "spec.environments[].agent.timeouts.scoreSeconds": "set {parent}.runSeconds, which is the limit of score, too",
    "spec.environments[].agent.timeouts.setupSeconds": "set {parent}.runSeconds, which is the limit of setup, too",
    "spec.environments[].spareProcesses": "there are up to 3; set {parent}.processes for more at all times",
    "spec.output.parts.maxBytes": "a part of 32 MiB is written at once; set {parent}.maxSeconds for smaller ones",
    "spec.output.tracking.mlflow.runName": "the run has the job's name, metadata.name",
    "spec.rollout.retries.maxBackoffSeconds": "it is 30; set {parent}.backoffSeconds and the numbers of attempts",
}
"""What to do instead, by the path of the field; `{parent}` is the path of what the field was in."""


def replacement(path: Path) -> str | None:
    """What to do instead of setting a field; None if the field was not removed."""
    said = REMOVED.get(_pattern(path))
    return None if said is None else said.format(parent=format_path(path[:-1]))


def without_removed(job: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """A job as JSON without its removed fields, and their paths."""
    found: list[Path] = []
    spec = job.get("spec")
    if not isinstance(spec, Mapping):
        return dict(job), found
    kept = _without(spec, ("spec",), found)
    return ({**job, "spec": kept} if found else dict(job)), found


def sentence(path: Path) -> str:
    """Words about a removed field of a job: its name, and what to do instead."""
    return f"{format_path(path)} was removed: {replacement(path)}"


def _without(value: Any, path: Path, found: list[Path]) -> Any:
    if isinstance(value, list):
        return [_without(item, (*path, index), found) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, item in value.items():
        inner = (*path, name)
        if (pattern := _pattern(inner)) in REMOVED:
            found.append(inner)
        else:
            # What no removed field is in is left as it is: rows and configurations may be large.
            kept[name] = _without(item, inner, found) if pattern in _ABOVE or f"{pattern}[]" in _ABOVE else item
    return kept


def _pattern(path: Path) -> str:
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


_ABOVE: Final = {path.rsplit(".", count)[0] for path in REMOVED for count in range(1, path.count(".") + 1)}
