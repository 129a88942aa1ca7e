"""vLLM's front end over the Simulated engine: its API server's parts run, and no model does."""

from __future__ import annotations

import asyncio
import json
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kuberoll_api.model.sampling_fields import SAMPLING_FIELDS
from kuberoll_api.model.types import MAX_SEED
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.serving.engines.interface import Engine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM


class SimulatedCore:
    """The engine's core as vLLM's front end sees it (`EngineCoreClient`): requests in, tokens out, one by one."""

    def __init__(self, engine: Engine) -> None:
        # What vLLM's front end reads of a core in another process.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._engine = engine
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        identity = request.request_id
        task = asyncio.get_running_loop().create_task(self._generate(request))
        self._tasks[identity] = task
        task.add_done_callback(lambda _: self._tasks.pop(identity, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for identity in request_ids:
            if (task := self._tasks.get(identity)) is not None:
                task.cancel()

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002 - vLLM's signature
        for task in self._tasks.values():
            task.cancel()

    async def _generate(self, request: EngineCoreRequest) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        params = request.sampling_params
        assert params is not None
        asked = GenerationRequest(
            request_id=request.request_id,
            session_id=request.session_id or request.request_id,
            token_ids=token_array(request.prompt_token_ids or []),
            sampling=_sampling(params),
        )
        try:
            result = await self._engine.generate(asked)
        except Exception:
            self._put(
                EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            )
            raise
        for output, version in _outputs(request.request_id, result, params):
            self._put(output, version)
            # A turn of the loop each, so that streams get them one by one.
            await asyncio.sleep(0)

    def _put(self, output: EngineCoreOutput, version: str | None = None) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output], weight_version=version))


def open_client(engine: Engine, *, model: str, tokenizer: str, revision: str | None) -> AsyncLLM:
    """Open vLLM's front end over an engine.

    Raises:
        Exception: vLLM's own, if it cannot read the model's configuration or tokenizer.
    """
    from unittest import mock

    from vllm import platforms
    from vllm.v1.engine import async_llm
    from vllm.v1.executor import Executor

    if platforms.current_platform.is_unspecified():
        # A GPU build on a machine without GPUs, as vLLM's own servers without an engine do it.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    info = engine.info()
    with tempfile.TemporaryDirectory() as directory:
        config = _config(
            _model_directory(Path(directory), model, window=info.max_model_len, vocabulary=info.vocab_size),
            tokenizer=tokenizer,
            revision=revision,
            window=info.max_model_len,
        )
        # vLLM has no way to hand in a core.
        core = SimulatedCore(engine)
        with mock.patch.object(async_llm.EngineCoreClient, "make_async_mp_client", return_value=core):
            return async_llm.AsyncLLM(config, Executor, log_stats=False, log_requests=False)


def _config(model: str, *, tokenizer: str, revision: str | None, window: int) -> VllmConfig:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(
        model=model,
        tokenizer=tokenizer,
        tokenizer_revision=revision,
        max_model_len=window,
        dtype="float32",
        enforce_eager=True,
        generation_config="vllm",
    )
    return VllmConfig(
        model_config=arguments.create_model_config(),
        structured_outputs_config=arguments.create_structured_outputs_config(),
    )


def _model_directory(directory: Path, model: str, *, window: int, vocabulary: int) -> str:
    """A directory with a configuration that vLLM accepts: simulated models need not exist."""
    given = Path(model) / "config.json"
    own = json.loads(given.read_text()) if given.is_file() else {}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": window,
        # Not those of the type: no token ends a simulated response.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if "architectures" in own:
        config = {**own, "max_position_embeddings": max(window, int(own.get("max_position_embeddings") or 0))}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def _sampling(params: SamplingParams) -> SamplingParameters:
    stop = params.stop
    settings = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    settings |= {
        "max_tokens": params.max_tokens or 1,
        "top_k": params.top_k or -1,
        "seed": None if params.seed is None else params.seed & MAX_SEED,
        "stop": tuple([stop] if isinstance(stop, str) else stop or ()),
        "stop_token_ids": tuple(params.stop_token_ids or ()),
        # There is no model that a form could guide.
        "structured_outputs": None,
    }
    return SamplingParameters(**settings)


def _outputs(
    identity: str, result: GenerationResult, params: SamplingParams
) -> Iterator[tuple[EngineCoreOutput, str | None]]:
    """The outputs of a core for one response, a token each, with the version of its weights."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists

    ids: array[int] = result.token_ids
    reason = FinishReason[result.finish_reason.upper()]
    cached = PrefillStats(num_cached_tokens=result.cached_tokens, num_local_cached_tokens=result.cached_tokens)
    # The front end leaves out the text of the last token of a response that was stopped: it takes it for an end token,
    # which scripted responses may lack.
    ended = bool(ids) and (reason is FinishReason.LENGTH or ids[-1] in _end_tokens(params))
    for position, token in enumerate(ids):
        version = next((name for name, start, end in result.policy_versions if start <= position < end), None)
        one = LogprobsLists(
            np.array([[token]]), np.array([[result.logprobs[position]]], dtype=np.float32), np.array([1])
        )
        output = EngineCoreOutput(
            request_id=identity,
            new_token_ids=[token],
            new_logprobs=one if params.logprobs is not None else None,
            finish_reason=reason if ended and position + 1 == len(ids) else None,
            prefill_stats=cached if position == 0 else None,
        )
        yield output, version
    if not ended:
        yield EngineCoreOutput(request_id=identity, new_token_ids=[], finish_reason=reason, prefill_stats=cached), None


def _end_tokens(params: SamplingParams) -> set[int]:
    return {token for token in (params.eos_token_id, *params.all_stop_token_ids) if token is not None}
