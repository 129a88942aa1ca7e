"""Message logs flattened and padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.adapters.nemo_rl import batched_message_log_to_flat_message, get_keys_from_message_log
from kuberoll_workers.adapters.nemo_rl.message_logs import message_log_to_flat_messages, token_ids_of


def test_keys_of_messages() -> None:
    log: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "token_ids": 1},
        {"role": "assistant", "content": "b"},
    ]
    assert get_keys_from_message_log(log, ["role", "content"]) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert get_keys_from_message_log(log, ["token_ids"]) == [{"token_ids": 1}, {}]
    assert get_keys_from_message_log(log, []) == [{}, {}]
    assert get_keys_from_message_log([], ["role"]) == []
    # An iterator of keys serves all messages.
    assert get_keys_from_message_log(log, iter(["role"])) == [{"role": "user"}, {"role": "assistant"}]


def test_one_log() -> None:
    flat = message_log_to_flat_messages(
        [{"ids": torch.tensor([1, 2]), "text": "a"}, {"ids": torch.tensor([3]), "mask": torch.tensor([1])}]
    )
    assert flat["ids"].tolist() == [1, 2, 3]
    assert flat["text"] == ["a"]
    assert flat["mask"].tolist() == [1]
    assert message_log_to_flat_messages([]) == {}


def test_tensors_of_different_dimensions_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"tensors for key='ids' must have same number of dimensions"):
        message_log_to_flat_messages([{"ids": torch.ones(2, 2)}, {"ids": torch.ones(2)}])


def test_no_logs_and_no_tensors() -> None:
    batch, lengths = batched_message_log_to_flat_message([])
    assert (len(batch), lengths.numel()) == (0, 0)
    batch, lengths = batched_message_log_to_flat_message([[{"text": "a"}], [{"text": "b"}], [{}]])
    assert (batch["text"], lengths.numel()) == (["a", "b", None], 0)


def test_padding() -> None:
    logs = [[{"ids": torch.tensor([1, 2]), "role": "user"}], [{"ids": torch.tensor([3, 4, 5]), "role": "user"}]]
    batch, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"ids": -100})
    assert batch["ids"].tolist() == [[1, 2, -100], [3, 4, 5]]
    assert (lengths.tolist(), lengths.dtype) == ([2, 3], torch.int32)
    assert batch["role"] == [["user"], ["user"]]
    batch, _ = batched_message_log_to_flat_message(logs, make_sequence_length_divisible_by=8)
    assert batch["ids"].shape == (2, 8)


def test_dtypes_and_devices_must_agree_between_logs() -> None:
    floats = [[{"ids": torch.tensor([1])}], [{"ids": torch.tensor([1.0])}]]
    with pytest.raises(RuntimeError, match="expected consistent types"):
        batched_message_log_to_flat_message(floats)
    elsewhere = [[{"ids": torch.tensor([1])}], [{"ids": torch.tensor([1], device="meta")}]]
    with pytest.raises(RuntimeError, match="expected tensors on the same device"):
        batched_message_log_to_flat_message(elsewhere)


EMPTY = torch.tensor([])


@pytest.mark.parametrize(
    "log",
    [
        [{"token_ids": EMPTY}],
        [{"token_ids": torch.tensor([1, 2])}, {"token_ids": EMPTY}],
        [{"token_ids": EMPTY}, {"token_ids": torch.tensor([1, 2])}, {"token_ids": EMPTY}],
    ],
)
def test_empty_token_ids_make_no_floats(log: list[dict[str, Any]]) -> None:
    assert EMPTY.dtype is torch.float32
    batch, lengths = batched_message_log_to_flat_message([log, [{"token_ids": torch.tensor([7])}]])
    assert batch["token_ids"].dtype is torch.int64
    assert lengths[0] == sum(len(message["token_ids"]) for message in log)


def test_a_log_without_a_key_is_padding_there() -> None:
    # The first log has not been answered yet.
    logs = [
        [{"token_ids": torch.tensor([1, 2, 3])}],
        [
            {"token_ids": torch.tensor([1])},
            {"token_ids": torch.tensor([2]), "generation_logprobs": torch.tensor([-1.0])},
        ],
    ]
    batch, lengths = batched_message_log_to_flat_message(logs)
    assert batch["generation_logprobs"].tolist() == [[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]
    assert lengths.tolist() == [3, 2]


_logs = st.lists(st.lists(st.lists(st.integers(1, 99), max_size=4), min_size=1, max_size=4), min_size=1, max_size=5)


@given(_logs, st.integers(-9, 9), st.integers(1, 5))
def test_against_brute_force(logs: list[list[list[int]]], pad: int, multiple: int) -> None:
    batch, lengths = batched_message_log_to_flat_message(
        [[{"role": "user", "token_ids": torch.tensor(ids)} for ids in log] for log in logs],
        pad_value_dict={"token_ids": pad},
        make_sequence_length_divisible_by=multiple,
    )
    flat = [[token for ids in log for token in ids] for log in logs]
    assert lengths.tolist() == [len(ids) for ids in flat]
    width = max(map(len, flat))
    while width % multiple:
        width += 1
    assert batch["token_ids"].tolist() == [[*ids, *[pad] * (width - len(ids))] for ids in flat]
    assert batch["token_ids"].dtype is torch.int64
    assert batch["role"] == [["user"] * len(log) for log in logs]


def test_token_ids() -> None:
    assert token_ids_of(torch.tensor([1, 2], dtype=torch.int32)).dtype is torch.int64
    assert token_ids_of([1, 2]).tolist() == [1, 2]
    nothing: list[int] = []
    for empty in (nothing, torch.tensor([]), torch.empty(0, dtype=torch.int32)):
        assert token_ids_of(empty).dtype is torch.int64
    for wrong in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([True])):
        with pytest.raises(ValueError, match="whole numbers in a row"):
            token_ids_of(wrong)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_kind_of_nothing_does_not_matter(reverse: bool) -> None:
    """An empty tensor is of floats by accident."""
    logs = [[{"ids": torch.tensor([])}], [{"ids": torch.tensor([1, 2])}]]
    batch, lengths = batched_message_log_to_flat_message(logs[::-1] if reverse else logs)
    rows = [[0, 0], [1, 2]]
    assert batch["ids"].tolist() == (rows[::-1] if reverse else rows)
    assert batch["ids"].dtype is torch.int64
    assert sorted(lengths.tolist()) == [0, 2]
