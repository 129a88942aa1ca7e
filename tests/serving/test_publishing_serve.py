"""Weights that break the only replica of a real policy: the one in its place serves the version before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from kuberoll.trainer import PolicyEndpoint, Publisher, PublishFailed
from tests.local.support import TINY
from tests.serving.hosts import TOKENS, starting, until_ready

ENGINE: dict[str, Any] = {
    "engine": "VLLM",
    "simulated": None,
    "engine_args": {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27},
}


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.long
def test_the_old_version_is_served_after_one_that_broke_the_engine(tmp_path: Path) -> None:
    with starting(model=str(TINY), tokenizer=str(TINY), replicas=1, tokens=TOKENS, torch=True, **ENGINE) as started:
        endpoint = PolicyEndpoint(until_ready(started)[-1]["url"], TOKENS.weights)
        publisher = Publisher(endpoint=endpoint, location=tmp_path / "weights", timeout=240)
        good = publisher.publish(TINY, version=1)
        # Names that no one but the engine knows: it finds out in the middle of loading.
        strange = tmp_path / "strange"
        shutil.copytree(TINY, strange)
        save_file({"unknown.weight": numpy.zeros((4, 4), numpy.float32)}, strange / "model.safetensors")
        with pytest.raises(PublishFailed) as failed:
            publisher.publish(strange, version=2)
        found = endpoint.weights()
        assert found.everywhere == failed.value.served_version == "1", failed.value
        # It is another replica.
        assert good.replicas != tuple(found.replicas)
        assert publisher.publish(TINY, version=3).replicas == tuple(found.replicas)
