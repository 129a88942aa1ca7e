"""Steps of vLLM in this process: how long each takes, what it does, and within which limits."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_workers.serving.engines.vllm_engine import CPU_ENVIRONMENT, engine_arguments, is_cpu_build
from kuberoll_workers.simulation.fitting import Step

_ROUNDS: Final = (2, 8, 32, 96)
"""Requests in flight at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of an engine, and its limits, as in `EngineLimits`."""

    steps: Sequence[Step]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    block_tokens: int
    prefix_caching: bool
    chunked_prefill: bool


def measure_steps(model: str, given: Mapping[str, Any], *, seed: int = 0) -> Measured:
    """Generate with few and many requests in flight, with short and long prompts of random tokens.

    Args:
        given: Engine arguments, as in a job.
    """
    if cpu := is_cpu_build():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    # So that its scheduler can be asked.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**engine_arguments(given, model=model, tokenizer=model, revision=None, cpu=cpu))
    engine: Any = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    config = engine.model_config
    vocabulary, longest = int(config.get_vocab_size()), int(config.max_model_len)
    draw = random.Random(seed)
    doing = [0, 0, 0]
    schedule = scheduler.schedule

    def watched(*arguments: Any, **named: Any) -> Any:
        planned = schedule(*arguments, **named)
        doing[:] = 0, 0, 0
        for request in scheduler.running:
            tokens = planned.num_scheduled_tokens.get(request.request_id, 0)
            if tokens == 1:
                doing[0] += 1
                doing[1] += int(request.num_computed_tokens)
            else:
                doing[2] += tokens
        return planned

    scheduler.schedule = watched

    def ask(name: str) -> None:
        prompt = min(longest // 2, max(4, round(longest / 16 * draw.lognormvariate(0.0, 1.0))))
        tokens = min(longest // 4, max(2, round(draw.expovariate(16 / longest))))
        parameters = SamplingParams(
            max_tokens=tokens, ignore_eos=True, seed=draw.randrange(1 << 30), logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        ids = [draw.randrange(vocabulary) for _ in range(prompt)]
        engine.add_request(name, {"prompt_token_ids": ids}, parameters)

    steps: list[Step] = []
    # The first steps compile and allocate.
    ask("first")
    while engine.has_unfinished_requests():
        engine.step()
    for requests in _ROUNDS:
        for number in range(requests):
            ask(f"{requests}-{number}")
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            if any(doing):
                sequences, contexts, prompts = doing
                steps.append(Step(sequences=sequences, contexts=contexts, prompt_tokens=prompts, seconds=took))
            doing[:] = 0, 0, 0
    planned, cache = engine.vllm_config.scheduler_config, engine.vllm_config.cache_config
    return Measured(
        steps=steps,
        max_num_seqs=planned.max_num_seqs,
        max_num_batched_tokens=planned.max_num_batched_tokens,
        # One block holds nothing, for what has no place.
        kv_cache_tokens=(cache.num_gpu_blocks - 1) * cache.block_size,
        block_tokens=cache.block_size,
        prefix_caching=bool(cache.enable_prefix_caching),
        chunked_prefill=bool(planned.enable_chunked_prefill),
    )
