"""The fields that most jobs set: they come first in the CRD and in its reference."""

from __future__ import annotations

from typing import Any, Final

COMMON: Final = (
    "spec.generation.model.source",
    "spec.generation.engineArgs",
    "spec.generation.sampling.maxTokens",
    "spec.generation.sampling.temperature",
    "spec.generation.replicas",
    "spec.generation.resources.limits",
    "spec.environments[].name",
    "spec.environments[].type",
    "spec.environments[].entrypoint",
    "spec.environments[].config",
    "spec.dataset.source.uri",
    "spec.dataset.source.huggingface.name",
    "spec.dataset.source.rows",
    "spec.dataset.source.generator.count",
    "spec.dataset.repeats",
    "spec.rollout.maxTurns",
    "spec.rollout.concurrency",
    "spec.workers.replicas",
    "spec.workers.resources.requests",
    "spec.output.uri",
)
"""Paths of the twenty fields, in the order of a manifest."""


def ordered(path: str, properties: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object, those first that most jobs set or that hold such fields.

    Args:
        path: Path of the object.
    """
    places = [common.removeprefix(f"{path}.") for common in COMMON if common.startswith(f"{path}.")]
    first = dict.fromkeys(place.split(".")[0].removesuffix("[]") for place in places)
    return {name: properties[name] for name in (*first, *(name for name in properties if name not in first))}
