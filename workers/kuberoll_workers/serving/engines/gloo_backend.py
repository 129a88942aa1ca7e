"""The backend `gloo` of vLLM's weight transfer: weights that come from a trainer over TCP. vLLM's own need GPUs."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.data.weights.offers import Tensors
from kuberoll_workers.serving.engines.gloo_receiver import GlooInitInfo, GlooReceiver
from kuberoll_workers.serving.engines.packed_weights import repack

BACKEND = "gloo"


def register() -> None:
    """Register the backend with vLLM, unless it is there."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types
        """Receives weights in the background, and loads them when all are there."""

        init_info_cls = GlooInitInfo
        update_info_cls = Tensors
        supports_draft_weight_update = False
        # A returned `update_weights` means that they are on their way.
        defers_processing = True

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            super().__init__(config, vllm_config, device, model)
            parallel = vllm_config.parallel_config
            # As vLLM numbers workers for NCCL.
            self._receiver = GlooReceiver(parallel.data_parallel_index * parallel.world_size + parallel.rank)

        def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
            self._receiver.join(init_info)

        def start_weight_update(self) -> None:
            return None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Tensors) -> None:
            self._receiver.update(update_info)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload.inplace import reload_weights

            reload_weights(
                self.vllm_config,
                self.model,
                weights_iterator=iter(self._receiver.take()),
                weights_path=None,
                is_checkpoint_format=True,
            )
            if self.device.type == "cpu":
                repack(self.model)

        def received(self) -> bool:
            return self._receiver.done()

        def abort(self) -> None:
            self._receiver.abort()

        def shutdown(self) -> None:
            self._receiver.abort()

    WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
