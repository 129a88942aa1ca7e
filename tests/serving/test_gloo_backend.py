"""The backend for weights over TCP is there when a worker of vLLM looks for it."""

from __future__ import annotations

import pytest

# A process that vLLM starts may import this before vLLM: the main module of its parent does.
from kuberoll_workers.serving.engines import gloo_backend, worker_extensions

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", [worker_extensions.FOR_CPUS, worker_extensions.FOR_TRANSFERS])
def test_the_backend_is_registered_when_vllm_asks_for_the_extension(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", dict(WeightTransferEngineFactory._registry))
    WeightTransferEngineFactory._registry.pop(gloo_backend.BACKEND, None)
    extension = resolve_obj_by_qualname(name)
    assert hasattr(extension, "kuberoll_abort_transfer")
    assert issubclass(WeightTransferEngineFactory._registry[gloo_backend.BACKEND](), WeightTransferEngine)
    # Another worker of the same process asks, too.
    assert resolve_obj_by_qualname(name) is extension
