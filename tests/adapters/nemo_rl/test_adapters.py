"""What stands between NeMo RL's policies, tokenizers and batches, and the loop."""

from __future__ import annotations

import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import BatchedDataDict
from kuberoll_workers.adapters.nemo_rl.calls import CallerContext
from kuberoll_workers.adapters.nemo_rl.conversion import batch_of as columns_of
from kuberoll_workers.adapters.nemo_rl.environments import open_environments
from kuberoll_workers.adapters.nemo_rl.policies import BatchPolicy, StreamPolicy
from kuberoll_workers.adapters.nemo_rl.tokenizers import ForeignTokenizer, decode_all
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from tests.adapters.nemo_rl.fakes import PAD, CountingEnvironment, FakePolicy, batch_of


def request_of(prompt: str, *, room: int = 50) -> GenerationRequest:
    return GenerationRequest(
        request_id="0-0-0-1-0",
        session_id="0-0-0",
        token_ids=token_array(map(ord, prompt)),
        sampling=SamplingParameters(max_tokens=room),
    )


async def ask(kind: type[Any], policy: FakePolicy, request: GenerationRequest) -> tuple[GenerationResult, bool]:
    """The response, and whether the adapter has seen log-probabilities."""
    more = {"caller": CallerContext()} if kind is BatchPolicy else {}
    adapter = kind(policy, greedy=False, pad_token_id=PAD, batch_type=BatchedDataDict, **more)
    try:
        return await adapter.generate(request), adapter.gave_logprobs
    finally:
        await adapter.close()


@pytest.mark.parametrize("kind", [BatchPolicy, StreamPolicy])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(("room", "reason"), [(50, "stop"), (3, "stop"), (2, "length")])
async def test_a_response_says_how_it_ended(kind: type[Any], logprobs: bool, room: int, reason: str) -> None:
    policy = FakePolicy(lambda prompt, stops: "xy", logprobs=logprobs)
    result, gave_logprobs = await ask(kind, policy, request_of("ab", room=room))
    assert (list(result.token_ids), result.finish_reason) == ([ord("x"), ord("y")], reason)
    assert (len(result.logprobs), gave_logprobs) == (2 if logprobs else 0, logprobs)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_tokenizers_answer_with_mappings_or_with_attributes(kind: Any) -> None:
    def tokenizer(text: str, *, return_tensors: str, add_special_tokens: bool) -> Any:
        return kind(input_ids=torch.tensor([[ord(character) for character in text]]))

    foreign = ForeignTokenizer(tokenizer)
    assert foreign.encode("ab") == token_array([97, 98])
    assert foreign.encode("") == token_array()


def test_token_ids_are_decoded_as_int64() -> None:
    given: list[torch.Tensor] = []

    class Tokenizer:
        def batch_decode(self, batch: list[torch.Tensor], *, skip_special_tokens: bool) -> list[str]:
            given.extend(batch)
            return ["text"] * len(batch)

    foreign = ForeignTokenizer(Tokenizer())
    assert foreign.decode(array("i", [1, 2])) == foreign.decode([]) == "text"
    assert [ids.dtype for ids in given] == [torch.int64, torch.int64]


def test_a_tokenizer_that_loses_a_text_is_refused() -> None:
    tokenizer = SimpleNamespace(batch_decode=lambda batch, skip_special_tokens: ["one"])
    with pytest.raises(ValueError, match="batch_decode returned 1 texts for 2 responses"):
        decode_all(tokenizer, [torch.tensor([1]), torch.tensor([2])])


def test_the_columns_of_no_rows_have_their_types() -> None:
    columns = columns_of(batch_of(), [], with_logprobs=True)
    assert (columns["truncated"].dtype, columns["total_reward"].dtype) == (torch.bool, torch.float32)
    assert (columns["message_log"], columns["failure"], columns["stop_reason"]) == ([], [], [])


async def test_environments_are_stopped_with_the_rollout() -> None:
    before = set(threading.enumerate())
    async with open_environments({"env": CountingEnvironment()}, ["env"], step_seconds=30, max_batch=4) as runners:
        outcome = await runners["env"].step([{"role": "user", "content": "x"}], {"turns": 1})
        assert outcome.terminated
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", [BatchPolicy, StreamPolicy])
async def test_lengths_may_be_lists(kind: type[Any]) -> None:
    def listed(output: dict[str, Any]) -> dict[str, Any]:
        names = ("generation_lengths", "unpadded_sequence_lengths")
        return {**output, **{name: output[name].tolist() for name in names}}

    result, _ = await ask(kind, FakePolicy(lambda prompt, stops: "xyz", change=listed), request_of("ab"))
    assert list(result.token_ids) == [ord("x"), ord("y"), ord("z")]
