"""Request fields that vLLM and SGLang have beyond OpenAI's, under the same names."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.policy.interface import SamplingParameters


def extensions(sampling: SamplingParameters) -> dict[str, Any]:
    """Sampling fields that OpenAI's API lacks.

    All are sent, even at their defaults: a server may fill in missing ones from a model's generation_config.json or
    its own settings.
    """
    return {
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
