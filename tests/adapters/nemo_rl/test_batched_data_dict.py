"""The batch: a dictionary of columns."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any, TypedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.adapters.nemo_rl import BatchedDataDict, batched_message_log_to_flat_message
from kuberoll_workers.adapters.nemo_rl.batched_data_dict import batch_class


class DatumSpec(TypedDict):
    name: str


def batch(size: int = 4) -> BatchedDataDict[DatumSpec]:
    return BatchedDataDict[DatumSpec](
        {"name": [f"s{row}" for row in range(size)], "log": [[row] for row in range(size)], "value": torch.arange(size)}
    )


def names(part: Any) -> list[str]:
    assert part["value"].tolist() == [int(name[1:]) for name in part["name"]]
    return list(part["name"])


def test_it_is_a_dictionary() -> None:
    made = batch()
    assert list(made) == ["name", "log", "value"]
    assert "name" in made
    assert made.get("none", 7) == 7
    made["more"] = [1] * 4
    assert made.get_dict()["more"] == [1] * 4
    assert made.size == 4
    assert BatchedDataDict().size == 0
    assert isinstance(made, BatchedDataDict)


def test_copies_are_shallow_and_pickles_whole() -> None:
    made = batch()
    copied = made.copy()
    assert type(copied) is type(made)
    assert copied["log"] is made["log"]
    copied["name"] = []
    assert len(made["name"]) == 4
    assert copy.deepcopy(made)["log"][0] is not made["log"][0]
    loaded = pickle.loads(pickle.dumps(made))
    assert names(loaded) == names(made)


@pytest.mark.parametrize("indices", [[2, 0], torch.tensor([2, 0]), range(2, -1, -2), [torch.tensor(2), 0]])
def test_select_indices(indices: Any) -> None:
    made = batch()
    part = made.select_indices(indices)
    assert names(part) == ["s2", "s0"]
    assert part["log"][0] is made["log"][2]


def test_select_nothing() -> None:
    none: list[int] = []
    for nothing in (none, torch.tensor([], dtype=torch.int64)):
        part = batch().select_indices(nothing)
        assert names(part) == []
        assert part["value"].dtype is torch.int64


def test_a_mask_selects_what_it_says() -> None:
    mask = torch.tensor([False, True, False, True])
    assert names(batch().select_indices(mask)) == ["s1", "s3"]
    assert names(batch().select_indices(~mask & mask)) == []


def test_select_indices_refuses_what_it_cannot_select() -> None:
    with pytest.raises(TypeError, match="column 'odd' is a dict"):
        BatchedDataDict({"odd": {}}).select_indices([0])


def test_slices() -> None:
    assert names(batch().slice(1, 3)) == ["s1", "s2"]
    assert names(batch().slice(2, 4)) == ["s2", "s3"]
    with pytest.raises(AssertionError, match="no slice 3:5"):
        batch().slice(3, 5)
    assert [names(part) for part in batch().make_microbatch_iterator(2)] == [["s0", "s1"], ["s2", "s3"]]
    with pytest.raises(AssertionError, match="not a multiple"):
        list(batch().make_microbatch_iterator(3))


def test_repeat_interleave_shares_nothing() -> None:
    repeated = batch(2).repeat_interleave(3)
    assert names(repeated) == ["s0", "s0", "s0", "s1", "s1", "s1"]
    repeated["log"][0].append("changed")
    assert repeated["log"][1] == [0]


def test_reorder() -> None:
    made = batch()
    made.reorder_data([3, 1, 0, 2])
    assert names(made) == ["s2", "s1", "s3", "s0"]


def test_to_and_truncate() -> None:
    made = BatchedDataDict[Any]({"ids": torch.ones(2, 5), "lengths": torch.ones(2), "text": ["a", "b"]})
    assert made.to("meta") is made
    assert made["ids"].device.type == "meta"
    made.truncate_tensors(dim=1, truncated_len=3)
    assert (made["ids"].shape, made["lengths"].shape) == ((2, 3), (2,))
    assert made.get_multimodal_dict() == {}


@pytest.mark.parametrize(
    ("size", "arguments", "expected"),
    [
        (8, {"shards": 2, "batch_size": 4}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (8, {"shards": 2, "batch_size": 2}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (4, {"shards": 2}, [[0, 1], [2, 3]]),
        (8, {"shards": 1, "batch_size": 2}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (5, {"shards": 2, "allow_uneven_shards": True}, [[0, 1, 2], [3, 4]]),
        (2, {"shards": 4, "allow_uneven_shards": True}, [[0], [1], [], []]),
    ],
)
def test_shards(size: int, arguments: Any, expected: list[list[int]]) -> None:
    shards = batch(size).shard_by_batch_size(**arguments)
    assert [names(shard) for shard in shards] == [[f"s{row}" for row in rows] for rows in expected]


def test_shards_that_cannot_be() -> None:
    with pytest.raises(AssertionError, match=r"Total batch size.*is not a multiple of batch_size"):
        batch(10).shard_by_batch_size(shards=2, batch_size=3)
    with pytest.raises(AssertionError, match=r"Batch size.*is not a multiple of shards"):
        batch(8).shard_by_batch_size(shards=3, batch_size=4)
    uneven = BatchedDataDict[Any]({"a": [1, 2], "b": [1]})
    with pytest.raises(AssertionError, match="Batch sizes are not the same across the rollout batch"):
        uneven.shard_by_batch_size(shards=1)
    for name in ("sequence_packing_args", "dynamic_batching_args"):
        options: dict[str, Any] = {"shards": 1, name: {}}
        with pytest.raises(NotImplementedError):
            batch().shard_by_batch_size(**options)
    with pytest.raises(AssertionError, match="batch_size excludes allow_uneven_shards"):
        batch().shard_by_batch_size(shards=2, batch_size=2, allow_uneven_shards=True)
    with pytest.raises(AssertionError, match="an empty batch has no shards"):
        batch(0).shard_by_batch_size(shards=1)


def test_chunks() -> None:
    assert names(batch(6).chunk(2, 3)) == ["s4", "s5"]
    assert names(batch(6).chunk(0, 3)) == ["s0", "s1"]
    with pytest.raises(AssertionError, match="not a multiple"):
        batch(5).chunk(0, 2)
    for rank in (-1, 3):
        with pytest.raises(AssertionError, match=f"there is no chunk {rank} of 3"):
            batch(6).chunk(rank, 3)


_batches = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5)).flatmap(
        lambda shape: st.lists(
            st.lists(st.integers(1, 9), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
        ).map(lambda rows: torch.tensor(rows, dtype=torch.int64).reshape(shape))
    ),
    min_size=1,
    max_size=4,
)


@given(_batches, st.integers(-3, 3))
def test_from_batches_pads_on_the_right(tensors: list[torch.Tensor], pad: int) -> None:
    batches = [
        {"ids": tensor, "lengths": torch.full((len(tensor),), tensor.shape[1]), "text": ["t"] * len(tensor)}
        for tensor in tensors
    ]
    joined: Any = BatchedDataDict.from_batches(batches, pad_value_dict={"ids": pad})
    longest = max(tensor.shape[1] for tensor in tensors)
    rows = [[*row, *[pad] * (longest - len(row))] for tensor in tensors for row in tensor.tolist()]
    assert joined["ids"].tolist() == rows
    assert joined["ids"].dtype is torch.int64
    assert len(joined["lengths"]) == len(joined["text"]) == len(rows)


def test_from_batches_of_features_and_of_nothing() -> None:
    joined: Any = BatchedDataDict.from_batches([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(2, 4, 3)}])
    assert joined["x"].shape == (3, 4, 3)
    assert joined["x"][0, 2:].sum() == 0
    assert BatchedDataDict.from_batches([]) == {}
    routes: Any = BatchedDataDict.from_batches([{"x": torch.ones(1, 2, 3, 4)}, {"x": torch.ones(1, 1, 3, 4)}])
    assert (routes["x"].shape, routes["x"].sum()) == ((2, 2, 3, 4), 36)
    with pytest.raises(NotImplementedError, match="column 'x' is of dict"):
        BatchedDataDict.from_batches([{"x": {}}])
    with pytest.raises(NotImplementedError, match="tensors with a dimension"):
        BatchedDataDict.from_batches([{"x": torch.tensor(1)}])


def test_from_batches_drops_no_column() -> None:
    for parts in ([{"x": [1]}, {"x": [2], "y": [3]}], [{"x": [1], "y": [3]}, {"x": [2]}]):
        with pytest.raises(KeyError, match="y"):
            BatchedDataDict.from_batches(parts)
    assert BatchedDataDict.from_batches([{}, {"x": [1]}, {}]) == {"x": [1]}


def test_batches_are_of_the_caller_s_class() -> None:
    class Theirs(BatchedDataDict[Any]):
        pass

    assert batch_class(Theirs()) is Theirs
    assert batch_class({}) is BatchedDataDict
    assert batch_class() is BatchedDataDict
    # What can only be selected from, or only be joined, is no class of batches.
    assert batch_class(types.SimpleNamespace()) is BatchedDataDict
    for name in ("from_batches", "select_indices"):
        assert batch_class(type("Half", (), {name: None})()) is BatchedDataDict


def test_batches_are_of_nemo_rl_s_class_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(BatchedDataDict[Any]):
        pass

    module: Any = types.ModuleType("nemo_rl.distributed.batched_data_dict")
    module.BatchedDataDict = Theirs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert batch_class() is batch_class({}) is Theirs
    assert type(batch_class(BatchedDataDict())()) is BatchedDataDict
    for log in ([{"ids": torch.tensor([1])}], [{"text": "a"}]):
        assert type(batched_message_log_to_flat_message([log])[0]) is Theirs


def test_all_kinds_of_a_mixed_column_are_named() -> None:
    with pytest.raises(NotImplementedError, match="column 'x' is of int, str; only lists"):
        BatchedDataDict.from_batches([{"x": 1}, {"x": "text"}])
