"""generate_responses and its asynchronous forms: what is asked, what is sliced out, what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any

import pytest
import torch

from kuberoll_workers.adapters.nemo_rl import (
    BatchedDataDict,
    async_generate_response_for_sample_turn,
    batched_message_log_to_flat_message,
    generate_responses,
    generate_responses_async,
)
from kuberoll_workers.policy.interface import PolicyUnavailable
from tests.adapters.nemo_rl.fakes import PAD, CharacterTokenizer, FakePolicy, batch_of, contents, ids_of

FACES = pytest.mark.parametrize("asynchronous", [False, True])


def inputs(batch: Any, **columns: Any) -> tuple[Any, torch.Tensor]:
    flat, lengths = batched_message_log_to_flat_message(batch["message_log"], pad_value_dict={"token_ids": PAD})
    return BatchedDataDict({"input_ids": flat["token_ids"], "input_lengths": lengths, **columns}), lengths


def call(asynchronous: bool, policy: Any, data: Any, batch: Any, lengths: Any, **more: Any) -> Any:
    if asynchronous:
        return asyncio.run(generate_responses_async(policy, data, batch, CharacterTokenizer(), lengths, **more))
    return generate_responses(policy, data, batch, CharacterTokenizer(), lengths, **more)


@FACES
def test_responses_are_appended_in_place_and_nothing_of_the_prompt_or_padding_is_in_them(asynchronous: bool) -> None:
    batch = batch_of({}, {}, {}, prompts=["a", "longer", "bcd"])
    policy = FakePolicy(lambda prompt, stops: prompt.upper() * 2)
    data, lengths = inputs(batch)
    logs = batch["message_log"]
    returned, generated, metrics = call(asynchronous, policy, data, batch, lengths, greedy=True)
    assert returned is batch
    assert batch["message_log"] is logs
    assert [contents(log)[-1] for log in logs] == [
        ("assistant", "AA"), ("assistant", "LONGERLONGER"), ("assistant", "BCDBCD"),
    ]  # fmt: skip
    for log, ids in zip(logs, generated, strict=True):
        message = log[-1]
        assert torch.equal(message["token_ids"], ids)
        assert torch.equal(message["token_ids"], ids_of(message["content"]))
        assert message["token_ids"].dtype is torch.int64
        assert torch.equal(message["generation_logprobs"], -ids / 1000)
    assert metrics == {
        "mean_generation_length": pytest.approx(20 / 3),
        "total_generated_tokens": 20,
        "max_seqlen": 18,
    }
    assert policy.greedy == [True]


@FACES
def test_logprobs_are_optional_on_both_sides(asynchronous: bool) -> None:
    for policy, include in ((FakePolicy(), False), (FakePolicy(logprobs=False), True)):
        batch = batch_of({})
        data, lengths = inputs(batch)
        call(asynchronous, policy, data, batch, lengths, include_logprobs=include)
        assert set(batch["message_log"][0][-1]) == {"role", "content", "token_ids"}


@FACES
def test_an_empty_response_is_a_message(asynchronous: bool) -> None:
    batch = batch_of({}, {})
    data, lengths = inputs(batch)
    _, generated, metrics = call(asynchronous, FakePolicy(lambda prompt, stops: ""), data, batch, lengths)
    assert [ids.dtype for ids in generated] == [torch.int64] * 2
    assert batch["message_log"][0][-1]["content"] == ""
    assert metrics["mean_generation_length"] == 0


@FACES
@pytest.mark.parametrize(
    ("column", "given", "used"),
    [(["b"], ["g"], ["b"]), (None, ["g"], ["g"]), (["b"], None, ["b"]), (None, None, None)],
)
def test_stop_strings_of_the_batch_win_and_those_of_the_input_are_not_lost(
    asynchronous: bool, column: Any, given: Any, used: Any
) -> None:
    batch = batch_of({}, {}, **({} if column is None else {"stop_strings": [column, column]}))
    data, lengths = inputs(batch, **({} if given is None else {"stop_strings": [given, given]}))
    policy = FakePolicy()
    call(asynchronous, policy, data, batch, lengths)
    assert policy.stops == [used, used]


@FACES
def test_no_samples_are_not_asked_for(asynchronous: bool) -> None:
    batch = batch_of()
    policy = FakePolicy()
    returned, generated, metrics = call(asynchronous, policy, BatchedDataDict(), batch, torch.empty(0))
    assert (returned, generated, policy.calls) == (batch, [], [])
    assert math.isnan(metrics["mean_generation_length"])
    assert metrics["total_generated_tokens"] == 0


@FACES
def test_what_the_policy_says_of_truncation_is_passed_on(asynchronous: bool) -> None:
    batch = batch_of({}, {})
    data, lengths = inputs(batch)
    policy = FakePolicy(lambda prompt, stops: "xyz" if prompt.endswith("1") else "x", truncated=True, cut=2)
    _, _, metrics = call(asynchronous, policy, data, batch, lengths)
    assert metrics["_response_truncated"].tolist() == [False, True]


def _drop(*names: str) -> Any:
    return lambda output: {name: column for name, column in output.items() if name not in names}


def _set(name: str, change: Any) -> Any:
    return lambda output: {**output, name: change(output[name])}


@FACES
@pytest.mark.parametrize(
    "change",
    [
        _set("logprobs", lambda logprobs: logprobs.to(torch.bfloat16)),
        _set("logprobs", lambda logprobs: logprobs.requires_grad_()),
        _set("logprobs", lambda logprobs: logprobs.to(torch.float64)),
        _set("output_ids", lambda ids: ids.to(torch.int32)),
        _set("unpadded_sequence_lengths", lambda lengths: lengths.to(torch.int32)),
    ],
)
def test_outputs_of_other_types_are_taken(asynchronous: bool, change: Any) -> None:
    batch = batch_of({})
    data, lengths = inputs(batch)
    call(asynchronous, FakePolicy(change=change), data, batch, lengths)
    message = batch["message_log"][0][-1]
    assert (message["token_ids"].dtype, message["token_ids"].tolist()) == (torch.int64, [ord("x")])
    assert message["generation_logprobs"].dtype is torch.float32
    assert message["generation_logprobs"].tolist() == pytest.approx([-0.12], abs=0.001)


@FACES
def test_messages_do_not_share_the_policy_s_memory(asynchronous: bool) -> None:
    outputs: list[Any] = []

    def kept(output: Any) -> Any:
        outputs.append(output)
        return output

    batch = batch_of({})
    data, lengths = inputs(batch)
    call(asynchronous, FakePolicy(change=kept), data, batch, lengths)
    for output in outputs:
        output["output_ids"].zero_()
        output["logprobs"].zero_()
    assert batch["message_log"][0][-1]["token_ids"].tolist() == [ord("x")]
    assert batch["message_log"][0][-1]["generation_logprobs"].item() < 0


WRONG = [
    (_drop("output_ids"), "no output_ids"),
    (_drop("unpadded_sequence_lengths"), "no unpadded_sequence_lengths"),
    (_set("output_ids", lambda ids: ids + 1), "does not begin with the prompt"),
    (_set("unpadded_sequence_lengths", lambda lengths: lengths + 50), "58|59 count"),
    (_set("unpadded_sequence_lengths", lambda lengths: lengths - 5), "count, for a prompt of"),
    (_set("logprobs", lambda logprobs: logprobs[:, :-1]), "token ids but 0 logprobs|token ids but 1 logprobs"),
    (_set("logprobs", lambda logprobs: logprobs * float("nan")), "not a finite number"),
    (_set("logprobs", lambda logprobs: logprobs - float("inf")), "not a finite number"),
]


@FACES
@pytest.mark.parametrize(("change", "said"), WRONG)
def test_impossible_outputs_are_refused_and_change_nothing(asynchronous: bool, change: Any, said: str) -> None:
    batch = batch_of({}, {})
    data, lengths = inputs(batch)
    with pytest.raises(PolicyUnavailable, match=said):
        call(asynchronous, FakePolicy(change=change), data, batch, lengths)
    assert [len(log) for log in batch["message_log"]] == [1, 1]


def test_too_few_rows_are_refused() -> None:
    batch = batch_of({}, {})
    data, lengths = inputs(batch)
    policy = FakePolicy(change=lambda output: {name: column[:1] for name, column in output.items()})
    with pytest.raises(PolicyUnavailable, match="answered 1 of 2 prompts"):
        call(False, policy, data, batch, lengths)


class Partial(FakePolicy):
    """Yields only some prompts, by their numbers."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = numbers

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        for number in self._numbers:
            yield number, self._output(data.select_indices([0]))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((), "Generation returned no outputs for a non-empty batch"),
        ((0, 2), "2 of 3 prompts; the first missing is 1"),
        ((0, 1, 1), "prompt 1 of 3 prompts twice"),
        ((0, 1, 3), "prompt 3 of 3 prompts twice or out of range"),
    ],
)
def test_a_missing_subset_is_noticed(numbers: tuple[int, ...], said: str) -> None:
    batch = batch_of({}, {}, {})
    data, lengths = inputs(batch)
    for kind in (AssertionError, PolicyUnavailable):
        with pytest.raises(kind, match=said):
            call(True, Partial(*numbers), data, batch, lengths)


class Without:
    """A policy that generates synchronously only."""

    def generate(self, data: Any, greedy: bool = False) -> Any: ...


@pytest.mark.parametrize(
    "cfg",
    [
        {"vllm_cfg": {"async_engine": False}},
        {"vllm_cfg": {}},
        # Configurations need not be plain dictionaries.
        MappingProxyType({"vllm_cfg": MappingProxyType({"async_engine": False})}),
        Without,
    ],
)
def test_asynchronous_generation_must_be_enabled(cfg: Any) -> None:
    policy: Any = Without() if cfg is Without else FakePolicy()
    policy.cfg = cfg
    batch = batch_of({})
    data, lengths = inputs(batch)
    with pytest.raises(AssertionError, match="Async generation is not enabled"):
        call(True, policy, data, batch, lengths)


@pytest.mark.parametrize("cfg", [{"vllm_cfg": {"async_engine": True}}, {"pad_token_id": 3}, {}, None])
def test_other_configurations_are_fine(cfg: Any) -> None:
    policy: Any = FakePolicy()
    policy.cfg = cfg
    batch = batch_of({}, {}, prompts=["a", "bcd"])
    data, lengths = inputs(batch)
    call(True, policy, data, batch, lengths)
    assert [contents(log)[-1] for log in batch["message_log"]] == [("assistant", "x")] * 2


async def test_one_sample_s_turn() -> None:
    log = [
        {"role": "user", "content": "ab", "token_ids": ids_of("ab")},
        {"role": "environment", "content": "", "token_ids": torch.tensor([])},
    ]
    policy = FakePolicy(lambda prompt, stops: "xyz")
    returned, generated, lengths, metrics = await async_generate_response_for_sample_turn(
        *(policy, log, ["z"], CharacterTokenizer()),
        max_seq_len=100,
        greedy=True,
        sample_multimodal_data={},
        deduplicate_multimodal_data=True,
    )
    assert returned is log
    assert contents(log)[-1] == ("assistant", "xyz")
    assert generated.tolist() == ids_of("xyz").tolist()
    assert lengths.tolist() == [2]
    assert metrics["total_generated_tokens"] == 3
    assert (policy.calls, policy.stops, policy.greedy) == ([["ab"]], [["z"]], [True])


async def test_one_sample_s_images_are_refused_before_anything_is_generated() -> None:
    policy = FakePolicy()
    log = [{"role": "user", "content": "ab", "token_ids": ids_of("ab")}]
    with pytest.raises(ValueError, match="found pixel_values; only text is supported"):
        await async_generate_response_for_sample_turn(
            policy, log, None, CharacterTokenizer(), 100, sample_multimodal_data={"pixel_values": torch.zeros(1)}
        )
    assert policy.calls == []
    assert len(log) == 1


@pytest.mark.parametrize(("settings", "enabled"), [({}, False), ({"use_async_rollouts": True}, True)])
async def test_sglang_generates_asynchronously_where_it_is_told_to(settings: dict[str, Any], enabled: bool) -> None:
    policy = FakePolicy(lambda prompt, stops: "x")
    policy.sglang_cfg = {"backend": "sglang", **settings}  # type: ignore[attr-defined]
    log = [{"role": "user", "content": "ab", "token_ids": ids_of("ab")}]
    asked = async_generate_response_for_sample_turn(policy, log, None, CharacterTokenizer(), 100)
    if enabled:
        await asked
    else:
        with pytest.raises(AssertionError, match="with SGLang use_async_rollouts=True"):
            await asked
    assert len(policy.calls) == enabled
