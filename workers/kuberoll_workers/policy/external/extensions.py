"""Request fields that vLLM and SGLang have beyond OpenAI's, under the same names."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.policy.interface import SamplingParameters


def penalties(sampling: SamplingParameters) -> dict[str, float]:
    """Those of OpenAI's fields that are not sent at their defaults, because some servers know only the others."""
    given = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    return {name: value for name, value in given.items() if value}


def extensions(sampling: SamplingParameters) -> dict[str, Any]:
    """Sampling fields that OpenAI's API lacks.

    All are sent, even at their defaults: a server may fill in missing ones from a model's generation_config.json or
    its own settings.
    """
    return {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
