"""Changes between versions of weights: lossless for every type and every bit, and refused if they are damaged."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.weights import changes as module
from kuberoll_workers.data.weights.changes import (
    ChangesRefused,
    apply_changes,
    decode_changes,
    encode_changes,
    make_changes,
)
from kuberoll_workers.data.weights.tensors import DTYPES, Tensor, Tensors, bits_type, digest_of

# Of bfloat16: NaNs with payloads, both zeros and infinities, the smallest and the largest numbers.
SPECIAL = [0x7FC0, 0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7F7F]


def copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: dataclasses.replace(tensor, bits=tensor.bits.copy()) for name, tensor in tensors.items()}


def changed(old: Tensors, new: Tensors) -> dict[str, Tensor]:
    """The old ones with the changes, over the wire."""
    result = copied(old)
    apply_changes(decode_changes(encode_changes(make_changes(old, new)), where="here"), result)
    return result


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape) == (other[name].dtype, other[name].shape) and a.bits.tobytes() == other[name].bits.tobytes()
        for name, a in one.items()
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two versions of some tensors, any bits of which may differ."""
    old, new = {}, {}
    for number in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        kind = bits_type(dtype)
        size = draw(st.integers(0, 40))
        values = st.integers(0, numpy.iinfo(kind).max)
        before = numpy.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=kind)
        after = before.copy()
        for place in draw(st.sets(st.integers(0, size - 1))) if size else ():
            after[place] = draw(values)
        old[f"t{number}"] = Tensor(dtype, (size,), before)
        new[f"t{number}"] = Tensor(dtype, (size,), after)
    return old, new


@given(pairs())
def test_changes_of_the_old_are_the_new_bit_by_bit(pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    old, new = pair
    assert same(changed(old, new), new)
    assert same(changed(new, old), old)
    assert (digest_of(old) == digest_of(new)) == same(old, new)


@given(st.permutations(SPECIAL))
def test_nans_zeros_and_infinities_keep_their_bits(values: list[int]) -> None:
    old = {"x": Tensor("BF16", (len(SPECIAL),), numpy.array(SPECIAL, numpy.uint16))}
    new = {"x": Tensor("BF16", (len(SPECIAL),), numpy.array(values, numpy.uint16))}
    assert same(changed(old, new), new)


@pytest.mark.parametrize("block", [1, 7, 300, 1 << 24])
def test_far_changes_and_many_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    old = {"x": Tensor("F32", (3, 1000), numpy.zeros(3000, numpy.uint32))}
    for places in ([0], [2999], [0, 255, 511, 767, 1024], [254, 255, 256], [0, 256, 2999], list(range(3000))):
        after = old["x"].bits.copy()
        after[places] = numpy.arange(1, len(places) + 1) * 0x01020304
        new = {"x": Tensor("F32", (3, 1000), after)}
        assert make_changes(old, new).changed == len(places)
        assert same(changed(old, new), new)


def test_twenty_changes_in_a_row_end_with_the_last() -> None:
    draw = numpy.random.default_rng(1)
    first = {name: Tensor("BF16", (50, 40), draw.integers(0, 1 << 16, 2000, numpy.uint16)) for name in "ab"}
    served, newest = copied(first), copied(first)
    for _ in range(20):
        before = copied(newest)
        for tensor in newest.values():
            places = draw.choice(2000, 60, replace=False)
            tensor.bits[places] += draw.integers(0, 3, 60, numpy.uint16)
        apply_changes(make_changes(before, newest), served)
        assert digest_of(served) == digest_of(newest)
    assert same(served, newest)
    assert not same(served, first)


def test_other_tensors_types_and_shapes_are_refused() -> None:
    bits = numpy.zeros(6, numpy.uint16)
    old = {"x": Tensor("BF16", (2, 3), bits)}
    for new, words in [
        ({"x": Tensor("BF16", (3, 2), bits)}, r"x is BF16 \[2, 3\] in the base, and BF16 \[3, 2\] now"),
        ({"x": Tensor("F16", (2, 3), bits)}, "and F16"),
        ({}, "x is only in the base"),
        ({**old, "y": old["x"]}, "y is only in the new version"),
    ]:
        with pytest.raises(ChangesRefused, match=words):
            make_changes(old, new)
        with pytest.raises(ChangesRefused):
            apply_changes(make_changes(new, new), copied(old))


def test_damaged_changes_are_refused() -> None:
    old = {"x": Tensor("BF16", (2000,), numpy.zeros(2000, numpy.uint16))}
    new = {"x": Tensor("BF16", (2000,), numpy.arange(2000, dtype=numpy.uint16))}
    whole = make_changes(old, new)
    data = encode_changes(whole)
    for damaged in (b"", data[:-1], data[: len(data) // 2], b"\xc1" + data):
        with pytest.raises(ChangesRefused, match="here is damaged"):
            decode_changes(damaged, where="here")
    (block,) = whole.blocks
    for wrong in (
        {"changed": block.changed + 1},
        {"changed": block.changed - 1},
        {"changed": 0},
        {"start": 1},
        {"start": 5000},
        {"gaps": block.steps},
        {"steps": block.gaps},
        {"steps": b"nothing"},
    ):
        bad = msgspec.structs.replace(whole, blocks=[msgspec.structs.replace(block, **wrong)])
        with pytest.raises(ChangesRefused, match="the changes of x from element"):
            apply_changes(bad, copied(old))
    stray = msgspec.structs.replace(whole, blocks=[msgspec.structs.replace(block, name="y")])
    with pytest.raises(ChangesRefused, match="'y'"):
        decode_changes(encode_changes(stray), where="here")
