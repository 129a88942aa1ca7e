"""A fleet as NeMo RL's generation backend: what is asked and returned, over the real wire format."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from kuberoll_workers.adapters.nemo_rl import (
    BatchedDataDict,
    PublishedWeights,
    ServedGeneration,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from tests.adapters.nemo_rl.fakes import FAST, CharacterTokenizer, CountingEnvironment, batch_of
from tests.local.support import Endpoint

PAD = 0
CFG: dict[str, Any] = {
    "max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop_strings": ["end"], "stop_token_ids": [3],
    "_pad_token_id": PAD, "vllm_cfg": {"max_model_len": 64},
}  # fmt: skip


class Answering(Endpoint):
    """The simulated engine, with a list of what was asked and answered; it may refuse the first requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[GenerationRequest, GenerationResult]] = []
        self.refused = 0
        self.held, self.left = threading.Semaphore(0), threading.Semaphore(0)

    async def _generate(self, request: web.Request) -> web.Response:
        asked = wire.decode_request(await request.read(), wire.MSGPACK)
        if self.holds(asked):
            self.held.release()
            try:
                return await super()._generate(request)
            finally:
                self.left.release()
        if self.refused:
            self.refused -= 1
            return web.json_response({"error": {"type": "x", "message": "the engine is gone"}}, status=503)
        result = await self._engine.generate(asked)
        self.asked.append((asked, result))
        return web.Response(body=wire.encode_result(result, wire.MSGPACK), content_type=wire.MSGPACK)


@contextmanager
def served(**changes: Any) -> Iterator[tuple[Answering, ServedGeneration]]:
    endpoint = Answering()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(endpoint.serving()):
        generation = ServedGeneration({**CFG, **changes}, endpoint.url)
        try:
            yield endpoint, generation
        finally:
            generation.shutdown()


def data_of(*prompts: list[int], stops: list[Any] | None = None) -> Any:
    longest = max(map(len, prompts))
    rows = [[*prompt, *[PAD] * (longest - len(prompt))] for prompt in prompts]
    data: Any = BatchedDataDict(
        {"input_ids": torch.tensor(rows), "input_lengths": torch.tensor(list(map(len, prompts)))}
    )
    if stops is not None:
        data["stop_strings"] = stops
    return data


PROMPTS = ([1, 5, 6], [1, 7], [1, 8, 9, 10])


def assert_as_answered(endpoint: Answering, prompts: tuple[list[int], ...], output: Any) -> None:
    by_prompt = {tuple(asked.token_ids): result for asked, result in endpoint.asked}
    for row, prompt in enumerate(prompts):
        result = by_prompt[tuple(prompt)]
        total = len(prompt) + len(result.token_ids)
        assert int(output["unpadded_sequence_lengths"][row]) == total
        assert int(output["generation_lengths"][row]) == len(result.token_ids) > 0
        assert output["output_ids"][row].tolist()[:total] == [*prompt, *result.token_ids]
        assert set(output["output_ids"][row].tolist()[total:]) <= {PAD}
        expected = torch.tensor([0.0] * len(prompt) + list(result.logprobs), dtype=torch.float32)
        assert torch.equal(output["logprobs"][row, :total], expected)
        assert not output["logprobs"][row, total:].any()
        assert bool(output["truncated"][row]) == (result.finish_reason == "length")


def test_a_batch_is_answered_in_its_order() -> None:
    with served() as (endpoint, generation):
        output = generation.generate(data_of(*PROMPTS, stops=[["x"], None, ["end", "y"]]), greedy=False)
    assert type(output) is BatchedDataDict
    assert_as_answered(endpoint, PROMPTS, output)
    sampled = {tuple(asked.token_ids): asked.sampling for asked, _ in endpoint.asked}
    assert sampled[1, 5, 6] == SamplingParameters(
        max_tokens=8, temperature=0.7, top_p=0.9, top_k=5, stop=("end", "x"), stop_token_ids=(3,)
    )
    assert [sampled[tuple(prompt)].stop for prompt in PROMPTS[1:]] == [("end",), ("end", "y")]


def test_the_response_has_the_room_that_the_window_leaves_and_greedy_is_greedy() -> None:
    prompt = [1, *[5] * 60]
    with served() as (endpoint, generation):
        generation.generate(data_of(prompt), greedy=True)
        with pytest.raises(PolicyRefused, match=r"64 tokens, and vllm_cfg.max_model_len is 64: there is no room"):
            generation.generate(data_of([1] * 64), greedy=True)
    ((asked, _),) = endpoint.asked
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_k) == (3, 0.0, -1)


async def test_a_stream_has_each_prompt_once_also_after_a_journey_to_another_process() -> None:
    with served() as (endpoint, generation):
        # Connections that are open do not travel.
        await asyncio.to_thread(generation.generate, data_of([1, 2]), False)
        copied: ServedGeneration = pickle.loads(pickle.dumps(generation))
        try:
            outputs = {row: output async for row, output in copied.generate_async(data_of(*PROMPTS), greedy=False)}
        finally:
            copied.shutdown()
            copied.shutdown()
    assert sorted(outputs) == [0, 1, 2]
    for row, prompt in enumerate(PROMPTS):
        assert_as_answered(endpoint, (prompt,), outputs[row])


def test_an_endpoint_that_fails_is_asked_again_and_given_up_in_the_end() -> None:
    with served() as (endpoint, generation):
        endpoint.refused = 4
        assert_as_answered(endpoint, ([1, 5],), generation.generate(data_of([1, 5]), False))
        impatient = ServedGeneration(CFG, endpoint.url, patience_seconds=0.2)
        endpoint.refused = 10**6
        try:
            with pytest.raises(PolicyUnavailable):
                impatient.generate(data_of([1, 5]), False)
        finally:
            impatient.shutdown()


async def test_a_consumer_that_leaves_ends_its_requests() -> None:
    with served() as (endpoint, generation):
        endpoint.holds = lambda request: True
        stream: AsyncIterator[Any] = generation.generate_async(data_of(*PROMPTS), False)
        waiting = asyncio.ensure_future(anext(stream))
        for _ in PROMPTS:
            assert await asyncio.to_thread(endpoint.held.acquire, timeout=60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in PROMPTS:
            assert await asyncio.to_thread(endpoint.left.acquire, timeout=60)
    assert not endpoint.waiting
    assert not endpoint.asked


@pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_rollouts_of_both_forms(run: Any) -> None:
    with served(max_new_tokens=4, stop_token_ids=None, stop_strings=None) as (_, generation):
        final, _ = run(
            generation, batch_of({"turns": 2}, {"turns": 1}), CharacterTokenizer(), {"env": CountingEnvironment()}, 60,
            limits=FAST,
        )  # fmt: skip
    assert final["total_reward"].tolist() == [2.0, 1.0]


def test_the_window_must_be_said() -> None:
    with pytest.raises(ValueError, match=r"policy.generation.vllm_cfg.max_model_len: not set"):
        ServedGeneration({**CFG, "vllm_cfg": {}}, "http://127.0.0.1:1")


def test_weights_are_published_and_not_collected() -> None:
    calls: list[int] = []
    weights = PublishedWeights(lambda: calls.append(1))
    generation = ServedGeneration(CFG, "http://127.0.0.1:1", weight_synchronizer=weights)
    weights.init_communicator()
    assert weights.is_stale
    assert generation.weight_synchronizer.sync_weights(timer=None, kv_scales=None) == {}
    assert (calls, weights.is_stale) == ([1], False)
    with pytest.raises(NotImplementedError, match="kv_scales"):
        weights.sync_weights(kv_scales={"layer": 1.0})
    with pytest.raises(NotImplementedError, match="PublishedWeights"):
        generation.init_collective("127.0.0.1", 1, 2, train_world_size=1)
    assert generation.prepare_for_generation(tags=["weights"])
    assert generation.finish_generation(release_gpu=False)
    assert not generation.blocks_training()
    assert generation.shutdown()
