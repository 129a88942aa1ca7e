"""Batches for policies with NeMo RL's interface, and the checks of their output."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import BatchedDataDict
from kuberoll_workers.policy.interface import PolicyUnavailable

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

    Ids = NDArray[numpy.int64]
    Logprobs = NDArray[numpy.float32]


class IncompleteOutput(PolicyUnavailable, AssertionError):
    """The policy did not return one response for each prompt; NeMo RL raises an AssertionError for it."""


@dataclass(frozen=True, slots=True)
class Response:
    """One row of a policy's output.

    Attributes:
        token_ids: Generated ids, a copy.
        logprobs: One for each id; None if the policy returns none.
        truncated: True if a length limit cut it; None if the policy does not report it.
    """

    token_ids: Ids
    logprobs: Logprobs | None
    truncated: bool | None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A copy of the prompts of a batch, which the policy cannot change.

    Attributes:
        ids: `[prompts, longest]`, padded on the right.
        lengths: Length of each prompt.
    """

    ids: NDArray[Any]
    lengths: list[int]

    @classmethod
    def of(cls, input_ids: Any, input_lengths: Any) -> Prompts:
        """Copy the prompts of a batch in a policy's format."""
        return cls(ids=_ids(input_ids).copy(), lengths=_numbers(input_lengths))


def generation_batch(
    prompts: Sequence[array[int]], stop_strings: Sequence[Sequence[str]], *, pad_token_id: int, batch_type: type[Any]
) -> tuple[Any, Prompts]:
    """Make a batch of prompts in a policy's format.

    Returns:
        A batch with `input_ids`, int64 `[prompts, longest]`, padded on the right, `input_lengths`, int32 `[prompts]`,
        and `stop_strings`, for each prompt a list, or None; and the prompts for `read_responses`.
    """
    import torch

    lengths = [len(prompt) for prompt in prompts]
    ids = numpy.full((len(prompts), max(lengths, default=0)), pad_token_id, dtype=numpy.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = prompt
    batch = batch_type(
        {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": torch.from_numpy(numpy.array(lengths, dtype=numpy.int32)),
            "stop_strings": [list(stops) or None for stops in stop_strings],
        }
    )
    return batch, Prompts(ids=ids.astype(numpy.int32), lengths=lengths)


def read_responses(outputs: Mapping[str, Any], prompts: Prompts) -> list[Response | PolicyUnavailable]:
    """Extract the responses from a policy's output and check them; an invalid row yields an error instead.

    Args:
        outputs: `output_ids` (prompt and response, padded on the right), `unpadded_sequence_lengths`, and optionally
            `logprobs` and `truncated`.
        prompts: The prompts of the batch.

    Raises:
        IncompleteOutput: The output has more or fewer rows than there were prompts.
        PolicyUnavailable: It lacks a column.
        TypeError: It is not a batch.
    """
    if not hasattr(outputs, "get"):
        raise TypeError(f"the policy's output is a {type(outputs).__name__}; it must be a batch of columns")
    if isinstance(outputs, UserDict):
        # A look-up in a UserDict costs ten times as much as in its dict.
        outputs = outputs.data
    for name in ("output_ids", "unpadded_sequence_lengths"):
        if name not in outputs:
            raise PolicyUnavailable(f"the policy's output has no {name}")
    count = len(prompts.lengths)
    sequences, totals = _ids(outputs["output_ids"]), _numbers(outputs["unpadded_sequence_lengths"])
    if len(sequences) != count or len(totals) != count:
        raise IncompleteOutput(f"the policy answered {min(len(sequences), len(totals))} of {count} prompts")
    logprobs, truncated = _column(outputs, "logprobs", count), _column(outputs, "truncated", count)
    return [
        _read(
            row,
            prompts.ids[row, : prompts.lengths[row]],
            sequences[row],
            totals[row],
            None if logprobs is None else _floats(logprobs[row]),
            None if truncated is None else bool(truncated[row]),
        )
        for row in range(count)
    ]


async def collect(stream: Any, count: int, *, pad_token_id: int) -> Any:
    """Collect all that `generate_async` yields into one output, in the order of the prompts.

    Args:
        stream: Yields the number of a prompt, from 0, and its output, a batch of one; in any order.
        count: Number of prompts.

    Raises:
        IncompleteOutput: A prompt has no response, or two.
    """
    items: dict[int, Any] = {}
    try:
        async for index, item in stream:
            number = int(index)
            if number in items or not 0 <= number < count:
                raise IncompleteOutput(
                    f"generate_async yielded prompt {number} of {count} prompts twice or out of range"
                )
            items[number] = item
    finally:
        # Cancelling must reach the generator, which aborts its request.
        if hasattr(stream, "aclose"):
            await stream.aclose()
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
    plain = _plain(column)
    if len(plain) != count:
        raise IncompleteOutput(f"the policy's {name} are of {len(plain)} of {count} prompts")
    return plain


def _ids(tensor: Any) -> Ids:
    ids: Ids = numpy.asarray(_plain(tensor)).astype(numpy.int64, copy=False)
    return ids


def _numbers(tensor: Any) -> list[int]:
    numbers: list[int] = tensor.tolist() if hasattr(tensor, "tolist") else [int(number) for number in tensor]
    return numbers


def _floats(row: Any) -> Logprobs:
    return numpy.asarray(_plain(row), dtype=numpy.float32)


def _plain(column: Any) -> Any:
    """Convert a tensor to a NumPy array, without a copy if possible; other values are returned unchanged."""
    if not hasattr(column, "detach"):
        return column
    try:
        return column.numpy()
    except (TypeError, RuntimeError):
        # On a device, with a gradient, or of a type that NumPy lacks, such as bfloat16.
        plain = column.detach().cpu()
        return (plain.float() if plain.is_floating_point() else plain).numpy()


def _read(
    row: int, prompt: NDArray[Any], sequence: Ids, total: int, logprobs: Logprobs | None, truncated: bool | None
) -> Response | PolicyUnavailable:
    start = len(prompt)
    if not start <= total <= len(sequence):
        return PolicyUnavailable(
            f"the policy's output {row} has {len(sequence)} ids and says that {total} count, for a prompt of {start}"
        )
    if not (sequence[:start] == prompt).all():
        # The response follows another context, but would be trained on as if it followed this prompt.
        return PolicyUnavailable(f"the policy's output {row} does not begin with the prompt that it was given")
    generated = None
    if logprobs is not None:
        generated = logprobs[start:total].copy()
        if len(generated) != total - start:
            return PolicyUnavailable(f"the response has {total - start} token ids but {len(generated)} logprobs")
        if not numpy.isfinite(generated).all():
            return PolicyUnavailable("the response has a log-probability that is not a finite number")
    return Response(sequence[start:total].copy(), generated, truncated)
