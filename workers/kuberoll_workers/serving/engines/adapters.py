"""LoRA adapters as weights of vLLM: each request is generated to its end with the one that was the newest."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.serving.engines.interface import WeightsRefused

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

ADAPTER_CONFIG: Final = "adapter_config.json"
ENABLING_ARGUMENT: Final = "enable_lora"
SLOTS: Final[Mapping[str, Any]] = {
    # Requests that began with the version before go on beside those of the newest.
    "max_loras": 2,
    # One that is evicted while its requests go on would be read again, and its files may be gone.
    "max_cpu_loras": 8,
}
"""Arguments of vLLM where adapters are enabled, unless the user has others."""


def is_adapter(path: Path) -> bool:
    """True if a directory has an adapter in place of a model's weights."""
    return (path / ADAPTER_CONFIG).is_file()


class AdaptedClient:
    """vLLM's client, with the methods of its own, that generates with an adapter.

    vLLM keeps adapters apart in its prefix cache by their names and paths, so no version continues what another one
    computed.
    """

    def __init__(self, client: AsyncLLM) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        # vLLM knows an adapter by its number: the same files keep theirs.
        self._known: dict[tuple[str, str], LoRARequest] = {}
        self._adapter: tuple[str, LoRARequest] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def adapted(self) -> bool:
        """True if requests are generated with an adapter."""
        return self._adapter is not None

    async def load(self, path: Path, version: str) -> None:
        """Generate with an adapter from now on.

        Args:
            path: Directory as PEFT saves it.

        Raises:
            WeightsRefused: It is none that this engine can use; the one before stays.
        """
        from vllm.lora.request import LoRARequest

        try:
            json.loads((path / ADAPTER_CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise WeightsRefused(f"{path / ADAPTER_CONFIG}: {error}") from error
        key = (version, str(path))
        adapter = self._known.get(key) or LoRARequest(f"version-{version}", next(self._numbers), str(path))
        try:
            await self._client.add_lora(adapter)
        except Exception as error:
            await self._client.check_health()
            raise WeightsRefused(f"{path}: vLLM cannot use this adapter: {error}") from error
        self._known[key] = adapter
        self._adapter = version, adapter

    def unload(self) -> None:
        """Generate without an adapter from now on."""
        self._adapter = None

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does; the tokens have the version of the adapter."""
        if self._adapter is None or options.get("lora_request") is not None:
            async for output in self._client.generate(prompt, sampling_params, request_id, **options):
                yield output
            return
        from vllm.outputs import WeightVersionSpan

        version, adapter = self._adapter
        generated = self._client.generate(prompt, sampling_params, request_id, **{**options, "lora_request": adapter})
        async for output in generated:
            for sequence in output.outputs:
                # The engine's own are those of the model without an adapter.
                if spans := sequence.weight_versions:
                    sequence.weight_versions = [WeightVersionSpan(version, spans[0].start, spans[-1].end)]
            yield output
