"""What a generated token costs between the engine's process and the replica: messages, bytes, calls."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kuberoll_workers.serving.engines.output_buffer import OutputBuffer

pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 64, 256


def step(place: int) -> EngineCoreOutputs:
    logprobs = LogprobsLists(
        np.full((REQUESTS, 1), place, np.int32), np.full((REQUESTS, 1), -0.5, np.float32), np.ones(REQUESTS, np.int32)
    )
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=f"1-0-{number}-1-0#{number}",
                new_token_ids=[place],
                new_logprobs=logprobs.slice_request(number, 1),
                prefill_stats=PrefillStats(num_prompt_tokens=3) if place == 0 else None,
                finish_reason=FinishReason.LENGTH if place == TOKENS - 1 else None,
            )
            for number in range(REQUESTS)
        ],
        weight_version="0",
    )


def processor() -> OutputProcessor:
    made = OutputProcessor(None, log_stats=False)
    for number in range(REQUESTS):
        name = f"1-0-{number}-1-0#{number}"
        made.add_request(
            EngineCoreRequest(
                request_id=name, external_req_id=name, prompt_token_ids=[1, 2, 3], mm_features=None,
                pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
                sampling_params=SamplingParams(
                    max_tokens=TOKENS, logprobs=0, flat_logprobs=True, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            ),
            None,
            queue=RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name),
        )  # fmt: skip
    return made


def cost(messages: Sequence[EngineCoreOutputs]) -> tuple[float, float, float]:
    """Messages of a step, and bytes and calls of a token, from vLLM's encoder to its processor of outputs."""
    encoded = [MsgpackEncoder().encode(message) for message in messages]
    decoder: Any = MsgpackDecoder(EngineCoreOutputs)
    received = processor()
    profile = cProfile.Profile()
    profile.enable()
    for buffers in encoded:
        message = decoder.decode(buffers)
        received.process_outputs(message.outputs, message.timestamp, None, weight_version=message.weight_version)
    profile.disable()
    assert not received.has_unfinished_requests()
    stats: Any = pstats.Stats(profile)
    size = sum(len(memoryview(part).cast("B")) for buffers in encoded for part in buffers)
    return len(messages) / TOKENS, size / (REQUESTS * TOKENS), stats.total_calls / (REQUESTS * TOKENS)


def test_cost_of_a_token() -> None:
    """9 messages instead of 256, 16 bytes instead of 78, 15 calls instead of 51, most of them for log-probabilities."""
    buffer = OutputBuffer(lambda _: True)
    buffered = cost([part for place in range(TOKENS) for part in buffer.add(step(place))])
    plain = cost([step(place) for place in range(TOKENS)])
    assert buffered[0] <= plain[0] / 10
    assert buffered[1] <= plain[1] / 3
    assert buffered[2] <= plain[2] / 3
