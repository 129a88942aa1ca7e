"""Copies of weights that layers on CPUs multiply by."""

from __future__ import annotations

from typing import Any


def repack(model: Any) -> None:
    """Have the layers of a model whose weights were loaded again multiply by those that they have now.

    On CPUs layers multiply by packed copies of their weights. vLLM 0.32 repacks only what a checkpoint names, and a
    shared output layer is not named: it would silently keep the old embedding. It packs the weights of experts only
    when a model is loaded first: later ones would silently be read as if they were packed.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)
