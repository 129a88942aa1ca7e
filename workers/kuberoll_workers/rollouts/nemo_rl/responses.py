"""What a policy of NeMo RL's interface is asked, and what is in its answer: shared by all that call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.rollouts.nemo_rl.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from array import array

    import torch


class IncompleteOutput(PolicyUnavailable, AssertionError):
    """The policy did not answer every prompt once; in NeMo RL an assertion, where it is noticed."""


@dataclass(frozen=True, slots=True)
class Response:
    """One row of a policy's output.

    Attributes:
        token_ids: What was generated, int64 on the CPU, in memory of its own.
        logprobs: One for each, float32; None where the policy gives none.
        truncated: Whether a length limit cut it; None where the policy does not say.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    truncated: bool | None


def generation_batch(
    prompts: Sequence[array[int]], stop_strings: Sequence[Sequence[str]], *, pad_token_id: int, batch_type: type[Any]
) -> Any:
    """Prompts as a policy takes them.

    Returns:
        `input_ids`, int64 `[prompts, longest]`, padded on the right; `input_lengths`, int32 `[prompts]`;
        `stop_strings`, for each prompt a list, or None.
    """
    import torch

    lengths = [len(prompt) for prompt in prompts]
    ids = numpy.full((len(prompts), max(lengths, default=0)), pad_token_id, dtype=numpy.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = prompt
    return batch_type(
        {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": torch.tensor(lengths, dtype=torch.int32),
            "stop_strings": [list(stops) or None for stops in stop_strings],
        }
    )


def read_responses(
    outputs: Mapping[str, Any], input_ids: Any, input_lengths: Any
) -> list[Response | PolicyUnavailable]:
    """Cut the responses out of a policy's output and check them; a row that is wrong has its fault in its place.

    Args:
        outputs: `output_ids` (prompt and response, padded on the right), `unpadded_sequence_lengths`, and optionally
            `logprobs` and `truncated`.
        input_ids, input_lengths: What was asked.

    Raises:
        IncompleteOutput: The output has more or fewer rows than there were prompts.
        PolicyUnavailable: It lacks a column.
        TypeError: It is no batch.
    """
    import torch

    if not hasattr(outputs, "get"):
        raise TypeError(f"the policy's output is a {type(outputs).__name__}; it must be a batch of columns")
    for name in ("output_ids", "unpadded_sequence_lengths"):
        if name not in outputs:
            raise PolicyUnavailable(f"the policy's output has no {name}")
    prompts = torch.as_tensor(input_ids).cpu().to(torch.int64)
    lengths = torch.as_tensor(input_lengths).tolist()
    sequences = torch.as_tensor(outputs["output_ids"]).detach().cpu().to(torch.int64)
    totals = torch.as_tensor(outputs["unpadded_sequence_lengths"]).tolist()
    if len(sequences) != len(lengths) or len(totals) != len(lengths):
        raise IncompleteOutput(f"the policy answered {min(len(sequences), len(totals))} of {len(lengths)} prompts")
    logprobs, truncated = _column(outputs, "logprobs", len(lengths)), _column(outputs, "truncated", len(lengths))
    return [
        _read(
            row,
            prompts[row, : lengths[row]],
            sequences[row],
            totals[row],
            None if logprobs is None else logprobs[row],
            None if truncated is None else bool(truncated[row]),
        )
        for row in range(len(lengths))
    ]


async def collect(stream: Any, count: int, *, pad_token_id: int) -> Any:
    """All that `generate_async` yields, as one output in the order of the prompts.

    Args:
        stream: Yields the number of a prompt, from 0, and its output, a batch of one; in any order.
        count: Number of prompts.

    Raises:
        IncompleteOutput: A prompt was answered not at all or twice.
    """
    items: dict[int, Any] = {}
    async with AsyncExitStack() as stack:
        if hasattr(stream, "aclose"):
            # Cancelling must reach the generator, which aborts its request.
            await stack.enter_async_context(aclosing(stream))
        async for index, item in stream:
            number = int(index)
            if number in items or not 0 <= number < count:
                raise IncompleteOutput(
                    f"generate_async yielded prompt {number} of {count} prompts twice or out of range"
                )
            items[number] = item
    if not items:
        raise IncompleteOutput("Generation returned no outputs for a non-empty batch.")
    missing = [number for number in range(count) if number not in items]
    if missing:
        raise IncompleteOutput(
            f"generate_async yielded {len(items)} of {count} prompts; the first missing is {missing[0]}"
        )
    if count == 1:
        return items[0]
    pads = {"output_ids": pad_token_id, "logprobs": 0.0}
    return BatchedDataDict.from_batches([items[number] for number in range(count)], pad_value_dict=pads)


def _column(outputs: Mapping[str, Any], name: str, count: int) -> Any:
    column = outputs.get(name)
    if column is None:
        return None
    if len(column) != count:
        raise IncompleteOutput(f"the policy's {name} are of {len(column)} of {count} prompts")
    return column.detach().cpu() if hasattr(column, "detach") else column


def _read(
    row: int, prompt: torch.Tensor, sequence: torch.Tensor, total: int, logprobs: Any, truncated: bool | None
) -> Response | PolicyUnavailable:
    import torch

    start = len(prompt)
    if not start <= total <= len(sequence):
        return PolicyUnavailable(
            f"the policy's output {row} has {len(sequence)} ids and says that {total} count, for a prompt of {start}"
        )
    if not torch.equal(sequence[:start], prompt):
        # What follows was sampled after something else, and would be trained on as if it were after this prompt.
        return PolicyUnavailable(f"the policy's output {row} does not begin with the prompt that it was given")
    generated = None
    if logprobs is not None:
        generated = torch.as_tensor(logprobs)[start:total].to(torch.float32).clone()
        if len(generated) != total - start:
            return PolicyUnavailable(f"the response has {total - start} token ids but {len(generated)} logprobs")
        if not bool(torch.isfinite(generated).all()):
            return PolicyUnavailable("the response has a log-probability that is not a finite number")
    return Response(sequence[start:total].clone(), generated, truncated)
