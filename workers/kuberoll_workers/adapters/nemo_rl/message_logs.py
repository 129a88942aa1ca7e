"""NeMo RL's message logs: lists of messages with texts and tensors, flattened and padded for a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import BatchedDataDict, batch_class

if TYPE_CHECKING:
    import torch

MessageLog = list[dict[str, Any]]
"""Messages: `role`, `content`, `token_ids` and, of an assistant, `generation_logprobs`."""

TOKEN_IDS = "token_ids"


def get_keys_from_message_log(message_log: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> MessageLog:
    """The messages with these keys only, where they have them; values are shared."""
    wanted = list(keys)
    return [{key: message[key] for key in wanted if key in message} for message in message_log]


def message_log_to_flat_messages(message_log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One log as one message: tensors of the same key one after the other, everything else in lists.

    Raises:
        RuntimeError: Tensors of one key differ in their number of dimensions.
    """
    import torch

    gathered: dict[str, list[Any]] = {}
    for message in message_log:
        for key, value in message.items():
            gathered.setdefault(key, []).append(value)
    return {
        key: _concatenated(key, values) if isinstance(values[0], torch.Tensor) else values
        for key, values in gathered.items()
    }


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
    pad_value_dict: Mapping[str, float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """Flatten logs and pad them on the right to the longest.

    Args:
        pad_value_dict: What a key is padded with, where that is not 0.
        make_sequence_length_divisible_by: The padded length is rounded up to a multiple of it.

    Returns:
        The padded batch, tensors `[logs, length]` and lists of everything else, and the lengths before padding,
        int32 `[logs]`; empty where nothing is a tensor. A log that lacks a key that is a tensor in others has padding
        there.

    Raises:
        RuntimeError: Tensors of one key differ in dtype or device between logs.
    """
    import torch

    flat = [message_log_to_flat_messages(log) for log in message_log_batch]
    keys = list(dict.fromkeys(key for log in flat for key in log))
    tensors = [key for key in keys if any(isinstance(log.get(key), torch.Tensor) for log in flat)]
    if not tensors:
        first = {key: [log[key][0] if key in log else None for log in flat] for key in keys}
        return batch_class()(first), torch.empty(0, dtype=torch.int32)
    # The longest of a log's tensors: prompts have token ids but no log-probabilities.
    lengths = [max((len(log[key]) for key in tensors if key in log), default=0) for log in flat]
    multiple = make_sequence_length_divisible_by
    length = -(-max(lengths) // multiple) * multiple
    pad_values = pad_value_dict or {}
    batch: BatchedDataDict[Any] = batch_class()()
    for key in keys:
        values = [log.get(key) for log in flat]
        batch[key] = _padded(key, values, length, pad_values.get(key, 0)) if key in tensors else values
    return batch, torch.tensor(lengths, dtype=torch.int32)


def token_ids_of(ids: Any) -> torch.Tensor:
    """Token ids as int64 on the CPU: a tokenizer makes floats of an empty text.

    Raises:
        ValueError: They are no whole numbers, or not in a row.
    """
    import torch

    tensor = torch.as_tensor(ids).detach().cpu()
    if tensor.dtype is torch.int64 and tensor.dim() == 1:
        return tensor
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ValueError(
            f"token ids must be whole numbers in a row; found {tensor.dtype} of shape {list(tensor.shape)}"
        )
    return tensor.to(torch.int64)


def _concatenated(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    import torch

    filled = [tensor for tensor in tensors if tensor.numel() > 0 or tensor.dim() != 1]
    if not filled:
        # The dtype of nothing is an accident, and float token ids would make floats of all that follow.
        return torch.empty(0, dtype=torch.int64) if key == TOKEN_IDS else torch.cat(tensors)
    if len({tensor.dim() for tensor in filled}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in filled)
        raise RuntimeError(f"tensors for key={key!r} must have same number of dimensions: {shapes}")
    return torch.cat(filled)


def _padded(key: str, values: list[torch.Tensor | None], length: int, pad_value: float) -> torch.Tensor:
    given = [value for value in values if value is not None]
    typed = [value for value in given if value.numel() > 0] or given
    if len({value.dtype for value in typed}) > 1:
        raise RuntimeError(f"expected consistent types but got: {[value.dtype for value in typed]} for key={key!r}")
    if len({value.device for value in given}) > 1:
        devices = [value.device for value in given]
        raise RuntimeError(f"expected tensors on the same device but got: {devices} for key={key!r}")
    example = typed[0]
    padded = example.new_full((len(values), length, *example.shape[1:]), pad_value)
    for row, value in enumerate(values):
        if value is not None and value.numel() > 0:
            padded[row, : len(value)] = value
    return padded
