"""What stands between NeMo RL's policies, tokenizers and batches, and the loop."""

from __future__ import annotations

import asyncio
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import BatchedDataDict, RolloutLimits
from kuberoll_workers.adapters.nemo_rl.calls import CallerContext
from kuberoll_workers.adapters.nemo_rl.conversion import batch_of as columns_of
from kuberoll_workers.adapters.nemo_rl.environments import open_environments
from kuberoll_workers.adapters.nemo_rl.limits import settings_of
from kuberoll_workers.adapters.nemo_rl.policies import BatchPolicy, StreamPolicy
from kuberoll_workers.adapters.nemo_rl.tokenizers import ForeignTokenizer, decode_all
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings
from tests.adapters.nemo_rl.fakes import PAD, CountingEnvironment, FakePolicy, batch_of


def request_of(prompt: str, *, room: int = 50, row: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{row}-0-0-1-0",
        session_id=f"{row}-0-0",
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


async def test_what_is_asked_during_a_call_is_in_the_next_one_in_the_order_of_the_rows() -> None:
    entered, released = threading.Event(), threading.Event()

    def answer(prompt: str, stops: Any) -> str:
        if prompt == "first":
            entered.set()
            released.wait()
        return prompt[0]

    policy = FakePolicy(answer)
    adapter = BatchPolicy(policy, greedy=True, pad_token_id=PAD, batch_type=BatchedDataDict, caller=CallerContext())
    try:
        first = asyncio.ensure_future(adapter.generate(request_of("first", row=1)))
        await asyncio.to_thread(entered.wait)
        rows = {"c": 12, "b": 2, "a": 3, "gone": 0}
        rest = {
            prompt: asyncio.ensure_future(adapter.generate(request_of(prompt, row=row))) for prompt, row in rows.items()
        }
        await asyncio.sleep(0)
        rest.pop("gone").cancel()
        released.set()
        results = await asyncio.gather(first, *rest.values())
    finally:
        released.set()
        await adapter.close()
    assert [chr(result.token_ids[0]) for result in results] == ["f", "c", "b", "a"]
    # Nobody waits for the cancelled one any more.
    assert policy.calls == [["first"], ["b", "a", "c"]]
    assert policy.greedy == [True, True]
    assert len(policy.threads) == 1
    assert policy.threads != {threading.get_ident()}


async def test_of_a_batch_only_what_the_policy_refuses_fails() -> None:
    def answer(prompt: str, stops: Any) -> str | Exception:
        return ValueError("too odd") if prompt == "b" else prompt

    policy = FakePolicy(answer)
    adapter = BatchPolicy(policy, greedy=False, pad_token_id=PAD, batch_type=BatchedDataDict, caller=CallerContext())
    try:
        requests = [request_of(prompt, row=row) for row, prompt in enumerate("abc")]
        one, other, third = await asyncio.gather(*map(adapter.generate, requests), return_exceptions=True)
    finally:
        await adapter.close()
    assert isinstance(other, PolicyRefused)
    assert "too odd" in str(other)
    assert isinstance(other.__cause__, ValueError)
    assert [chr(result.token_ids[0]) for result in (one, third) if isinstance(result, GenerationResult)] == ["a", "c"]
    assert policy.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]


@pytest.mark.parametrize("kind", [BatchPolicy, StreamPolicy])
@pytest.mark.parametrize(
    ("truncated", "room", "reason"), [(True, 50, "length"), (False, 50, "stop"), (False, 1, "length")]
)
async def test_who_says_whether_a_response_was_cut_is_believed_within_the_room(
    kind: type[Any], truncated: bool, room: int, reason: str
) -> None:
    def change(output: dict[str, Any]) -> dict[str, Any]:
        return {**output, "truncated": torch.tensor([truncated])}

    result, _ = await ask(kind, FakePolicy(lambda prompt, stops: "xy", change=change), request_of("ab", room=room))
    assert (len(result.token_ids), result.finish_reason) == (2, reason)


@pytest.mark.parametrize("name", ["logprobs", "truncated"])
@pytest.mark.parametrize("kind", [BatchPolicy, StreamPolicy])
async def test_columns_of_another_length_are_no_answer(kind: type[Any], name: str) -> None:
    policy = FakePolicy(lambda prompt, stops: "xy", change=lambda output: {**output, name: torch.zeros(3, 4)})
    with pytest.raises(PolicyUnavailable, match=f"the policy's {name} are of 3 of 1 prompts"):
        await ask(kind, policy, request_of("ab"))


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


@pytest.mark.parametrize(
    ("scheduling", "batch", "bound", "concurrency"),
    [
        ("Lockstep", 7, 3, 7),
        ("Lockstep", 0, None, 1),
        ("Concurrent", 7, None, 7),
        ("Concurrent", 7, 3, 3),
        ("Concurrent", 2, 3, 2),
        ("Concurrent", 0, 3, 1),
    ],
)
def test_limits_become_the_loop_s_settings(scheduling: Any, batch: int, bound: int | None, concurrency: int) -> None:
    limits = RolloutLimits(concurrency=bound)
    found = settings_of(limits, scheduling=scheduling, batch_size=batch, max_turns=5, max_sequence_length=99)
    assert found == RolloutSettings(
        max_turns=5,
        max_sequence_length=99,
        concurrency=concurrency,
        sampling=SamplingParameters(max_tokens=99),
        scheduling=scheduling,
        retries=RetryPolicy(
            generation_attempts=3, environment_attempts=2, backoff_seconds=0.5, max_backoff_seconds=30.0
        ),
        generation_seconds=3600.0,
        turn_seconds=None,
        trajectory_seconds=None,
        foreign_policy=True,
    )
    assert (limits.step_seconds, limits.environment_calls) == (1800.0, 8)
