"""One generation for a batch: NeMo RL's `generate_responses` and its asynchronous forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import batch_class
from kuberoll_workers.adapters.nemo_rl.message_logs import (
    TOKEN_IDS,
    MessageLog,
    batched_message_log_to_flat_message,
    token_ids_of,
)
from kuberoll_workers.adapters.nemo_rl.policies import require_async
from kuberoll_workers.adapters.nemo_rl.responses import Prompts, Response, collect, read_responses
from kuberoll_workers.adapters.nemo_rl.tokenizers import decode_all, pad_token_of
from kuberoll_workers.policy.interface import PolicyUnavailable

if TYPE_CHECKING:
    import torch

Generated = tuple[Any, list["torch.Tensor"], dict[str, Any]]


def generate_responses(
    policy_generation: Any,
    generation_input_data: Any,
    batch: Any,
    tokenizer: Any,
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> Generated:
    """Generate one response for each sample and append it to the sample's message log, in place.

    Args:
        policy_generation: Has `generate(batch, greedy=)`.
        generation_input_data: `input_ids`, padded on the right, `input_lengths`, and optionally `stop_strings`. Those
            of `batch`, where it has such a column, take their place; where neither has any, there are none.
        batch: Its `message_log` is appended to; unless something is wrong with any response, then to none.
        input_lengths: Of the prompts, `[samples]`.
        include_logprobs: Whether messages get `generation_logprobs`, if the policy returns them.

    Returns:
        The batch; the generated ids, int64, one tensor for each sample; and `mean_generation_length`,
        `total_generated_tokens` and `max_seqlen`, with the policy's own `truncated` as `_response_truncated`.

    Raises:
        PolicyUnavailable: The policy's output is invalid.
        Exception: Any exception of the policy.
    """
    if not _prepare(generation_input_data, batch, input_lengths):
        return batch, [], _metrics([], [], None)
    outputs = policy_generation.generate(generation_input_data, greedy=greedy)
    return _append(outputs, generation_input_data, batch, tokenizer, input_lengths, include_logprobs)


async def generate_responses_async(
    policy_generation: Any,
    generation_input_data: Any,
    batch: Any,
    tokenizer: Any,
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> Generated:
    """`generate_responses` by way of `generate_async(batch, greedy=)`, which yields the samples' outputs in any order.

    Raises:
        AssertionError: The policy does not generate asynchronously, or did not answer every prompt once.
        PolicyUnavailable: The policy's output is invalid.
        Exception: Any exception of the policy.
    """
    require_async(policy_generation)
    if not _prepare(generation_input_data, batch, input_lengths):
        return batch, [], _metrics([], [], None)
    cfg = getattr(policy_generation, "cfg", None)
    pad = cfg.get("pad_token_id") if isinstance(cfg, Mapping) else None
    outputs = await collect(
        policy_generation.generate_async(generation_input_data, greedy=greedy),
        len(input_lengths),
        pad_token_id=pad_token_of(tokenizer) if pad is None else pad,
    )
    return _append(outputs, generation_input_data, batch, tokenizer, input_lengths, include_logprobs)


async def async_generate_response_for_sample_turn(
    policy_generation: Any,
    sample_message_log: MessageLog,
    sample_stop_strings: list[str] | None,
    tokenizer: Any,
    max_seq_len: int,  # noqa: ARG001 - NeMo RL's signature; how long responses may be is the policy's configuration
    greedy: bool = False,
    *,
    sample_multimodal_data: Mapping[str, Any] | None = None,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - newer callers pass it; there is only text
) -> tuple[MessageLog, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Generate one sample's response and append it to its message log, in place.

    Returns:
        The message log, the generated ids, int64, the prompt's length, `[1]`, and the metrics.

    Raises:
        ValueError: There are images or other media, which are not supported.
        AssertionError, PolicyUnavailable, Exception: As of `generate_responses_async`.
    """
    if sample_multimodal_data:
        raise ValueError(f"sample_multimodal_data: found {', '.join(sample_multimodal_data)}; only text is supported")
    batch_type = batch_class()
    flat, lengths = batched_message_log_to_flat_message(
        [[{TOKEN_IDS: token_ids_of(message[TOKEN_IDS])} for message in sample_message_log]],
        pad_value_dict={TOKEN_IDS: pad_token_of(tokenizer)},
    )
    data = batch_type({"input_ids": flat[TOKEN_IDS], "input_lengths": lengths, "stop_strings": [sample_stop_strings]})
    batch = batch_type({"message_log": [sample_message_log], "stop_strings": [sample_stop_strings]})
    _, generated, metrics = await generate_responses_async(
        policy_generation, data, batch, tokenizer, input_lengths=lengths, include_logprobs=True, greedy=greedy
    )
    return sample_message_log, generated[0], lengths, metrics


def _prepare(generation_input_data: Any, batch: Any, input_lengths: Any) -> bool:
    """Set the stop strings; return True if there is anything to generate."""
    if "stop_strings" in batch:
        generation_input_data["stop_strings"] = batch["stop_strings"]
    elif "stop_strings" not in generation_input_data:
        generation_input_data["stop_strings"] = [None] * len(input_lengths)
    return len(input_lengths) > 0


def _append(
    outputs: Any, data: Any, batch: Any, tokenizer: Any, input_lengths: Any, include_logprobs: bool
) -> Generated:
    import torch

    responses: list[Response] = []
    for response in read_responses(outputs, Prompts.of(data["input_ids"], input_lengths)):
        if isinstance(response, PolicyUnavailable):
            raise response
        responses.append(response)
    generated = [torch.from_numpy(response.token_ids) for response in responses]
    texts = decode_all(tokenizer, generated)
    for row, (text, ids, response) in enumerate(zip(texts, generated, responses, strict=True)):
        message: dict[str, Any] = {"role": "assistant", "content": text, TOKEN_IDS: ids}
        if include_logprobs and response.logprobs is not None:
            message["generation_logprobs"] = torch.from_numpy(response.logprobs)
        batch["message_log"][row].append(message)
    return batch, generated, _metrics(generated, input_lengths, outputs.get("truncated"))


def _metrics(generated: list[torch.Tensor], input_lengths: Any, truncated: Any) -> dict[str, Any]:
    counts = [len(ids) for ids in generated]
    totals = [int(length) + count for length, count in zip(input_lengths, counts, strict=True)]
    metrics: dict[str, Any] = {
        "mean_generation_length": sum(counts) / len(counts) if counts else float("nan"),
        "total_generated_tokens": sum(counts),
        "max_seqlen": max(totals, default=0),
    }
    return metrics if truncated is None else {**metrics, "_response_truncated": truncated}
