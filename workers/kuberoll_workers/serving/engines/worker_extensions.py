"""Extensions of vLLM's workers; vLLM mixes these classes into theirs by their names."""

from __future__ import annotations

from typing import Any, Final

from kuberoll_workers.serving.engines import gloo_backend
from kuberoll_workers.serving.engines.packed_weights import repack

FOR_CPUS: Final = f"{__name__}.CPUWorkerExtension"
FOR_TRANSFERS: Final = f"{__name__}.TransferWorkerExtension"
"""Names for vLLM."""


class _TransferWorkerExtension:
    """Two calls that vLLM's weight transfer lacks for weights that are received in the background."""

    def kuberoll_transfer_received(self: Any) -> bool:
        """Whether all weights are there.

        Raises:
            RuntimeError: They cannot be received.
        """
        return bool(self.weight_transfer_engine.received())

    def kuberoll_abort_transfer(self: Any) -> None:
        """Forget weights that are being received; the model has its old ones.

        vLLM has no call for it: an update that was begun must be finished, or fail.
        """
        self.weight_transfer_engine.abort()
        self._weight_update_active = False


class _CPUWorkerExtension(_TransferWorkerExtension):
    """Reloads weights, including those that layers have packed."""

    def kuberoll_reload_weights(self: Any, weights_path: str) -> None:
        """vLLM's `reload_weights`, with nothing left of the old weights."""
        self.reload_weights(weights_path=weights_path)
        repack(self.model_runner.get_model())


_EXTENSIONS = {FOR_CPUS: _CPUWorkerExtension, FOR_TRANSFERS: _TransferWorkerExtension}


def __getattr__(name: str) -> Any:
    """The extension of a name.

    vLLM asks for it in each worker, whoever has imported this module before, and then makes the worker's transfer
    engine, which must be registered by then.
    """
    try:
        extension = _EXTENSIONS[f"{__name__}.{name}"]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    gloo_backend.register()
    return extension
