"""Extension of vLLM's workers on CPUs; vLLM mixes this class into theirs by its name."""

from __future__ import annotations

from typing import Any


class CPUWorkerExtension:
    """Reloads weights, including those of an output layer that shares the embedding."""

    def kuberoll_reload_weights(self: Any, weights_path: str) -> None:
        """vLLM's `reload_weights`, with nothing left of the old weights.

        On CPUs layers multiply by packed copies of their weights. vLLM 0.32 repacks only the weights that a checkpoint
        names, and a shared output layer is not named: it would silently keep the old embedding.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
