"""vLLM's engine as its self-check uses it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kuberoll_workers.serving.engines.prompt_scores import scores_prompts
from kuberoll_workers.serving.engines.self_check import (
    SHORT_TEXTS,
    SHORT_TOKENS,
    TEXTS,
    TOKENS,
    Drawn,
    Kind,
    Report,
    Scored,
    check,
    check_response,
)
from kuberoll_workers.serving.engines.spot_check import Response

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

PREFIX: Final = "self-check"
"""How the ids of its requests begin."""

# Of all requests in this process: several checks may be under way.
_NUMBERS: Final = itertools.count()
_LONGEST_PROMPT: Final = 32


def kind_of(settings: VllmConfig, *, cpu: bool) -> Kind:
    """What the bounds of a check of an engine depend on.

    Args:
        cpu: It is vLLM's build for CPUs, on which the bounds were measured.
    """
    model, cache = settings.model_config, settings.cache_config
    quantized = bool(model.quantization) or str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32")
    return Kind(
        vocabulary=int(model.get_vocab_size()),
        dtype=str(model.dtype).rpartition(".")[2],
        mixture=bool(model.is_moe),
        quantized=quantized,
        measured=cpu and not quantized and not model.is_moe,
    )


def prompts_of(tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Prompts of a check.

    Args:
        tokenizer: The model's, as in transformers; None: there is none, and any ids are used.
    """
    if tokenizer is None:
        return [[(7 * number + step % 4) % vocabulary for step in range(8)] for number in range(len(TEXTS))]
    return [
        [token for token in tokenizer.encode(text, add_special_tokens=False) if token < vocabulary][:_LONGEST_PROMPT]
        or [0]
        for text in TEXTS
    ]


class VLLMProber:
    """A started vLLM engine."""

    def __init__(self, client: AsyncLLM, *, rank: int | None = None, scores: bool = True) -> None:
        """
        Args:
            rank: That of one of several engines that share the requests; None: there is only one.
            scores: The engine can score prompts.
        """
        self._client, self._scores = client, scores
        self._options: dict[str, Any] = {} if rank is None else {"data_parallel_rank": rank}

    async def sample(
        self, prompt: Sequence[int], *, temperature: float, seed: int, tokens: int, stop: str | None = None
    ) -> Drawn:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            stop=None if stop is None else [stop],
            ignore_eos=True,
            logprobs=0,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            # It would prove nothing of what a prompt computes.
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = (await self._answer(prompt, params)).outputs[0]
        ids = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=True)]
        return Drawn(ids, logprobs, output.text, output.finish_reason == "stop")

    async def score(self, ids: Sequence[int]) -> list[Scored] | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not self._scores:
            return None
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=1,
            detokenize=False,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        found = (await self._answer(ids, params)).prompt_logprobs or []
        return [
            Scored(entry[token].logprob, max(value.logprob for value in entry.values()))
            for token, entry in zip(ids[1:], found[1:], strict=True)
            if entry is not None
        ]

    async def _answer(self, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        from vllm.inputs.engine import tokens_input

        name = f"{PREFIX}-{next(_NUMBERS)}"
        final = None
        # Nothing that others send can continue what is in the cache with this salt.
        prompt = tokens_input(list(ids), cache_salt=PREFIX)
        async for output in self._client.generate(prompt, params, name, **self._options):
            final = output
        if final is None or not final.outputs:
            raise RuntimeError("the engine ended a request of its self-check without an output")
        return final


async def prove_response(engine: AsyncLLM, client: AsyncLLM, response: Response, *, cpu: bool) -> Report:
    """Check a response of a run.

    Args:
        client, cpu: As for `prove`.

    Raises:
        Exception: vLLM's, if it cannot score prompts.
    """
    kind = kind_of(engine.vllm_config, cpu=cpu)
    return await check_response(VLLMProber(client), response.prompt, response.ids, response.logprobs, kind)


async def prove(engine: AsyncLLM, client: AsyncLLM, *, cpu: bool, whole: bool) -> Report:
    """Check an engine, and each of the engines that it consists of.

    Args:
        client: Generates as the policy does: with its adapter, if it has one.
        cpu: As for `kind_of`.
        whole: As for `check`.

    Raises:
        Exception: vLLM's, if it cannot score prompts.
    """
    settings = engine.vllm_config
    kind = kind_of(settings, cpu=cpu)
    prompts = prompts_of(engine.renderer.tokenizer, kind.vocabulary)
    tokens = TOKENS if whole else SHORT_TOKENS
    room = int(settings.model_config.max_model_len) - max(map(len, prompts)) - 1
    ranks: list[int | None] = list(range(settings.parallel_config.data_parallel_size))
    reports = [
        await check(
            VLLMProber(client, rank=rank, scores=scores_prompts(settings)),
            prompts if whole else prompts[:SHORT_TEXTS],
            kind,
            whole=whole,
            tokens=max(1, min(tokens, room)),
        )
        for rank in (ranks if len(ranks) > 1 else [None])
    ]
    return max(reports, key=lambda report: (report.certain, len(report.findings)))
