"""Fields of a request that vLLM and SGLang have by the same names, beyond OpenAI's own."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.policy.interface import SamplingParameters


def extensions(sampling: SamplingParameters) -> dict[str, Any]:
    """Sampling that OpenAI's API has no fields for.

    All of it is there, at its default too: what is left out may be filled in from a model's generation_config.json or
    a server's preferred parameters.
    """
    return {
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
