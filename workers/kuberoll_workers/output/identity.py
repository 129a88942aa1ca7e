"""What a run is: the settings that its trajectories depend on, by their path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from pydantic.alias_generators import to_camel

from kuberoll_api.model import traits
from kuberoll_api.model.generation import Sampling, SimulatedEngine
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.sampling_fields import AT_ZERO
from kuberoll_api.model.traits import Traits

_SAMPLING: Final = "generation.sampling."
_SIMULATED: Final = "generation.simulated"
_MODEL: Final = "generation.model."


def identity_of(job: RolloutJob) -> dict[str, Any]:
    """Settings that a job's trajectories depend on, flattened to `path: value`, as they are written."""
    spec = traits.select(job.spec, lambda field: field.identity is True, Traits())
    return dict(sorted(_flatten({"metadata": {"name": job.metadata.name}, **spec})))


def settled(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with its settings as they act: those that have the same effect are equal, however they are written.

    Also of an older version, which stored null for a setting that was not given.
    """
    acts = dict(identity)
    for name, default in _defaults():
        if name in acts and acts[name] is None:
            acts[name] = default
    if acts.get(f"{_SAMPLING}topK") == 0:
        acts[f"{_SAMPLING}topK"] = -1
    if acts.get(f"{_SAMPLING}greedy") or acts.get(f"{_SAMPLING}temperature") == 0:
        acts |= {f"{_SAMPLING}{name}": value for name, value in _GREEDY.items()}
    if acts.get("generation.engine") == "Simulated" and acts.get(_SIMULATED, 0) is None:
        del acts[_SIMULATED]
        acts |= _flatten(SimulatedEngine().model_dump(mode="json", by_alias=True), _SIMULATED)
    if acts.get(f"{_MODEL}tokenizer") == acts.get(f"{_MODEL}source"):
        acts[f"{_MODEL}tokenizer"] = None
    for name, value in acts.items():
        if value is None and name.startswith("environments[") and name.endswith("].repeats"):
            acts[name] = acts.get("dataset.repeats")
    return acts


# Of what `greedy`, and a temperature of 0, take the place.
_GREEDY: Final = {"temperature": 0.0, "greedy": False, **{to_camel(name): value for name, value in AT_ZERO.items()}}


@cache
def _defaults() -> list[tuple[str, Any]]:
    return list(_flatten(Sampling().model_dump(mode="json", by_alias=True), _SAMPLING.removesuffix(".")))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{path}[{number}]")
    else:
        yield path, value
