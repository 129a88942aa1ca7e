"""The distribution that a response's tokens were sampled from: its settings that shape log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

from kuberoll_api.model.sampling_fields import AT_ZERO, CORE, SAMPLING_FIELDS

Distribution: TypeAlias = Mapping[str, Any]
"""Settings of a distribution by name: `temperature`, `top_p` and `top_k` always, others where they have an effect."""

LEAST_TEMPERATURE: Final = 0.01
"""Lowest temperature that responses are sampled at, beside 0: vLLM takes it for any that is lower."""

_KINDS: Final = tuple(type(SAMPLING_FIELDS[name].default) for name in CORE)
_core_of = attrgetter(*CORE)
# Those whose values are stored where they have an effect; a form has only its name stored.
_USUAL: Final[Mapping[str, Any]] = {
    name: field.default
    for name, field in SAMPLING_FIELDS.items()
    if field.shapes and not field.core and field.default is not None
}
_WHOLE: Final[Mapping[str, Any]] = {
    name: SAMPLING_FIELDS[name].default for name in (*CORE, *_USUAL) if name != "temperature"
}
_FORMS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Of vLLM's parameters, which agents' calls may set; what they say stays with the call. `extra_args` are for processors
# of logits that `engineArgs` adds.
_CONSTRAINTS: Final = ("logit_bias", "bad_words", "allowed_token_ids", "extra_args")


def distribution_of(parameters: Any) -> dict[str, Any]:
    """The distribution of sampling parameters, ours or vLLM's; without what only ends a response.

    Constraints are named: a `structured_outputs` has the name of its form, and `constraints` the names of others.
    """
    core = [kind(value) for kind, value in zip(_KINDS, _core_of(parameters), strict=True)]
    found: dict[str, Any] = dict(zip(CORE, core, strict=True))
    if found["top_k"] <= 0:
        found["top_k"] = -1
    found |= {name: value for name, usual in _USUAL.items() if (value := getattr(parameters, name, usual)) != usual}
    if found["temperature"] == 0:
        found = {name: AT_ZERO.get(name, value) for name, value in found.items() if name in CORE or name not in AT_ZERO}
    if (form := getattr(parameters, "structured_outputs", None)) is not None:
        found["structured_outputs"] = next((name for name in _FORMS if getattr(form, name, None) is not None), "form")
    constraints = [name for name in _CONSTRAINTS if getattr(parameters, name, None)]
    if getattr(parameters, "thinking_token_budget", None) is not None:
        # Also of 0: tokens that end the thoughts are forced.
        constraints.append("thinking_token_budget")
    if constraints:
        found["constraints"] = constraints
    return found


def listed(sampled: Sequence[Distribution | None], usual: Distribution | None) -> list[dict[str, Any] | None] | None:
    """The distributions of a path's responses as they are stored: None for one that is the run's, or where all are.

    Args:
        sampled: Of each response; None: unknown.
        usual: The run's; None: unknown, and then none is the run's.
    """
    stored = [None if found is None or found == usual else dict(found) for found in sampled]
    return stored if any(found is not None for found in stored) else None


def resolved(
    stored: Sequence[Distribution | None] | None, responses: int, usual: Distribution | None
) -> list[Distribution | None]:
    """The distribution of each of a path's responses; None where it is unknown. The inverse of `listed`."""
    if stored is None:
        return [usual] * responses
    return [usual if found is None else found for found in stored]


def in_words(found: Distribution | None) -> str:
    """A distribution for people: its temperature, and what else makes it another one than that of a temperature."""
    if found is None:
        return "sampling that is unknown"
    named = [f"temperature {found['temperature']:g}"]
    named += [f"{name} {value}" for name, value in found.items() if name != "temperature" and _tells(name, value)]
    return ", ".join(named)


def unlike(found: Distribution | None, *, temperature: float) -> Iterator[str]:
    """What keeps log-probabilities of a distribution from being those of a softmax at a temperature, by field.

    A trainer computes the latter: of all tokens, from logits that it divides by the temperature.
    """
    if found is None:
        yield "sampling: unknown, because the run is of a version that did not store it, or its manifest was lost"
        return
    if found["temperature"] != temperature:
        yield f"temperature: {found['temperature']:g}, and the trainer's is {temperature:g}"
    for name, value in found.items():
        if name != "temperature" and _tells(name, value):
            yield f"{name}: {value}, and the trainer's log-probabilities are of the whole distribution"


def _tells(name: str, value: Any) -> bool:
    """True if a setting beside the temperature has an effect."""
    return bool(value != _WHOLE.get(name))
