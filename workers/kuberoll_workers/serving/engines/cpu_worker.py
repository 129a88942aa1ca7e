"""Extension of vLLM's workers on CPUs; vLLM mixes this class into theirs by its name."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.serving.engines.packed_weights import repack_output_layers
from kuberoll_workers.serving.engines.transfer_worker import TransferWorkerExtension


class CPUWorkerExtension(TransferWorkerExtension):
    """Reloads weights, including those of an output layer that shares the embedding."""

    def kuberoll_reload_weights(self: Any, weights_path: str) -> None:
        """vLLM's `reload_weights`, with nothing left of the old weights."""
        self.reload_weights(weights_path=weights_path)
        repack_output_layers(self.model_runner.get_model())
