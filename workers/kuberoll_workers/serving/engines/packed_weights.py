"""Copies of weights that layers on CPUs multiply by."""

from __future__ import annotations

from typing import Any


def repack_output_layers(model: Any) -> None:
    """Have output layers multiply by the weights that they have now.

    On CPUs layers multiply by packed copies of their weights. vLLM 0.32 repacks only the weights that a checkpoint
    names, and a shared output layer is not named: it would silently keep the old embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
