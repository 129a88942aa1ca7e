"""The one table of sampling fields: bounds, defaults, and what engines and servers call them.

The manifest's model, rows' overrides, requests, what is stored of a distribution and the engines derive theirs from it.
A new field is a row here, a line in `Sampling` with its description, and one in `SamplingParameters` of the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kuberoll_api.model.types import MAX_SEED

_MAX_TOKENS = 1_000_000
_MAX_PENALTY = 2

Sent = Literal["always", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """A setting of how a response is sampled. vLLM and our own requests call it by its name here.

    Attributes:
        default: Its value where nobody sets it. It has no effect, but for `temperature` and `max_tokens`.
        ge, gt, le: Bounds of numbers. Larger values make an engine's arithmetic fail, and with it all requests in its
            batch.
        shapes: It shapes the distribution that tokens are sampled from. Others only end a response, or draw from it.
        core: It is part of every stored distribution, and of all APIs of agents' calls.
        at_zero: It has an effect at temperature 0, where the most likely token is always taken.
        openai: It is one of OpenAI's fields of completions. A server that knows only these is not asked for others:
            a request that sets one is refused.
        sglang: Its name in SGLang's own API; empty: the same.
        sent: `always`: other servers may have a default of their own; `given`: where it is set, as some servers refuse
            the field.
    """

    default: Any
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    shapes: bool = True
    core: bool = False
    at_zero: bool = True
    openai: bool = False
    sglang: str = ""
    sent: Sent = "given"

    @property
    def bounds(self) -> dict[str, float]:
        """Its bounds by name, of those that it has."""
        given = {"ge": self.ge, "gt": self.gt, "le": self.le}
        return {name: bound for name, bound in given.items() if bound is not None}


SAMPLING_FIELDS: Final[Mapping[str, SamplingField]] = {
    "temperature": SamplingField(default=1.0, ge=0, le=2, core=True, openai=True, sent="always"),
    "top_p": SamplingField(default=1.0, gt=0, le=1, core=True, at_zero=False, openai=True, sent="always"),
    # 0 means all, too.
    "top_k": SamplingField(default=-1, ge=-1, le=1_000_000, core=True, at_zero=False, sent="always"),
    "max_tokens": SamplingField(
        default=512, ge=1, le=_MAX_TOKENS, shapes=False, openai=True, sglang="max_new_tokens", sent="always"
    ),
    "stop": SamplingField(default=(), shapes=False, openai=True),
    "seed": SamplingField(default=None, ge=0, le=MAX_SEED, shapes=False, openai=True, sglang="sampling_seed"),
    "stop_token_ids": SamplingField(default=(), shapes=False, sent="always"),
    "min_p": SamplingField(default=0.0, ge=0, le=1, at_zero=False, sent="always"),
    "presence_penalty": SamplingField(default=0.0, ge=-_MAX_PENALTY, le=_MAX_PENALTY, openai=True),
    "frequency_penalty": SamplingField(default=0.0, ge=-_MAX_PENALTY, le=_MAX_PENALTY, openai=True),
    "repetition_penalty": SamplingField(default=1.0, gt=0, le=100, sent="always"),
    "min_tokens": SamplingField(default=0, ge=0, le=_MAX_TOKENS, sglang="min_new_tokens"),
    # What it is in other APIs depends on the form.
    "structured_outputs": SamplingField(default=None),
}
"""Settings of how a response is sampled, by name."""

CORE: Final = tuple(name for name, field in SAMPLING_FIELDS.items() if field.core)
"""Fields that are part of every stored distribution."""

AT_ZERO: Final[Mapping[str, Any]] = {
    name: field.default for name, field in SAMPLING_FIELDS.items() if not field.at_zero
}
"""Values of the fields that have no effect at temperature 0."""
