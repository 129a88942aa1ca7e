"""Sampling fields of requests to servers of others, by `SAMPLING_FIELDS`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.alias_generators import to_camel

from kuberoll_api.model.sampling_fields import SAMPLING_FIELDS, SamplingField
from kuberoll_workers.policy.interface import PolicyRefused, SamplingParameters

_USUAL = SamplingParameters(max_tokens=0).within(0)


def openai_fields(sampling: SamplingParameters, room: int, *, extended: bool) -> dict[str, Any]:
    """Fields of OpenAI's completions.

    Args:
        room: Maximum number of tokens to generate.
        extended: Also those that vLLM and SGLang have beyond OpenAI's, under the same names. They are sent even at
            their defaults: a server may fill in missing ones from a model's generation_config.json.

    Raises:
        PolicyRefused: The request needs such a field, and the server has none.
    """
    body: dict[str, Any] = {}
    for name, field, value, given in _settings(sampling, room):
        if not (extended or field.openai):
            if given:
                raise PolicyRefused(
                    f"spec.generation.sampling.{to_camel(name)}: the server accepts only OpenAI's own fields; remove it"
                )
        elif given or field.sent == "always":
            body[name] = value
    return body


def sglang_fields(sampling: SamplingParameters, room: int) -> dict[str, Any]:
    """Fields of SGLang's own API, but for the form of a response.

    Args:
        room: Maximum number of tokens to generate.
    """
    return {
        field.sglang or name: value
        for name, field, value, given in _settings(sampling, room)
        if name != "structured_outputs" and (given or field.sent == "always")
    }


def _settings(sampling: SamplingParameters, room: int) -> Iterator[tuple[str, SamplingField, Any, bool]]:
    """Each field by name, with its value, and whether it has an effect."""
    values = sampling.within(room)
    for name, field in SAMPLING_FIELDS.items():
        yield name, field, values[name], values[name] != _USUAL[name]
