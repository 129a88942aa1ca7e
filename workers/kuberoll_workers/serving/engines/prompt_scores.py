"""Whether vLLM scores the tokens of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def scores_prompts(settings: VllmConfig) -> bool:
    """False if the log-probabilities of a prompt's tokens end vLLM's process.

    That is so on CPUs with adapters: their kernel for logits expects as many rows as there are requests (0.32).
    """
    return settings.lora_config is None or settings.device_config.device_type != "cpu"
