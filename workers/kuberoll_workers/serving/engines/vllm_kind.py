"""The plug-in of vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from kuberoll_api.contract import ServeArgs
from kuberoll_workers.serving.cached_models import cached
from kuberoll_workers.serving.engines import vllm_engine
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.engines.registry import world_size
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine

# Share of a GPU that vLLM takes by default, here of the share that a replica has of one.
_GPU_MEMORY_PART = 0.9


class VLLMKind:
    """vLLM, of its build for GPUs or for CPUs."""

    def make(self, args: ServeArgs) -> Engine:
        model = cached(args.model)
        tokenizer = model if args.tokenizer == args.model else cached(args.tokenizer, tokenizer=True)
        return VLLMEngine(
            model=model or args.model,
            name=args.model,
            tokenizer=tokenizer or args.tokenizer,
            revision=args.revision,
            tokenizer_revision=args.tokenizer_revision,
            engine_args=placed_engine_args(args),
            tool_call_parser=args.tool_call_parser,
            self_check=args.self_check,
        )

    def missing(self) -> str | None:
        if importlib.util.find_spec("vllm") is None:
            return (
                "vLLM is not installed. Install it with `pip install 'kuberoll[gpu]'` or, without a GPU, "
                "`make install`; or set engine: Simulated for a dry run"
            )
        return vllm_engine.missing_library()

    def on_gpus(self) -> bool:
        return not vllm_engine.is_cpu_build()

    def world_size(self, engine_args: Mapping[str, Any]) -> int:
        return world_size(engine_args)


def placed_engine_args(args: ServeArgs) -> dict[str, Any]:
    """vLLM's arguments with those that its placement implies; the user's take precedence."""
    placed: dict[str, Any] = {}
    if args.bundles is not None:
        placed["distributed_executor_backend"] = "ray"
    # 0: a pod without GPUs.
    if args.gpus is not None and 0 < args.gpus < 1:
        placed["gpu_memory_utilization"] = round(_GPU_MEMORY_PART * args.gpus, 4)
    return {**placed, **args.engine_args}


VLLM = VLLMKind()
