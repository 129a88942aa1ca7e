"""The distribution that a response's tokens were sampled from: its settings that shape log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

Distribution: TypeAlias = Mapping[str, Any]
"""Settings of a distribution by name: `temperature`, `top_p` and `top_k` always, others where they have an effect."""

LEAST_TEMPERATURE: Final = 0.01
"""Lowest temperature that responses are sampled at, beside 0: vLLM takes it for any that is lower."""

_USUAL: Final[Mapping[str, Any]] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
_FORMS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Of vLLM's parameters, which agents' calls may set; what they say stays with the call. `extra_args` are for processors
# of logits that `engineArgs` adds.
_CONSTRAINTS: Final = ("logit_bias", "bad_words", "allowed_token_ids", "extra_args")


def distribution_of(parameters: Any) -> dict[str, Any]:
    """The distribution of sampling parameters, ours or vLLM's; without what only ends a response.

    Constraints are named: a `structured_outputs` has the name of its form, and `constraints` the names of others.
    """
    temperature, top_p, top_k = float(parameters.temperature), float(parameters.top_p), int(parameters.top_k)
    if temperature == 0:
        top_p, top_k = 1.0, -1
    found: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k if top_k > 0 else -1}
    found |= {name: value for name, usual in _USUAL.items() if (value := getattr(parameters, name, usual)) != usual}
    if temperature == 0:
        # The most likely token is always taken.
        found.pop("min_p", None)
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
    return bool(value != {"top_p": 1.0, "top_k": -1, **_USUAL}.get(name))
